"""Mixture of experts (arXiv 2401.04088, section 2.1) as grouped products: each row meets only the experts it chose.

Four launches: `route` (choose, weigh, sort the pairs of row and expert by expert), gate and up with the activation,
down, and the weighted sum of a row's experts in the order it chose them. Pairs of one expert stand next to each other,
in order of their rows; a product's tile belongs to one expert, and the grid has as many tiles as there can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.ops.triton import launch
from foretell.ops.triton.device import ceil_div, dot_precision, limits, power_of_two
from foretell.ops.triton.layers import activate
from foretell.ops.triton.linear import _ACTIVATIONS, Tile, _stages

_ROUTE_ROWS = 128  # rows that the router looks at together


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The MLPs of E experts, ready for `experts`."""

    gate_up: Tensor  # [E, 2 * I, H], the gate first
    down: Tensor  # [E, H, I]
    tile: Tile | None = None  # None: by the number of rows


@dataclass(frozen=True, slots=True)
class Routes:
    """Who goes where. P = R * chosen pairs of a row and an expert."""

    rows: Tensor  # [P] int32, row of each pair, sorted by expert
    offsets: Tensor  # [E + 1] int32, where the pairs of each expert begin
    places: Tensor  # [R, chosen] int32, where each row's pairs are
    weights: Tensor  # [R, chosen] float32, renormalised


def pack_experts(gate_up: Tensor, down: Tensor, tile: Tile | None = None) -> PackedExperts:
    """Lay out E experts for `experts`.

    Args:
        gate_up: [E, 2 * I, H].
        down: [E, H, I].
        tile: fixes the order of addition.
    """
    return PackedExperts(gate_up.contiguous(), down.contiguous(), tile)


def fixed_tile(weight: Tensor) -> Tile:
    """A tile that does not depend on the rows."""
    return _tile(64, 4, weight)


