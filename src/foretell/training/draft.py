"""A draft model under training: a small language model learns the target's distribution on the target's own answers.

Forward KL covers what the target may say, reverse KL keeps to what it says most (DistillSpec, arXiv 2310.08461, section
3); a share of both is allowed. The model is a checkpoint with the target's tokenizer, or some of the target's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.model.hub import ModelSource, resolve
from foretell.model.layers import fill
from foretell.model.load import load_model
from foretell.model.tokenizer import load_tokenizer
from foretell.training.capture import Capture
from foretell.training.data import Packed
from foretell.training.dense import empty_steps, packed_rows, trainable
from foretell.training.model_folder import check_plain, save_model
from foretell.training.recipe import Loss, roots_ahead

ROWS = 2048  # whose logits exist at a time


@dataclass(frozen=True, slots=True)
class DistilSettings:
    """What is distilled, and how.

    Args:
        model: checkpoint of the draft model; None = made of the target's own layers.
        layers: how many of them: the first ones, and the last.
        reverse: share of reverse KL; the rest is forward KL.
    """

    model: str | None = None
    layers: int = 4
    reverse: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.reverse <= 1.0:
            raise ValueError(f"the share of reverse KL must be in [0, 1], got {self.reverse}")


def student_of(target: Decoder, source: ModelSource, settings: DistilSettings) -> Decoder:
    """The model to be trained, in float32 or wider.

    Raises:
        ValueError: its vocabulary is not the target's, the target has too few layers, or it could not be written.
    """
    wide = torch.promote_types(target.dtype, torch.float32)
    if settings.model is None:
        student = _of_layers(target, settings.layers, wide)
    else:
        found = resolve(settings.model)
        ours, theirs = load_tokenizer(source).get_vocab(), load_tokenizer(found).get_vocab()
        if ours != theirs:
            raise ValueError(
                f"draft model {settings.model!r} has another vocabulary than the target; only one with the same tokens "
                "can be distilled into"
            )
        name = str(wide).removeprefix("torch.")
        student = load_model(found, dtype=name, device=target.device, ops=target.ops)
        if student.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"draft model {settings.model!r} has {student.config.vocab_size} logits, the target "
                f"{target.config.vocab_size}; only equal ones can be distilled"
            )
    check_plain(student.config)  # before hours of training, not at their end
    trainable(list(dict.fromkeys(student.parameters())))
    return student


def _of_layers(target: Decoder, count: int, dtype: torch.dtype) -> Decoder:
    total = target.config.layers
    if not 0 < count < total:
        raise ValueError(f"draft_layers={count} must be at least 1 and below the target's {total}")
    picked = [*range(count - 1), total - 1]
    config = replace(
        target.config,
        layers=count,
        windows=tuple(target.config.windows[i] for i in picked),
        layer_ropes=tuple(target.config.layer_ropes[i] for i in picked),
    )
    student = Decoder(config, dtype, target.device, target.ops)
    for name, parameter in target.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            if int(parts[1]) not in picked:
                continue
            name = ".".join(("layers", str(picked.index(int(parts[1]))), *parts[2:]))
        if name == "head.weight" and config.tied:
            continue
        wide = torch.promote_types(parameter.dtype, dtype)
        fill(student, name, parameter.detach().to(wide).clone())
    if config.tied:
        student.tie()
    return student


class DraftRecipe:
    """Trains a Decoder built on dense operations.

    Args:
        target: built on dense operations.
        capture: without taps: the law is made of the final hidden state.
        source: where the target lies, for the tokenizer.
    """

    ahead = 1

    def __init__(
        self,
        student: Decoder,
        target: Decoder,
        capture: Capture,
        settings: DistilSettings,
        source: ModelSource,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.modules, self.student, self.target = student, student, target
        self.capture, self.settings, self.source, self.dtype = capture, settings, source, dtype

    def roots(self, batch: Packed) -> tuple[Tensor, ...]:
        """See Recipe; row r predicts token r + 1."""
        return (roots_ahead(batch, 1, 0),)

    def loss(self, rows: Tensor, batch: Packed, roots: Sequence[Tensor]) -> Loss:
        """See Recipe."""
        captured = self.capture(rows, batch)
        which = roots[0]
        packed = packed_rows(batch.places, batch.documents)
        count, kv_heads, _ = self.student.kv_shape
        kv = empty_steps(count, kv_heads, which.device)
        hidden = self.student(batch.tokens, packed, kv)[0].flatten(0, 1)[which]
        own = captured.hidden.flatten(0, 1)[which]
        total = torch.zeros((), dtype=torch.float32, device=which.device)
        plain = total.clone()
        hits = torch.zeros((), dtype=torch.int64, device=which.device)
        best = captured.best.flatten()[which]
        for start in range(0, len(which), ROWS):
            part = slice(start, start + ROWS)
            told = torch.log_softmax(self.target.logits(own[part]).float(), -1).detach()
            said = torch.log_softmax(self.student.logits(hidden[part]).float(), -1)
            forward = (told.exp() * (told - said)).sum()
            reverse = (said.exp() * (said - told)).sum() if self.settings.reverse else forward
            share = self.settings.reverse
            total = total + (1 - share) * forward + share * reverse
            plain += forward.detach()
            hits += (said.argmax(-1) == best[part]).sum()
        return Loss(total, plain.view(1), hits.view(1), (len(which),))

    def save(self, folder: Path) -> None:
        """See Recipe: a model folder in Hugging Face's layout, tokenizer included."""
        save_model(folder, self.student, self.source, self.dtype)
