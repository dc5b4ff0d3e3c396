"""Drafter and target with different vocabularies: tokens correspond where their strings are equal.

The draft model reads the target's text through `to_draft` and proposes only tokens that the target has too
(token-level intersection, arXiv 2502.05202, section 4). What the target writes outside the intersection reaches the
draft as its unknown token: that costs acceptance, never correctness, since the target checks every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Vocabulary:
    """The correspondence, as tensors.

    Args:
        draft_of: [V] int64, draft id of each target id; the draft's unknown token where there is none.
        target_of: [Vd] int64, target id of each draft id; -1 where there is none.
        target_size: V, width of the target's logits.
    """

    def __init__(self, draft_of: Tensor, target_of: Tensor, target_size: int) -> None:
        self.target_size = target_size
        self._draft_of = draft_of
        self._target_of = target_of
        self._shared = target_of >= 0
        identity = torch.arange(target_of.shape[0], device=target_of.device)
        self._identical = bool((target_of == identity).all()) and target_of.shape[0] == target_size
        self.noise_ids = torch.where(self._shared, target_of, 0).to(torch.int32)

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids of any shape; -1 (padding) stays -1."""
        if self._identical:
            return tokens
        return torch.where(tokens >= 0, self._draft_of[tokens.clamp(min=0)], -1)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids of any shape; -1 where the target has no such token."""
        return tokens if self._identical else self._target_of[tokens]

    def mask(self, logits: Tensor) -> Tensor:
        """[..., Vd] draft logits with -inf on tokens that the target lacks."""
        return logits if self._identical else torch.where(self._shared, logits, -torch.inf)

    def law_over_target(self, probs: Tensor) -> Tensor:
        """[..., Vd] draft probabilities as [..., V] over target ids."""
        if self._identical:
            return probs
        result = probs.new_zeros(*probs.shape[:-1], self.target_size)
        index = self._target_of.clamp(min=0).expand_as(probs)
        return result.scatter_add(-1, index, torch.where(self._shared, probs, 0))


def same(target_size: int, draft_size: int, tokens: int, device: torch.device) -> Vocabulary:
    """The same tokenizer on both sides; the model widths may differ by padding.

    Args:
        target_size, draft_size: widths of the logits.
        tokens: how many ids the tokenizer really has; ids from there on are padding and never proposed.
    """
    shared = min(target_size, draft_size, max(tokens, 1))
    if target_size == draft_size:
        shared = target_size
    draft_of = torch.arange(target_size, device=device)
    draft_of = torch.where(draft_of < min(target_size, draft_size), draft_of, 0)
    target_of = torch.arange(draft_size, device=device)
    return Vocabulary(draft_of, torch.where(target_of < shared, target_of, -1), target_size)


def intersect(
    target: Sequence[str | None],
    draft: Sequence[str | None],
    sizes: tuple[int, int],
    unknown: int,
    device: torch.device,
) -> Vocabulary:
    """Tokens with equal strings on both sides.

    Args:
        target, draft: string of each id as the tokenizers spell them after normalisation; None for unused ids.
        sizes: (V, Vd), widths of the logits.
        unknown: draft id that stands for target tokens the draft lacks.
    """
    by_string = {string: token for token, string in enumerate(draft) if string is not None}
    draft_of = torch.full((sizes[0],), unknown, dtype=torch.int64)
    target_of = torch.full((sizes[1],), -1, dtype=torch.int64)
    for token, string in enumerate(target):
        other = by_string.get(string) if string is not None else None
        if other is not None and other < sizes[1] and token < sizes[0]:
            draft_of[token] = other
            if target_of[other] < 0:
                target_of[other] = token
    return Vocabulary(draft_of.to(device), target_of.to(device), sizes[0])
