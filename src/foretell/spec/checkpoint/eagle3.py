"""EAGLE-3 checkpoints, in all the names they come in: SafeAILab, SpecForge/SGLang, vLLM/speculators, ModelOpt.

Two decisions are made in the open: which target layers are meant (two conventions share one key), and what a missing
`norm_before_residual` means. Both are noted, and the layers can be given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from foretell.model.decoder import Decoder
from foretell.model.layers import fill
from foretell.spec.checkpoint.eagle import EagleReading, check_target, check_vocabulary
from foretell.spec.checkpoint.intake import Intake
from foretell.spec.checkpoint.layers import (
    count_layers,
    fill_first,
    fill_layer,
    layer_config,
    take_norm,
)
from foretell.spec.checkpoint.source import Checkpoint, Config
from foretell.spec.checkpoint.vocabularies import from_offsets, whole
from foretell.spec.eagle import Concat, Eagle3Net, Parts
from foretell.spec.vocabulary import Vocabulary

LAYER_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class LayerIds(StrEnum):
    """What number j means in a list of target layers."""

    AFTER = "after"  # the hidden state after j layers, 0 = the embeddings: vLLM, speculators
    OUTPUT = "output"  # the output of layer j, counted from 0: SGLang, SpecForge


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the user says about an EAGLE-3 checkpoint against its own word.

    Args:
        layers: target layers to read, in the sense of `layer_ids` (default: after j layers).
        layer_ids: the convention of the config's list, or of `layers`.
        norm_before_residual: instead of the config's.
    """

    layers: tuple[int, ...] | None = None
    layer_ids: LayerIds | None = None
    norm_before_residual: bool | None = None


@dataclass(frozen=True, slots=True)
class _Config:
    """A draft config, whether flat or in speculators' form."""

    top: Config  # where flags are
    layer: Config  # where the layer's shape is
    speculators: str | None  # its speculators_model_type

    def get(self, key: str, default: Any = None) -> Any:
        """A setting from the top or from `eagle_config`."""
        nested = self.top.get("eagle_config") or {}
        return self.top.get(key, nested.get(key, default))


def read_eagle3(
    checkpoint: Checkpoint, target: Decoder, overrides: Overrides | None = None
) -> EagleReading:
    """Build an EAGLE-3 network for `target`.

    Raises:
        ValueError: names the key or tensor and the remedy.
    """
    overrides = overrides or Overrides()
    config, base = _config(checkpoint), target.config
    intake = Intake(checkpoint, target.dtype, target.device, _rename)
    intake.put_aside([n for n in intake.names if n.endswith("rotary_emb.inv_freq")], "recomputed")
    hidden = config.layer.get("hidden_size")
    target_hidden: int = config.get("target_hidden_size") or hidden or 0
    check_target(intake, target_hidden, target)
    check_vocabulary(intake, config.layer.get("vocab_size"), target)
    layers = count_layers(intake)
    shape = layer_config(intake, config.layer, layers, "layers.0.", base.vocab_size)
    concat = _concat(intake, config, target_hidden, overrides)
    taps = target_layers(intake, config.top, base.layers, concat, overrides)
    vocabulary, own_head = _vocabulary(intake, config, target)
    own_embedding = base.vocab_size if "embed_tokens.weight" in intake else 0
    if not own_embedding and hidden != base.hidden_size:
        raise intake.refuse(
            f"tensor 'embed_tokens.weight' is missing, and the target's embedding of width {base.hidden_size} does not "
            f"fit a drafter of width {hidden}; export the drafter's embedding"
        )
    parts = Parts(shape, own_embedding, own_head, float(config.get("logit_scale", 1.0)))
    net = Eagle3Net(parts, concat, target.dtype, target.ops)
    _fill(net, intake, parts, concat)
    intake.close(
        "fc, midlayer.* or layers.{i}.*, norm, d2t, t2d, and optionally lm_head and embed_tokens"
    )
    intake.note(
        f"EAGLE-3: {layers} layer{'s' * (layers > 1)}, draft vocabulary {own_head or base.vocab_size}"
    )
    return EagleReading(net, taps, vocabulary, tuple(intake.notes))


