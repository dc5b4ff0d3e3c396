"""What the training loop needs of a kind of drafter, and the rows a batch takes its losses from.

`Roots` decides which predictions count: for a draft token s + 1 steps ahead of row r that is token r + s + 1, and it
must be the assistant's and of the same document. The shift is the engine's: row r pairs token r with the feature of
token r - 1 (EAGLE), or is the feature of token r alone (Medusa).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from foretell.training.data import Packed


@dataclass(frozen=True, slots=True)
class Loss:
    """Of one batch: sums, not means."""

    total: Tensor  # scalar with a gradient
    steps: Tensor  # [S] cross-entropy of each step
    hits: Tensor  # [S] rows whose likeliest token is the target's
    rows: tuple[int, ...]  # S, rows that counted


class Recipe(Protocol):
    """A kind of drafter under training."""

    @property
    def ahead(self) -> int:
        """S, how many tokens it learns to draft."""
        ...

    @property
    def modules(self) -> nn.Module:
        """What is trained: its parameters that have gradients."""
        ...

    def roots(self, batch: Packed) -> tuple[Tensor, ...]:
        """For each step, the flat rows [R_s] whose prediction counts; made on the CPU."""
        ...

    def loss(self, rows: Tensor, batch: Packed, roots: Sequence[Tensor]) -> Loss:
        """Losses of a batch; `rows` says which rows of the data it is, `batch` and `roots` are on the device."""
        ...

    def save(self, folder: Path) -> None:
        """Write the drafter as the engine loads it."""
        ...


def roots_ahead(batch: Packed, distance: int, first: int) -> Tensor:
    """Flat indices of rows r, from place `first` of their document on, whose token r + distance is the assistant's.

    Args:
        batch: on the CPU.
    """
    rows, length = batch.tokens.shape
    good = torch.zeros(rows, length, dtype=torch.bool)
    if distance < length:
        near, far = slice(0, length - distance), slice(distance, length)
        good[:, near] = (
            batch.assistant[:, far]
            & (batch.documents[:, near] == batch.documents[:, far])
            & (batch.places[:, near] >= first)
        )
    return good.flatten().nonzero().flatten()


def ahead(x: Tensor, distance: int) -> Tensor:
    """[B, L, ...] with entry i holding what was at i + distance; the last ones repeat and must not count."""
    if distance == 0:
        return x
    length = x.shape[1]
    index = (torch.arange(length, device=x.device) + distance).clamp(max=length - 1)
    return x[:, index]
