"""Prompt lookup: where the text goes on after the last place that looked like its end, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def draft(
    text: Tensor,
    rows: Tensor,
    length: Tensor,
    keys: int,
    depths: Tensor,
    spine: Tensor,
    shortest: int,
    longest: int,
) -> Tensor:
    """The tokens after the match, on the tree's spine.

    Args:
        text: [S, L] int32, committed tokens of all slots.
        rows: [B] int64, slot of each request.
        length: [B] int64, committed tokens of each request.
        keys: host-side bound of `length`.
        depths: [1, N] int64, of the nodes of the tree.
        spine: [N] bool, nodes to fill.
        shortest, longest: bounds on the number of tokens that must match.

    Returns:
        [B, N] int64, -1 where nothing is drafted.
    """
    own = text[rows, :keys]
    start = suffix_match(own, length, shortest, longest)
    index = start.unsqueeze(1) + depths - 1
    known = (start >= 0).unsqueeze(1) & (index < length.unsqueeze(1)) & (depths > 0)
    tokens = own.gather(1, index.clamp(0, own.shape[1] - 1)).to(torch.int64)
    return torch.where(known & spine, tokens, -1)


def suffix_match(text: Tensor, length: Tensor, shortest: int, longest: int) -> Tensor:
    """Where the text goes on after the most recent earlier occurrence of its longest matching suffix.

    Args:
        text: [B, L] int32, committed tokens.
        length: [B] int64.
        shortest, longest: bounds on the number of tokens that must match.

    Returns:
        [B] int64, index of the token after the match; -1 where nothing matches.

    Example: for "a b c a b" and 1..3 the suffix "a b" matches at 0, so the result is 2 (the token "c").
    """
    rows, width = text.shape
    place = torch.arange(width, device=text.device)
    best = torch.full((rows,), -1, dtype=torch.int64, device=text.device)
    matching = (place < length.unsqueeze(1) - 1).expand(
        rows, -1
    )  # ends of candidate matches, the suffix itself apart
    for size in range(1, longest + 1):
        suffix = text.gather(1, (length - size).clamp(min=0).unsqueeze(1))
        shifted = (
            text if size == 1 else torch.nn.functional.pad(text, (size - 1, 0), value=-1)[:, :width]
        )
        matching = matching & (shifted == suffix) & (length >= size).unsqueeze(1)
        if size >= shortest:
            last = torch.where(matching, place, -1).amax(-1)
            best = torch.where(last >= 0, last + 1, best)
    return best