def _rename(name: str) -> str:
    name = name.removeprefix("model.")
    midlayer = name.startswith("midlayer.")
    return "layers.0." + name.removeprefix("midlayer.") if midlayer else name


def _config(checkpoint: Checkpoint) -> _Config:
    top = checkpoint.config
    kind = top.get("speculators_model_type")
    layer = top.get("transformer_layer_config")
    if layer is None:
        return _Config(top, top, kind)
    if not isinstance(layer, Mapping):
        raise ValueError(
            f"{checkpoint.name}: transformer_layer_config must be an object, got {layer!r}"
        )
    return _Config(top, layer, kind)


def _concat(intake: Intake, config: _Config, target_hidden: int, overrides: Overrides) -> Concat:
    """Flags, and how many features `fc` joins."""
    flags = {name: config.get(name) for name in FLAGS}
    if overrides.norm_before_residual is not None:
        flags["norm_before_residual"] = overrides.norm_before_residual
    if flags["norm_before_residual"] is None and config.speculators is not None:
        intake.note(
            "config.json does not say norm_before_residual: false, as its format's own default (some engines say true)"
        )
    for name, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        present = tensor in intake
        if flags[name] is None and present:
            intake.note(f"config.json does not say {name}, but the file has {tensor}: using it")
            flags[name] = True
        if bool(flags[name]) != present:
            said = f"{name}={str(bool(flags[name])).lower()}"
            raise intake.refuse(
                f"config.json says {said}, but tensor {tensor!r} is {'there' if present else 'missing'}; make them "
                "agree"
            )
    used = config.get("use_aux_hidden_state", True)
    if not used:
        if "fc.weight" in intake:
            raise intake.refuse(
                "config.json says use_aux_hidden_state=false, but tensor 'fc.weight' is there; make them agree"
            )
        return Concat(1, target_hidden, False, False, **{k: bool(v) for k, v in flags.items()})
    width = intake.shape("fc.weight")[1]
    chunks, rest = divmod(width, target_hidden)
    declared = config.get("num_aux_hidden_states")
    if rest or (declared is not None and declared != chunks):
        raise intake.refuse(
            f"fc.weight reads {width} channels, which is not {declared or 3} features of width {target_hidden}; is "
            "this the drafter of another target?"
        )
    on = [name for name, value in flags.items() if value]
    intake.note(f"fc joins {chunks} features" + (f"; {', '.join(on)}" if on else ""))
    return Concat(
        chunks, target_hidden, True, "fc.bias" in intake, **{k: bool(v) for k, v in flags.items()}
    )


def target_layers(
    intake: Intake, config: Config, layers: int, concat: Concat, overrides: Overrides
) -> tuple[int, ...]:
    """Which target features are read, as hidden states after so many layers.

    Args:
        layers: L, of the target.

    Raises:
        ValueError: an id is beyond the target, named twice, or their number does not fit `fc`.
    """
    if not concat.fc:
        intake.note("reads the target's final hidden state (use_aux_hidden_state=false)")
        return (-1,)
    ids, convention, origin = _layer_ids(config, layers, overrides)
    taps = tuple(j + (convention is LayerIds.OUTPUT) for j in ids)
    taps = tuple(sorted(taps))  # the originals collect them in the order the target computes them
    said = (
        f"target layers {list(ids)} from {origin}, read as {convention.value!r}: hidden states after "
        f"{list(taps)} layers"
    )
    if len(set(taps)) != len(taps) or not all(0 <= tap <= layers for tap in taps):
        raise intake.refuse(
            f"{said}; they must be different and within the target's {layers} layers. Give layers that exist, or use "
            "the drafter of this target"
        )
    if len(taps) != concat.chunks:
        raise intake.refuse(
            f"{said}; fc.weight joins {concat.chunks} features. Give as many layers"
        )
    intake.note(said)
    return taps


