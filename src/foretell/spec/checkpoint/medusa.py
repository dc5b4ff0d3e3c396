"""Medusa heads as they are published: FasterDecoding's files, full Medusa-1.0 models, and heads converted for vLLM.

Heads and layers are counted from the tensors: published configs say 2 heads over files with 5. In a full model the
tensors outside `medusa_head.` are the target's own and not looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.spec.checkpoint.intake import Intake
from foretell.spec.checkpoint.source import Checkpoint
from foretell.spec.checkpoint.vocabularies import reduced, whole
from foretell.spec.medusa import MedusaHeads
from foretell.spec.vocabulary import Vocabulary

HEAD_PREFIX = "medusa_head."  # in full models; what lies under it is not the target's
ORIGINAL = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.(?:linear\.)?(?:weight|bias)$")
CONVERTED = re.compile(
    r"^(?:medusa_heads\.)?(?:blocks\.\d+\.layers\.\d+\.(?:weight|bias)|lm_heads\.\d+\.weight)$"
)


@dataclass(frozen=True, slots=True)
class MedusaReading:
    """What was read."""

    net: MedusaHeads
    vocabulary: Vocabulary
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Names:
    """How a layout names its tensors, and how many there are."""

    heads: int
    layers: int
    weight: str  # of head {i}, layer {j}
    bias: str
    output: str  # of head {i}


def is_full_model(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint holds the target too."""
    return any(name.startswith(HEAD_PREFIX) for name in checkpoint.shapes) and any(
        not ORIGINAL.match(name) for name in checkpoint.shapes
    )


def read_medusa(checkpoint: Checkpoint, target: Decoder) -> MedusaReading:
    """Build the heads for `target`.

    Raises:
        ValueError: the config is cut short or contradicts the tensors, a tensor is missing, unknown, mis-shaped or not
            finite, or the heads are another target's; names the key or tensor and the remedy.
    """
    full = is_full_model(checkpoint)

    def rename(name: str) -> str | None:
        if full and not name.startswith(HEAD_PREFIX):
            return None
        return name.removeprefix("medusa_heads.").removeprefix(HEAD_PREFIX)

    intake = Intake(checkpoint, target.dtype, target.device, rename)
    names = _count(intake)
    _compare_counts(intake, names)
    _check_target(intake, names, target)
    weight, bias = _blocks(intake, names, target.config.hidden_size)
    vocabulary, rows = _vocabulary(intake, names, target)
    output = _outputs(intake, names, rows, target)
    intake.close(
        "head tensors like 0.0.linear.weight and 0.1.weight, or blocks.0.layers.0.weight and lm_heads.0.weight"
    )
    scale = float(checkpoint.config.get("logit_scale", 1.0)) if "blocks" in names.weight else 1.0
    kind = "full model" if full else "heads"
    intake.note(f"Medusa {kind}: {names.heads} heads of {names.layers} layers")
    return MedusaReading(MedusaHeads(weight, bias, output, scale), vocabulary, tuple(intake.notes))


def _count(intake: Intake) -> _Names:
    converted = [re.match(r"blocks\.(\d+)\.layers\.(\d+)\.weight$", name) for name in intake.names]
    original = [re.match(r"(\d+)\.(\d+)\.linear\.weight$", name) for name in intake.names]
    places = [(int(m[1]), int(m[2])) for m in (*converted, *original) if m is not None]
    if not places:
        raise intake.refuse(
            "no Medusa head found: no tensor is named like 0.0.linear.weight or blocks.0.layers.0.weight; give the "
            "method that fits the checkpoint"
        )
    heads, layers = 1 + max(i for i, _ in places), 1 + max(j for _, j in places)
    if any(converted):
        block = "blocks.{i}.layers.{j}."
        return _Names(heads, layers, block + "weight", block + "bias", "lm_heads.{i}.weight")
    linear = "{i}.{j}.linear."
    return _Names(heads, layers, linear + "weight", linear + "bias", f"{{i}}.{layers}.weight")


