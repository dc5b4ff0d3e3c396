"""Which rows a small pass runs, one launch each; `ops/reference/rows` says what. One program per request."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.ops.meta import SlotArrays
from foretell.ops.reference.rows import Gathered, Placed
from foretell.ops.triton import launch
from foretell.ops.triton.device import ceil_div, dense_rows, power_of_two


def gather(
    slots: SlotArrays,
    draft: Tensor,
    most_drafted: Tensor,
    rows: Tensor,
    depths: Tensor,
    longest: int,
    block_size: int,
) -> Gathered:
    """The pending token and its drafts; see the reference."""
    count, nodes, table = rows.shape[0], depths.shape[1], slots.blocks.shape[1]
    ints = torch.empty(3, count, nodes, dtype=torch.int64, device=rows.device)
    blocks = torch.empty(count, table, dtype=torch.int32, device=rows.device)
    context = torch.empty(count, dtype=torch.int64, device=rows.device)
    depths = dense_rows(depths)
    if count:
        _gather_kernel[(count,)](
            slots.tokens, slots.length, slots.live.view(torch.uint8), slots.blocks, draft, most_drafted,
            rows, depths, ints, blocks, context,
            slots.tokens.stride(0), slots.blocks.stride(0), draft.stride(0),
            0 if depths.shape[0] == 1 else depths.stride(0), count, nodes, table, longest,
            BLOCK_SIZE=block_size, NODES=power_of_two(nodes), TABLE=min(1024, power_of_two(table)),
            num_warps=4, **launch.options(rows.device),
        )  # fmt: skip
    tokens, positions, kv_slots = ints.unbind()
    return Gathered(tokens, positions, kv_slots, blocks, context)


def place(
    base: Tensor,
    live: Tensor,
    count: Tensor | None,
    blocks: Tensor,
    places: Tensor,
    depths: Tensor,
    shift: int,
    block_size: int,
) -> Placed:
    """Where the rows of a drafter stand; see the reference."""
    rows, own, tails = base.shape[0], places.shape[0], depths.shape[1]
    ints = torch.empty(2, rows, own, dtype=torch.int64, device=base.device)
    tail = torch.empty(rows, tails, dtype=torch.int64, device=base.device)
    blocks = dense_rows(blocks)
    if rows:
        _place_kernel[(rows,)](
            base.contiguous(), live.view(torch.uint8), count, blocks, places, depths, ints, tail,
            live.stride(0), blocks.stride(0), rows, own, tails, shift,
            COUNTED=count is not None, BLOCK_SIZE=block_size, OWN=power_of_two(own),
            TAILS=power_of_two(tails), num_warps=1, **launch.options(base.device),
        )  # fmt: skip
    positions, kv_slots = ints.unbind()
    return Placed(positions, tail, kv_slots)


def last_rows(x: Tensor, count: Tensor) -> Tensor:
    """[B, W, H] → [B, 1, H]: row `count - 1` of each request, the first where there is none."""
    rows, width, size = x.shape
    out = torch.empty(rows, 1, size, dtype=x.dtype, device=x.device)
    block = min(2048, power_of_two(size))
    if rows:
        _last_kernel[(rows, ceil_div(size, block))](
            x.contiguous(), count.contiguous(), out, width, size, BLOCK=block,
            **launch.options(x.device),
        )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _gather_kernel(
    text, lengths, lives, tables, draft, most_drafted, rows, depths, ints, blocks, context,
    text_row, table_row, draft_row, depths_row, count, nodes, table, longest,
    BLOCK_SIZE: tl.constexpr, NODES: tl.constexpr, TABLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + request)
    length = tl.load(lengths + slot)
    live = tl.load(lives + slot).to(tl.int32) > 0
    node = tl.arange(0, NODES)
    inside = node < nodes
    depth = tl.load(depths + request * depths_row + node, mask=inside, other=0)
    deepest = tl.minimum(tl.load(most_drafted + slot), longest - length)
    root = tl.load(text + slot * text_row + length - 1).to(tl.int64)
    wanted = inside & (node > 0) & (depth <= deepest)
    token = tl.load(draft + slot * draft_row + node, mask=wanted, other=-1)
    token = tl.where(node == 0, root, token)
    index = length - 1 + node
    own = inside & (node < tl.where(live, nodes, 0))
    block = tl.load(tables + slot * table_row + index // BLOCK_SIZE, mask=own, other=0).to(tl.int64)
    kv_slot = tl.where(live, block * BLOCK_SIZE + index % BLOCK_SIZE, 0)
    at = request * nodes + node
    every = tl.cast(count, tl.int64) * nodes
    tl.store(ints + at, token, mask=inside)
    tl.store(ints + every + at, length - 1 + depth, mask=inside)
    tl.store(ints + 2 * every + at, kv_slot, mask=inside)
    tl.store(context + request, length - 1)
    for base in range(0, table, TABLE):
        entry = base + tl.arange(0, TABLE)
        values = tl.load(tables + slot * table_row + entry, mask=entry < table, other=0)
        tl.store(blocks + request * table + entry, values, mask=entry < table)


@triton.jit
@no_type_check
def _place_kernel(
    bases, lives, counts, tables, places, depths, ints, tail_positions,
    live_row, table_row, rows, own, tails, shift,
    COUNTED: tl.constexpr, BLOCK_SIZE: tl.constexpr, OWN: tl.constexpr, TAILS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    request = tl.program_id(0).to(tl.int64)
    base = tl.load(bases + request)
    tail = tl.arange(0, TAILS)
    depth = tl.load(depths + tail, mask=tail < tails, other=0)
    tl.store(tail_positions + request * tails + tail, base + depth - shift, mask=tail < tails)
    row = tl.arange(0, OWN)
    inside = row < own
    behind = tl.load(places + row, mask=inside, other=0)
    rows_left = tl.where(
        tl.load(lives + request * live_row).to(tl.int32) > 0, tl.cast(1 << 40, tl.int64), 0
    )
    if COUNTED:
        rows_left = tl.minimum(rows_left, tl.load(counts + request))
    valid = inside & (behind < rows_left)
    entry = base + behind
    block = tl.load(tables + request * table_row + entry // BLOCK_SIZE, mask=valid, other=0)
    kv_slot = tl.where(valid, block.to(tl.int64) * BLOCK_SIZE + entry % BLOCK_SIZE, 0)
    own_depth = tl.load(depths + behind, mask=inside, other=0)
    at = request * own + row
    tl.store(ints + at, base + own_depth - shift, mask=inside)
    tl.store(ints + tl.cast(rows, tl.int64) * own + at, kv_slot, mask=inside)


@triton.jit
@no_type_check
def _last_kernel(x, counts, out, width, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch.start(PDL)
    request = tl.program_id(0).to(tl.int64)
    last = tl.maximum(tl.load(counts + request) - 1, 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + (request * width + last) * size + at, mask=at < size)
    tl.store(out + request * size + at, values, mask=at < size)
