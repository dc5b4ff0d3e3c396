"""A drafter's own, smaller vocabulary, from what its checkpoint says of it.

The result maps draft ids to target ids; the drafter reads target ids, so there is no map the other way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.spec.checkpoint.intake import Intake
from foretell.spec.vocabulary import Vocabulary


def whole(size: int, device: torch.device) -> Vocabulary:
    """The target's own vocabulary."""
    ids = torch.arange(size, device=device)
    return Vocabulary(ids, ids, size)


def reduced(intake: Intake, name: str, target_of: Tensor, size: int) -> Vocabulary:
    """The part of the target's vocabulary that a drafter knows.

    Args:
        name: tensor that the map was read from, for messages.
        target_of: [Vd] int64, target id of each draft id.
        size: V.

    Raises:
        ValueError: an id is out of range or named twice.
    """
    low, high = int(target_of.min()), int(target_of.max())
    if low < 0 or high >= size:
        raise intake.refuse(
            f"{name} names target ids {low} to {high}, but the target's vocabulary has {size}; is this the drafter "
            "of another target, or absolute ids where offsets belong?"
        )
    if torch.unique(target_of).shape[0] != target_of.shape[0]:
        raise intake.refuse(f"{name} names a target id twice; the map is damaged")
    target_of = target_of.to(intake.device)
    return Vocabulary(torch.zeros(size, dtype=torch.int64, device=intake.device), target_of, size)


def from_offsets(intake: Intake, d2t: Tensor, size: int) -> Vocabulary:
    """EAGLE-3's map: the target id of draft id i is i + d2t[i]."""
    return reduced(intake, "d2t (offsets)", torch.arange(d2t.shape[0]) + d2t, size)