def _compare_counts(intake: Intake, names: _Names) -> None:
    """The tensors decide; a config that says otherwise is reported, one that is cut short is refused."""
    config = intake.checkpoint.config
    if "medusa_num_layers" in config and "medusa_num_heads" not in config:
        raise intake.refuse(
            f'config.json has medusa_num_layers but no medusa_num_heads; add "medusa_num_heads": {names.heads}, which '
            "is what the file holds"
        )
    for keys, found, what in (
        (("medusa_num_heads", "num_heads"), names.heads, "heads"),
        (("medusa_num_layers", "num_hidden_layers"), names.layers, "layers"),
    ):
        base = is_full_model(intake.checkpoint) and keys[1] == "num_hidden_layers"
        key = next((k for k in keys if k in config and not (base and k == keys[1])), None)
        if key is not None and config[key] != found:
            intake.note(
                f"config.json says {key}={config[key]}, the file has {found} {what}: using {found}"
            )


def _check_target(intake: Intake, names: _Names, target: Decoder) -> None:
    hidden = intake.shape(names.weight.format(i=0, j=0))[0]
    if hidden != target.config.hidden_size:
        raise intake.refuse(
            f"Medusa heads of hidden size {hidden} cannot draft for a target of hidden size "
            f"{target.config.hidden_size}; use the heads trained for this target"
        )


def _blocks(intake: Intake, names: _Names, hidden: int) -> tuple[Tensor, Tensor | None]:
    """([K, L, H, H], [K, L, H] or None)."""
    config = intake.checkpoint.config
    original = ".linear." in names.weight
    biased = original or names.bias.format(i=0, j=0) in intake
    if config.get("medusa_fc_bias") and not biased:
        raise intake.refuse(
            "config.json says medusa_fc_bias=true, but blocks.0.layers.0.bias is missing; set it to false or export "
            "the biases"
        )
    if biased and not original and not config.get("medusa_fc_bias", False):
        intake.note("the file has biases, config.json does not say medusa_fc_bias: using them")
    places = [(i, j) for i in range(names.heads) for j in range(names.layers)]
    size = (names.heads, names.layers, hidden)
    weights = [intake.take(names.weight.format(i=i, j=j), hidden, hidden) for i, j in places]
    weight = torch.stack(weights).view(*size, hidden)
    if not biased:
        return weight, None
    biases = [intake.take(names.bias.format(i=i, j=j), hidden) for i, j in places]
    return weight, torch.stack(biases).view(size)


def _vocabulary(intake: Intake, names: _Names, target: Decoder) -> tuple[Vocabulary, Tensor | None]:
    """The heads' vocabulary, and which rows of an untruncated output layer it keeps (None: all)."""
    config, size = intake.checkpoint.config, target.config.vocab_size
    declared = config.get("vocab_size") if config.get("model_type") == "medusa" else None
    truncated = config.get("truncated_vocab_size")
    if declared is not None and declared != size:
        raise intake.refuse(
            f"config.json says vocab_size={declared}, the target has {size}; use the heads trained for this target"
        )
    if "token_map" not in intake:
        if truncated is not None and truncated < size:
            raise intake.refuse(
                f"truncated_vocab_size={truncated} is below the target's {size}, but tensor 'token_map' is missing; "
                "export it with the heads"
            )
        return whole(size, intake.device), None
    token_map = intake.take_numbers("token_map", *intake.shape("token_map")).flatten()
    if truncated is not None and token_map.shape[0] != truncated:
        raise intake.refuse(
            f"truncated_vocab_size={truncated}, but token_map has {token_map.shape[0]} entries; make them agree"
        )
    if token_map.shape[0] == size:
        intake.note("token_map covers the whole vocabulary")
    return reduced(intake, "token_map", token_map, size), token_map


def _outputs(intake: Intake, names: _Names, kept: Tensor | None, target: Decoder) -> Tensor | None:
    """[K or 1, Vm, H], or None for the target's own head."""
    config, size, hidden = (
        intake.checkpoint.config,
        target.config.vocab_size,
        target.config.hidden_size,
    )
    present = [i for i in range(names.heads) if names.output.format(i=i) in intake]
    shared = bool(config.get("original_lm_head")) and present == [0]
    if not present:
        if kept is not None:
            raise intake.refuse("token_map without lm_heads; export the heads' output layers")
        intake.note("the heads have no output layers of their own: using the target's head")
        return None
    outputs = []
    for i in (0,) if shared else range(names.heads):
        name = names.output.format(i=i)
        rows = intake.shape(name)[0] if name in intake else size
        expected = size if kept is None or rows == size else kept.shape[0]
        output = intake.take(name, expected, hidden)
        outputs.append(
            output[kept.to(output.device)] if kept is not None and rows == size else output
        )
    if shared:
        intake.note("one output layer for all heads (original_lm_head)")
    return torch.stack(outputs)
