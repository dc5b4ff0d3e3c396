"""EAGLE-1 and EAGLE-2 checkpoints: one layer without a first norm, `fc` over [embedding, feature], the target's head.

EAGLE-2 has the same weights; only the tree differs. Names may carry a `model.` prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.model.decoder import Decoder
from foretell.model.layers import fill
from foretell.spec.checkpoint.intake import Intake
from foretell.spec.checkpoint.layers import count_layers, fill_first, fill_layer, layer_config
from foretell.spec.checkpoint.source import Checkpoint
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.eagle import FeatureNet, Fusion, FusionNet, Parts
from foretell.spec.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class EagleReading:
    """What was read: EAGLE of any version, or MTP."""

    net: FeatureNet
    taps: tuple[int, ...]  # target features it reads, as Decoder.forward numbers them
    vocabulary: Vocabulary
    notes: tuple[str, ...]


def read_eagle(checkpoint: Checkpoint, target: Decoder) -> EagleReading:
    """Build an EAGLE-1/2 network for `target`.

    Raises:
        ValueError: names the key or tensor and the remedy.
    """
    config, base = checkpoint.config, target.config
    intake = Intake(
        checkpoint, target.dtype, target.device, lambda name: name.removeprefix("model.")
    )
    intake.put_aside([n for n in intake.names if n.endswith("rotary_emb.inv_freq")], "recomputed")
    check_target(intake, config.get("hidden_size"), target)
    check_vocabulary(intake, config.get("vocab_size"), target)
    layers = count_layers(intake)
    shape = layer_config(intake, config, layers, "layers.0.", base.vocab_size)
    fusion = Fusion(fc_bias=_fc_bias(intake))
    own_embedding = base.vocab_size if "embed_tokens.weight" in intake else 0
    own_head = base.vocab_size if "lm_head.weight" in intake else 0
    parts = Parts(shape, own_embedding, own_head, float(config.get("logit_scale", 1.0)))
    net = FusionNet(parts, fusion, target.dtype, target.ops)
    hidden = shape.hidden_size
    fill(net, "fc.weight", intake.take("fc.weight", hidden, 2 * hidden))
    if fusion.fc_bias:
        fill(net, "fc.bias", intake.take("fc.bias", hidden))
    fill_ends(net, intake, parts)
    fill_first(net, "first", intake, "layers.0.", shape, hidden)
    for i in range(1, layers):
        fill_layer(net, f"layers.{i - 1}", intake, f"layers.{i}.", shape)
    intake.close(
        "fc, layers.{i}.*, and optionally embed_tokens and lm_head (EAGLE-1/2 has no input_layernorm in layer 0 "
        "and no norm)"
    )
    intake.note(f"EAGLE-1/2: {layers} layer{'s' * (layers > 1)} on the target's final hidden state")
    return EagleReading(net, (-1,), whole(base.vocab_size, target.device), tuple(intake.notes))


def fill_ends(net: FusionNet, intake: Intake, parts: Parts) -> None:
    """Own embedding and head, or a note that the target's are used."""
    hidden = parts.layer.hidden_size
    for path, name, rows in (
        ("embedding", "embed_tokens.weight", parts.own_embedding),
        ("head.weight", "lm_head.weight", parts.own_head),
    ):
        if rows:
            fill(net, path, intake.take(name, rows, hidden))
        intake.note(
            f"{name.removesuffix('.weight')}: {'its own' if rows else 'the target' + chr(39) + 's'}"
        )


def check_target(intake: Intake, hidden: object, target: Decoder) -> None:
    """Refuse a drafter for another hidden size."""
    if hidden != target.config.hidden_size:
        raise intake.refuse(
            f"a drafter on hidden size {hidden} cannot read a target of hidden size {target.config.hidden_size}; use "
            "the drafter trained for this target"
        )


def check_vocabulary(intake: Intake, size: object, target: Decoder) -> None:
    """Refuse a drafter for another vocabulary."""
    if size is not None and size != target.config.vocab_size:
        raise intake.refuse(
            f"config.json says vocab_size={size}, the target has {target.config.vocab_size}; use the drafter trained "
            "for this target"
        )


def _fc_bias(intake: Intake) -> bool:
    """The file decides; a config that promises a bias over a file without one is refused."""
    present, declared = "fc.bias" in intake, intake.checkpoint.config.get("bias")
    if declared and not present:
        raise intake.refuse(
            "config.json says bias=true, but tensor 'fc.bias' is missing; set bias to false if the drafter was trained "
            "without it"
        )
    if declared is None:
        intake.note(
            f"config.json says nothing of the bias of fc; the file {'has one' if present else 'has none'}"
        )
    elif present and not declared:
        intake.note("config.json says bias=false, but the file has fc.bias: using it")
    return present