def _layer_ids(
    config: Config, layers: int, overrides: Overrides
) -> tuple[tuple[int, ...], LayerIds, str]:
    """(ids, their convention, where they come from)."""
    if overrides.layers is not None:
        return overrides.layers, overrides.layer_ids or LayerIds.AFTER, "the user"
    nested = config.get("eagle_config") or {}
    for place, values in (("config.json", config), ("eagle_config", nested)):
        for key in LAYER_KEYS:
            if values.get(key) is not None:
                ids = tuple(int(j) for j in values[key])
                known = "speculators_model_type" in config
                convention = overrides.layer_ids or (LayerIds.AFTER if known else LayerIds.OUTPUT)
                return ids, convention, f"{key} in {place}"
    return (2, layers // 2, layers - 3), LayerIds.AFTER, "the default (2, L // 2, L - 3)"


def _vocabulary(intake: Intake, config: _Config, target: Decoder) -> tuple[Vocabulary, int]:
    """(the draft's vocabulary, rows of its own head; 0 = the target's head)."""
    size, hidden = target.config.vocab_size, config.layer["hidden_size"]
    own = intake.shape("lm_head.weight")[0] if "lm_head.weight" in intake else 0
    declared = config.get("draft_vocab_size") or own or size
    if own and declared != own:
        raise intake.refuse(
            f"config.json says draft_vocab_size={declared}, but lm_head.weight has {own} rows; make them agree"
        )
    if not own and (declared != size or hidden != target.config.hidden_size):
        raise intake.refuse(
            f"tensor 'lm_head.weight' is missing, and the target's head ({size} rows of {target.config.hidden_size}) "
            f"does not fit a drafter with draft_vocab_size={declared} and width {hidden}; export the drafter's head"
        )
    intake.note(f"lm_head: {'its own' if own else 'the target’s'}")
    if "d2t" not in intake:
        if declared != size:
            raise intake.refuse(
                f"draft_vocab_size={declared} is not the target's {size}, but tensor 'd2t' is missing; without the map "
                "draft ids mean nothing. Export it"
            )
        intake.put_aside(["t2d"], "no reduced vocabulary")
        return whole(size, target.device), own
    d2t = intake.take_numbers("d2t", declared)
    vocabulary = from_offsets(intake, d2t, size)
    if "t2d" in intake:
        member = intake.take_numbers("t2d", size) != 0
        if int(member.sum()) != declared or not bool(
            member[vocabulary.noise_ids.cpu().long()].all()
        ):
            raise intake.refuse(
                "t2d and d2t name different tokens; export both from the same training run"
            )
    return vocabulary, own


def _fill(net: Eagle3Net, intake: Intake, parts: Parts, concat: Concat) -> None:
    config = parts.layer
    hidden, width = config.hidden_size, concat.chunks * concat.target_hidden
    if concat.fc:
        fill(net, "fc.weight", intake.take("fc.weight", hidden, width))
    if concat.fc_bias:
        fill(net, "fc.bias", intake.take("fc.bias", hidden))
    if concat.norm_before_fc:
        fill(net, "features_norm.weight", take_norm(intake, "input_norm.weight", config, width))
    for i in range(concat.chunks if concat.fc_norm else 0):
        norm = take_norm(intake, f"fc_norm.{i}.weight", config, concat.target_hidden)
        fill(net, f"chunk_norms.{i}.weight", norm)
    for path, name in (
        ("embedding_norm", "layers.0.input_layernorm"),
        ("hidden_norm", "layers.0.hidden_norm"),
        ("norm", "norm"),
    ):
        fill(net, f"{path}.weight", take_norm(intake, f"{name}.weight", config))
    if parts.own_embedding:
        fill(net, "embedding", intake.take("embed_tokens.weight", parts.own_embedding, hidden))
    if parts.own_head:
        fill(net, "head.weight", intake.take("lm_head.weight", parts.own_head, hidden))
    intake.note(f"embed_tokens: {'its own' if parts.own_embedding else 'the target’s'}")
    fill_first(net, "first", intake, "layers.0.", config, 2 * hidden)
    for i in range(1, config.layers):
        fill_layer(net, f"layers.{i - 1}", intake, f"layers.{i}.", config)
