"""From a drafter's logits to candidates: where the randomness of a draft comes from, and which law it follows.

Not the target's sampling (processors.py), whose scaling, filters and noise are used here, and no tree is filled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from foretell.spec import processors
from foretell.spec.drafter import Window
from foretell.spec.nodes import Shape
from foretell.spec.noise import Stream
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary


class Choice(Enum):
    """How candidates are chosen."""

    SHARED = "shared"  # with the noise that the target will sample with: best under `match`
    DRAWN = "drawn"  # from the drafter's law, by a stream of its own; `rejection` is told the law
    LIKELIEST = "likeliest"  # the most probable ones: point masses, which need no law


def choice_for(acceptance: Acceptance, draws: bool) -> Choice:
    """How to choose under an accept rule.

    Args:
        draws: whether `rejection` is to know the law of each node ([B, N, V] of memory).
    """
    if acceptance is not Acceptance.REJECTION:
        return Choice.SHARED
    return Choice.DRAWN if draws else Choice.LIKELIEST


@dataclass(frozen=True, slots=True)
class Scoring:
    """From logits to candidates.

    Args:
        vocabulary: what the network's tokens are for the target.
        choice: how candidates are chosen.
    """

    vocabulary: Vocabulary
    choice: Choice

    def scores(
        self, logits: Tensor, window: Window, positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Scores whose order is the order of the candidates, and the law they are drawn from, if they are.

        Args:
            logits: [B, m, Vd], raw.
            positions: [B, m or 1] int64, of the tokens decided.

        Returns:
            ([B, m, Vd], [B, m, V] or None).
        """
        logits = self.vocabulary.mask(logits.float())
        logits = processors.scale_and_filter(logits, window.law, window.mode)
        drawn = self.choice is Choice.DRAWN
        law = self.vocabulary.law_over_target(torch.softmax(logits, -1)) if drawn else None
        if window.mode.sampled and self.choice is not Choice.LIKELIEST:
            stream = Stream.DRAFT if drawn else Stream.SAMPLE
            positions = positions.expand(-1, logits.shape[1])
            noise_ids = self.vocabulary.noise_ids
            logits = processors.perturb(logits, window.law, positions, stream, noise_ids)
        return logits, law


def node_laws(laws: Sequence[Tensor], shape: Shape) -> Tensor:
    """[B, N, V] in the order of the nodes, from one [B, n, V] per level; the root's row is no law and is zero."""
    by_level = torch.cat(tuple(laws), dim=1)
    order = torch.cat([level.nodes for level in shape.levels])
    result = by_level.new_zeros(by_level.shape[0], shape.tree.nodes, by_level.shape[-1])
    return result.index_copy(1, order, by_level)
