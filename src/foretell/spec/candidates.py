"""From a drafter's logits to a filled static tree: where a draft's randomness comes from, and which law it follows.

Not the target's sampling (processors.py), whose scaling, filters and noise are used here. Trees that grow are in
dynamic_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from foretell.spec import processors
from foretell.spec.drafter import Draft, Window
from foretell.spec.nodes import Level, Shape
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


class Steps(Protocol):
    """How a network goes from one level of a tree to the next."""

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """[B, m, H] states of a level's nodes → [B, m, Vd] logits of their children, which have that depth."""
        ...

    def run(self, tokens: Tensor, above: Tensor, level: Level) -> Tensor:
        """States [B, m, H] of a level's nodes that have children, from their tokens and their parents' states."""
        ...


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

    def draws_at_once(self, window: Window) -> bool:
        """Whether `draw` can be used: its kernel is there, and nobody wants a law."""
        return window.ops.draw is not None and self.choice is not Choice.DRAWN

    def draw(self, logits: Tensor, window: Window, positions: Tensor) -> Tensor:
        """[B, m] target ids of the best candidates.

        Args:
            logits: [B, m, Vd], raw.
            positions: [B, m] int64, of the tokens decided.
        """
        assert window.ops.draw is not None
        vocabulary, noisy = self.vocabulary, self.choice is not Choice.LIKELIEST
        law = window.law if window.mode.sampled and noisy else None
        return window.ops.draw(
            vocabulary.mask(logits),
            law,
            positions,
            int(Stream.SAMPLE),
            window.mode.filtered,
            vocabulary.noise_ids,
            vocabulary.target_ids,
        )


def fill_levels(
    scoring: Scoring, window: Window, shape: Shape, hidden: Tensor, steps: Steps
) -> Draft:
    """Fill a static tree level by level.

    Args:
        hidden: [B, 1, H], the network's state at the pending token.
    """
    rows, nodes = window.start.shape[0], shape.tree.nodes
    root = window.length.unsqueeze(1) - 1
    if all(level.alone for level in shape.levels) and scoring.draws_at_once(window):
        return _fill_chain(scoring, window, shape, hidden, steps, root)
    tokens = torch.full((rows, nodes), -1, dtype=torch.int64, device=hidden.device)
    laws: list[Tensor] = []
    for level in shape.levels:
        logits = steps.logits(hidden, level.depth)
        scores, law = scoring.scores(logits, window, root + level.depth)
        ranked = best(scores, level.width)  # [B, m, width]
        # Drawn siblings are tried in the order they were drawn, without a gap: else their law is another one.
        ranks = level.ranks if law is None else level.ordinals
        tokens[:, level.nodes] = scoring.vocabulary.to_target(ranked[:, level.parents, ranks])
        if law is not None:
            laws.append(law[:, level.parents])
        if level.expanded.shape[0]:
            hidden = steps.run(tokens[:, level.expanded], hidden[:, level.above], level)
    return Draft(tokens=tokens, probs=_node_laws(laws, shape) if laws else None)


def _fill_chain(
    scoring: Scoring, window: Window, shape: Shape, hidden: Tensor, steps: Steps, root: Tensor
) -> Draft:
    """`fill_levels` of a chain where one kernel draws: no scores, nothing to pick."""
    found = [torch.full_like(root, -1)]
    for level in shape.levels:
        logits = steps.logits(hidden, level.depth)
        positions = root + level.depth if window.mode.sampled else root
        found.append(scoring.draw(logits, window, positions))
        if level.expanded.shape[0]:
            hidden = steps.run(found[-1], hidden, level)
    return Draft(tokens=torch.cat(found, dim=1))


def fill_depths(scoring: Scoring, window: Window, shape: Shape, logits: Tensor) -> Draft:
    """Fill a static tree whose nodes of one depth all take their candidates from the same logits.

    Args:
        logits: [B, D, Vd], of each depth from 1 to at least the tree's.
    """
    ahead = torch.arange(1, logits.shape[1] + 1, device=logits.device)
    scores, law = scoring.scores(logits, window, window.length.unsqueeze(1) - 1 + ahead)
    ranked = best(scores, max(level.width for level in shape.levels))
    size = (ranked.shape[0], shape.tree.nodes)
    tokens = torch.full(size, -1, dtype=torch.int64, device=logits.device)
    for level in shape.levels:
        ranks = level.ranks if law is None else level.ordinals
        tokens[:, level.nodes] = scoring.vocabulary.to_target(ranked[:, level.depth - 1, ranks])
    if law is None:
        return Draft(tokens=tokens)
    padded = torch.nn.functional.pad(law, (0, 0, 1, 0))  # the root's row is no law and is zero
    return Draft(tokens=tokens, probs=padded[:, shape.depths[0]])


def best(scores: Tensor, count: int) -> Tensor:
    """[..., count] int64, the places of the greatest scores, best first."""
    if count == 1:  # a chain: an arg-max costs a fraction of a selection
        return scores.argmax(dim=-1, keepdim=True)
    return scores.topk(count, dim=-1).indices


def _node_laws(laws: Sequence[Tensor], shape: Shape) -> Tensor:
    """[B, N, V] in the order of the nodes, from one [B, n, V] per level; the root's row is zero."""
    by_level = torch.cat(tuple(laws), dim=1)
    order = torch.cat([level.nodes for level in shape.levels])
    result = by_level.new_zeros(by_level.shape[0], shape.tree.nodes, by_level.shape[-1])
    return result.index_copy(1, order, by_level)
