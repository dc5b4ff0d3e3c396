"""Suffix match on the device: what followed the last time these tokens stood here, for every request in one launch."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.ops.triton import launch
from foretell.ops.triton.device import dense_rows, power_of_two

_BLOCK = 1024


def suffix_match(text: Tensor, length: Tensor, shortest: int, longest: int) -> Tensor:
    """Where the text goes on after the most recent earlier occurrence of its longest matching suffix.

    Args:
        text: [B, L] int32, committed tokens.
        length: [B] int64.
        shortest, longest: bounds on the number of tokens that must match.

    Returns:
        [B] int64, index of the token after the match; -1 where nothing matches.
    """
    rows = text.shape[0]
    start = torch.empty(rows, dtype=torch.int64, device=text.device)
    if rows:
        _launch(text, None, length, shortest, longest, start, None, None, None)
    return start


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
    """The tokens after the match, on the tree's spine; see the reference. `keys` is not needed.

    Args:
        text: [S, L] int32, committed tokens of all slots.
        rows: [B] int64, slot of each request.
        length: [B] int64, committed tokens of each request.
        depths: [1, N] int64, of the nodes of the tree.
        spine: [N] bool, nodes to fill.

    Returns:
        [B, N] int64, -1 where nothing is drafted.
    """
    count, nodes = rows.shape[0], depths.shape[1]
    tokens = torch.empty(count, nodes, dtype=torch.int64, device=text.device)
    if count:
        _launch(text, rows, length, shortest, longest, None, depths, spine, tokens)
    return tokens


def _launch(
    text: Tensor,
    rows: Tensor | None,
    length: Tensor,
    shortest: int,
    longest: int,
    start: Tensor | None,
    depths: Tensor | None,
    spine: Tensor | None,
    tokens: Tensor | None,
) -> None:
    assert 1 <= shortest <= longest, (shortest, longest)
    text = dense_rows(text)
    nodes = 1 if tokens is None else tokens.shape[1]
    _ngram_kernel[(length.shape[0],)](
        text, rows, length.contiguous(), start,
        None if depths is None else depths.contiguous(),
        None if spine is None else spine.contiguous().view(torch.uint8), tokens,
        text.stride(0), text.shape[1], nodes,
        SHORTEST=shortest, LONGEST=longest, INDEXED=rows is not None, FILL=tokens is not None,
        NODES=power_of_two(nodes), BLOCK=_BLOCK, num_warps=8,
        **launch.options(text.device),
    )  # fmt: skip


@triton.jit
@no_type_check
def _ngram_kernel(
    text, rows, lengths, start, depths, spine, tokens, text_row, width, nodes,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, INDEXED: tl.constexpr, FILL: tl.constexpr,
    NODES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A place scores (tokens that match, place); the greatest score is the longest match, and of those the latest."""
    launch.start(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = request
    if INDEXED:
        row = tl.load(rows + request)
    text += row * text_row
    length = tl.load(lengths + request)
    best = tl.full([BLOCK], -1, dtype=tl.int64)
    for base in range(0, length - 1, BLOCK):
        place = base + tl.arange(0, BLOCK)
        inside = place < length - 1
        run = tl.zeros([BLOCK], dtype=tl.int64)
        matching = inside
        for back in tl.static_range(LONGEST):
            wanted = tl.load(text + length - 1 - back, mask=length > back, other=-2)
            there = tl.load(text + place - back, mask=matching & (place >= back), other=-1)
            matching = matching & (there == wanted)
            run += matching.to(tl.int64)
        score = tl.where(run >= SHORTEST, (run << 32) + place, -1)
        best = tl.maximum(best, score)
    top = tl.max(best, 0)
    after = tl.where(top >= 0, (top & 0xFFFFFFFF) + 1, -1)
    if FILL:
        node = tl.arange(0, NODES)
        inside = node < nodes
        depth = tl.load(depths + node, mask=inside, other=0)
        on_spine = tl.load(spine + node, mask=inside, other=0) != 0
        index = tl.where(after >= 0, after + depth - 1, length)  # without a match, past the end
        known = (index < length) & (depth > 0) & on_spine
        token = tl.load(text + index, mask=known, other=-1).to(tl.int64)
        tl.store(tokens + request * nodes + node, token, mask=inside)
    else:
        tl.store(start + request, after.to(tl.int64))