def experts(
    x: Tensor, router: Tensor, packed: PackedExperts, chosen: int, activation: str
) -> Tensor:
    """Softmax over the router, the best `chosen` experts, renormalised; see the reference.

    Args:
        x: [R, H].
        router: [R, E], router logits.

    Returns:
        [R, H].
    """
    rows, hidden = x.shape
    count, double, _ = packed.gate_up.shape
    inner = double // 2
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    routes = route(router, chosen)
    pairs = rows * chosen
    tile = packed.tile or _tile(pairs, count, x)
    # An expert's last tile may be partly empty, and an expert without rows has none.
    tiles = min(pairs, ceil_div(pairs, tile.rows) + count)
    acted = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(tiles, ceil_div(inner, tile.outputs))](
        x, packed.gate_up, acted, routes.rows, routes.offsets, x.stride(0), inner, hidden, count,
        ACTIVATION=_ACTIVATIONS[activation], EVEN=hidden % tile.inner == 0,
        EXPERTS=power_of_two(count), BLOCK_O=tile.outputs, BLOCK_M=tile.rows,
        BLOCK_K=tile.inner, PRECISION=dot_precision(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
        **launch.options(x.device),
    )  # fmt: skip
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    _down_kernel[(tiles, ceil_div(hidden, tile.outputs))](
        acted, packed.down, parts, routes.offsets, hidden, inner, count,
        EVEN=inner % tile.inner == 0, EXPERTS=power_of_two(count), BLOCK_O=tile.outputs,
        BLOCK_M=tile.rows, BLOCK_K=tile.inner, PRECISION=dot_precision(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
        **launch.options(x.device),
    )  # fmt: skip
    block = min(1024, power_of_two(hidden))
    _weigh_kernel[(rows, ceil_div(hidden, block))](
        parts,
        routes.places,
        routes.weights,
        out,
        hidden,
        CHOSEN=chosen,
        BLOCK=block,
        **launch.options(x.device),
    )
    return out


def route(router: Tensor, chosen: int) -> Routes:
    """Choose experts and sort the pairs by expert, stably.

    Args:
        router: [R, E]; E is at most a few hundred.
    """
    rows, count = router.shape
    assert 1 <= chosen <= count, (chosen, count)
    device = router.device
    routes = Routes(
        rows=torch.empty(rows * chosen, dtype=torch.int32, device=device),
        offsets=torch.empty(count + 1, dtype=torch.int32, device=device),
        places=torch.empty(rows, chosen, dtype=torch.int32, device=device),
        weights=torch.empty(rows, chosen, dtype=torch.float32, device=device),
    )
    router = router.contiguous()
    _route_kernel[(1,)](
        router, routes.rows, routes.offsets, routes.places, routes.weights, rows, count,
        CHOSEN=chosen, EXPERTS=power_of_two(count),
        BLOCK=min(_ROUTE_ROWS, max(32, power_of_two(rows))), num_warps=4,
        **launch.options(device),
    )  # fmt: skip
    return routes


def _tile(pairs: int, count: int, x: Tensor) -> Tile:
    """Few rows an expert: a band of 64 outputs streams by; many: a square."""
    rows = min(128, max(16, power_of_two(ceil_div(2 * pairs, count))))
    outputs = 64 if rows <= 64 else 128
    inner = (128 if rows <= 32 else 64) if x.element_size() <= 2 else 32
    stages = min(4, _stages(2 * outputs + rows, inner, x.element_size(), limits(x.device)))
    return Tile(outputs, rows, inner, warps=4 if rows <= 64 else 8, stages=stages)


@triton.jit
@no_type_check
def _choose(logits, expert, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr):
    """[rows, EXPERTS] rank of each expert in its row's choice, CHOSEN where it is not chosen; ties go to the first."""
    rank = tl.full(logits.shape, CHOSEN, tl.int32)
    left = logits
    for turn in tl.static_range(CHOSEN):
        best = tl.max(left, 1)
        first = tl.min(tl.where(left == best[:, None], expert[None, :], EXPERTS), 1)
        hit = expert[None, :] == first[:, None]
        rank = tl.where(hit & (rank == CHOSEN), turn, rank)
        left = tl.where(hit, float("-inf"), left)
    return rank


@triton.jit
@no_type_check
def _load_router(router, row, expert, rows, count):
    """Logits of a block of rows, as float32; very low outside, and where they are NaN."""
    inside = (row < rows)[:, None] & (expert < count)[None, :]
    at = row.to(tl.int64)[:, None] * count + expert[None, :]
    logits = tl.load(router + at, mask=inside, other=float("-inf")).to(tl.float32)
    # A row of NaN must still choose real experts, or it would take other rows' places.
    logits = tl.where(logits == logits, logits, -1e30)
    return tl.where((expert < count)[None, :], tl.maximum(logits, -1e30), float("-inf"))


@triton.jit
@no_type_check
def _route_kernel(
    router, pair_rows, offsets, places, weights, rows, count,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: count the pairs of each expert, then place them."""
    launch.start(PDL)
    expert = tl.arange(0, EXPERTS)
    totals = tl.zeros([EXPERTS], dtype=tl.int32)
    for base in range(0, rows, BLOCK):
        row = base + tl.arange(0, BLOCK)
        rank = _choose(_load_router(router, row, expert, rows, count), expert, EXPERTS, CHOSEN)
        mine = (rank < CHOSEN) & (row < rows)[:, None]
        totals += tl.sum(mine.to(tl.int32), 0)
    ends = tl.cumsum(totals, 0)
    begins = ends - totals
    tl.store(offsets + expert, begins, mask=expert < count)
    tl.store(offsets + count, tl.sum(totals, 0))
    filled = begins
    for base in range(0, rows, BLOCK):
        row = base + tl.arange(0, BLOCK)
        logits = _load_router(router, row, expert, rows, count)
        rank = _choose(logits, expert, EXPERTS, CHOSEN)
        mine = (rank < CHOSEN) & (row < rows)[:, None]
        ones = mine.to(tl.int32)
        place = filled[None, :] + tl.cumsum(ones, 0) - 1
        filled += tl.sum(ones, 0)
        # Renormalised over the chosen, the softmax's own sum cancels.
        peak = tl.max(logits, 1)
        weight = tl.where(mine, tl.exp(logits - peak[:, None]), 0.0)
        weight = weight / tl.maximum(tl.sum(weight, 1), 1e-30)[:, None]
        whose = row[:, None] + tl.zeros_like(place)
        tl.store(pair_rows + place, whose, mask=mine)
        tl.store(places + whose * CHOSEN + rank, place, mask=mine)
        tl.store(weights + whose * CHOSEN + rank, weight, mask=mine)


@triton.jit
@no_type_check
def _find_tile(offsets, tile, count, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first pair, end of the expert's pairs) of a tile; first >= end where there is no such tile."""
    expert = tl.arange(0, EXPERTS)
    inside = expert < count
    begin = tl.load(offsets + expert, mask=inside, other=0)
    end = tl.load(offsets + expert + 1, mask=inside, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles, 0) - tiles
    mine = (tile >= before) & (tile < before + tiles)
    owner = tl.sum(tl.where(mine, expert, 0), 0)
    first = tl.sum(tl.where(mine, begin + (tile - before) * BLOCK_M, 0), 0)
    return owner, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
@no_type_check
def _gate_up_kernel(
    x, weight, out, pair_rows, offsets, x_row, outputs, inner, count,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    owner, first, end = _find_tile(offsets, tl.program_id(0), count, EXPERTS, BLOCK_M)
    if first >= end:
        return
    pair = first + tl.arange(0, BLOCK_M)
    row = tl.load(pair_rows + pair, mask=pair < end, other=0).to(tl.int64)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    mine = weight + owner.to(tl.int64) * outputs * 2 * inner
    gate_at = mine + (o % outputs).to(tl.int64)[:, None] * inner + k[None, :]
    up_at = gate_at + tl.cast(outputs, tl.int64) * inner
    x_at = x + row[:, None] * x_row + k[None, :]
    gate = tl.zeros([BLOCK_O, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_O, BLOCK_M], dtype=tl.float32)
    for at in range(0, inner, BLOCK_K):
        if EVEN:
            gate_w = tl.load(gate_at + at)
            up_w = tl.load(up_at + at)
            rows_of_x = tl.load(x_at + at)
        else:
            inside = (at + k < inner)[None, :]
            gate_w = tl.load(gate_at + at, mask=inside, other=0.0)
            up_w = tl.load(up_at + at, mask=inside, other=0.0)
            rows_of_x = tl.load(x_at + at, mask=inside, other=0.0)
        columns = tl.trans(rows_of_x)
        gate = tl.dot(gate_w, columns, gate, input_precision=PRECISION)
        up = tl.dot(up_w, columns, up, input_precision=PRECISION)
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    result = tl.trans(activate(gate, ACTIVATION) * up)
    inside = (pair < end)[:, None] & (o < outputs)[None, :]
    tl.store(out + pair.to(tl.int64)[:, None] * outputs + o[None, :], result.to(dtype), mask=inside)


@triton.jit
@no_type_check
def _down_kernel(
    x, weight, out, offsets, outputs, inner, count,
    EVEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    owner, first, end = _find_tile(offsets, tl.program_id(0), count, EXPERTS, BLOCK_M)
    if first >= end:
        return
    pair = first + tl.arange(0, BLOCK_M)
    row = tl.where(pair < end, pair, first).to(tl.int64)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    mine = weight + owner.to(tl.int64) * outputs * inner
    w_at = mine + (o % outputs).to(tl.int64)[:, None] * inner + k[None, :]
    x_at = x + row[:, None] * inner + k[None, :]
    acc = tl.zeros([BLOCK_O, BLOCK_M], dtype=tl.float32)
    for at in range(0, inner, BLOCK_K):
        if EVEN:
            w = tl.load(w_at + at)
            rows_of_x = tl.load(x_at + at)
        else:
            inside = (at + k < inner)[None, :]
            w = tl.load(w_at + at, mask=inside, other=0.0)
            rows_of_x = tl.load(x_at + at, mask=inside, other=0.0)
        acc = tl.dot(w, tl.trans(rows_of_x), acc, input_precision=PRECISION)
    inside = (pair < end)[:, None] & (o < outputs)[None, :]
    to = pair.to(tl.int64)[:, None] * outputs + o[None, :]
    tl.store(out + to, tl.trans(acc).to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _weigh_kernel(
    parts,
    places,
    weights,
    out,
    hidden,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for turn in tl.static_range(CHOSEN):
        place = tl.load(places + row * CHOSEN + turn).to(tl.int64)
        weight = tl.load(weights + row * CHOSEN + turn)
        part = tl.load(parts + place * hidden + at, mask=inside, other=0.0).to(tl.float32)
        total += weight * part
    tl.store(out + row * hidden + at, total.to(out.dtype.element_ty), mask=inside)
