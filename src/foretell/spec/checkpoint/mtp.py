"""MTP heads inside a target's own checkpoint: families as data.

A family says under which prefixes its tensors lie and how its network joins embedding and feature (`Fusion`). The layer
itself is an ordinary one, or one with gated attention. Embedding and head are the target's where the checkpoint brings
none. The target's other tensors are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from foretell.model.decoder import Decoder
from foretell.model.layers import fill
from foretell.spec.checkpoint.eagle import EagleReading, check_target, check_vocabulary, fill_ends
from foretell.spec.checkpoint.intake import Intake
from foretell.spec.checkpoint.layers import (
    PLAIN,
    Style,
    count_layers,
    fill_layer,
    layer_config,
    take_norm,
)
from foretell.spec.checkpoint.source import Checkpoint
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.eagle import Fusion, FusionNet, Parts


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """How one family writes its MTP layers.

    `names` maps its names, below `prefix`, to ours; what follows `layer` is a layer in Llama's names.
    """

    prefix: re.Pattern[str]
    names: Mapping[str, str]
    layer: str
    fusion: Fusion
    count_key: str  # config key for how many layers there are
    style: Style = PLAIN


FAMILIES: Mapping[str, MtpFamily] = {
    # Qwen3-Next, Qwen3.5: norms on both inputs, embedding first, the normed output is fed back.
    "qwen3_next": MtpFamily(
        prefix=re.compile(r"^mtp\."),
        names={
            "fc.weight": "fc",
            "pre_fc_norm_embedding.weight": "embedding_norm",
            "pre_fc_norm_hidden.weight": "feature_norm",
            "norm.weight": "norm",
        },
        layer="layers.",
        fusion=Fusion(input_norms=True, first_norm=True, final_norm=True, feed_back_normed=True),
        count_key="mtp_num_hidden_layers",
        style=Style(gated=True, plus_one=True),
    ),
    # MiMo: the feature comes first; the normed output is fed back.
    "mimo": MtpFamily(
        prefix=re.compile(r"^model\.mtp_layers\.0\."),
        names={
            "input_proj.weight": "fc",
            "token_layernorm.weight": "embedding_norm",
            "hidden_layernorm.weight": "feature_norm",
            "final_layernorm.weight": "norm",
        },
        layer="",
        fusion=Fusion(
            input_norms=True,
            feature_first=True,
            first_norm=True,
            final_norm=True,
            feed_back_normed=True,
        ),
        count_key="num_nextn_predict_layers",
    ),
}


def family_of(checkpoint: Checkpoint) -> str:
    """Which family's names the checkpoint has.

    Raises:
        ValueError: none that is known.
    """
    for name, family in FAMILIES.items():
        if any(family.prefix.match(tensor) for tensor in checkpoint.shapes):
            return name
    raise ValueError(
        f"{checkpoint.name} has multi-token-prediction layers of a family that is not supported; supported are "
        f"{', '.join(FAMILIES)}. Use another drafter, or none"
    )


def read_mtp(checkpoint: Checkpoint, target: Decoder) -> EagleReading:
    """Build the MTP network of `target`'s own checkpoint.

    Raises:
        ValueError: names the key or tensor and the remedy.
    """
    name = family_of(checkpoint)
    family, base = FAMILIES[name], target.config
    config = checkpoint.config.get("text_config") or checkpoint.config

    def rename(tensor: str) -> str | None:
        match = family.prefix.match(tensor)
        if match is None:
            return None
        rest = tensor[match.end() :]
        if rest in family.names:
            return family.names[rest]
        return rest if family.layer else f"layers.0.{rest}"

    intake = Intake(checkpoint, target.dtype, target.device, rename)
    check_target(intake, config.get("hidden_size"), target)
    check_vocabulary(intake, config.get("vocab_size"), target)
    layers = count_layers(intake)
    declared = config.get(family.count_key, layers)
    if family.layer and declared != layers:
        raise intake.refuse(
            f"config.json says {family.count_key}={declared}, the tensors have {layers}; make them agree"
        )
    own = {**config, "num_hidden_layers": layers, "layer_types": None}
    shape = layer_config(intake, own, layers, "layers.0.", base.vocab_size, family.style)
    parts = Parts(shape, own_embedding=0, own_head=0)
    net = FusionNet(parts, family.fusion, target.dtype, target.ops)
    hidden = shape.hidden_size
    fill(net, "fc.weight", intake.take("fc", hidden, 2 * hidden))
    for norm in ("embedding_norm", "feature_norm", "norm"):
        fill(net, f"{norm}.weight", take_norm(intake, norm, shape))
    for i in range(layers):
        fill_layer(net, f"layers.{i}", intake, f"layers.{i}.", shape)
    fill_ends(net, intake, parts)
    intake.close(f"the names of family {name!r}")
    intake.note(
        f"MTP of family {name!r}: {layers} layer{'s' * (layers > 1)} on the target's final hidden state"
    )
    return EagleReading(net, (-1,), whole(base.vocab_size, target.device), tuple(intake.notes))
