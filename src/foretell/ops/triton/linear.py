"""Products with weights, x W^T: cuBLAS, and our own kernels for few rows (1 to 64), where reading W is all the work.

The weight is the left operand (its rows fill the matrix units, the few rows of x pad to 16), so one program streams a
band of W once. With `split_k` the inner axis is divided among programs; the parts [S, R, O] float32 are added up in
order by the program of a tile that ends last, or, where they are many, by a kernel of their own. A result's order of
addition depends on the tile alone, not on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from foretell.ops.triton import launch
from foretell.ops.triton.device import DeviceLimits, ceil_div, dot_precision, limits, power_of_two
from foretell.ops.triton.layers import act_mul, activate

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_LEAST_BAND = 16  # outputs of the narrowest tile
_DEEP_BYTES = 160 << 10  # shared memory that the deepest of `best_tile`'s streams needs
MOST_ROWS = 64  # of x, for the kernels here


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is divided."""

    outputs: int = 64  # rows of W in one program
    rows: int = 16  # rows of x in one program
    inner: int = 128  # of one turn
    split_k: int = 1
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [O, I] and its bias, ready for `linear`. `tile` makes it one of our own products, for any rows."""

    weight: Tensor
    bias: Tensor | None  # [O]
    counters: Tensor  # [tiles] int32, zero between launches
    tile: Tile | None = None


def repacks(weight: Tensor) -> bool:
    """Whether packing copies a weight: it never does."""
    return False


def pack_linear(weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Packed:
    """Lay out a weight [O, I] for `linear` or (gate first, then up) for `gated`; `tile` fixes the order of addition."""
    tiles = ceil_div(weight.shape[0], _LEAST_BAND) * (MOST_ROWS // 16)
    return Packed(weight, bias, torch.zeros(tiles, dtype=torch.int32, device=weight.device), tile)


def linear(x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
    """x W^T + b (+ residual, whose memory the sum may take).

    Args:
        x: [R, I].
        residual: [R, O] or None.

    Returns:
        [R, O].
    """
    tile = packed.tile or best_tile(x.shape[0], packed.weight)
    if tile is not None:
        return product(x, packed, residual, tile)
    if residual is None:
        return F.linear(x, packed.weight, packed.bias)
    if packed.bias is not None:
        return residual + F.linear(x, packed.weight, packed.bias)
    return residual.addmm_(x, packed.weight.T)  # one kernel and no copy


def gated(x: Tensor, packed: Packed, activation: str) -> Tensor:
    """act(gate(x)) * up(x): [R, I] → [R, O]."""
    tile = None if packed.tile else best_gated_tile(x.shape[0], packed.weight)
    if tile is not None:
        return gated_product(x, packed.weight, packed.bias, activation, tile)
    return act_mul(linear(x, packed), activation)


def product(x: Tensor, packed: Packed, residual: Tensor | None, tile: Tile) -> Tensor:
    """x W^T + b (+ residual) by our own kernel.

    Args:
        x: [R, I], the last axis dense.
        packed: its weight [O, I], the last axis dense.

    Returns:
        [R, O].
    """
    rows, outputs = x.shape[0], packed.weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    residual = None if residual is None else residual.contiguous()
    if tile.split_k == 1:
        _launch(x, packed, residual, out, None, tile)
        return out
    parts = torch.empty(tile.split_k, rows, outputs, dtype=torch.float32, device=x.device)
    if _tiles(rows, outputs, tile) <= packed.counters.numel():
        _launch(x, packed, residual, out, parts, tile)
        return out
    _launch(x, packed, None, None, parts, tile)
    block = min(1024, power_of_two(outputs))
    _sum_kernel[(rows, ceil_div(outputs, block))](
        parts, packed.bias, residual, out, rows, outputs, PARTS=tile.split_k,
        BIAS=packed.bias is not None, RESIDUAL=residual is not None, BLOCK=block,
        **launch.options(x.device),
    )  # fmt: skip
    return out


def gated_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, tile: Tile
) -> Tensor:
    """act(x G^T) * (x U^T) in one kernel, W = [G; U]; the inner axis is not split.

    Args:
        x: [R, I].
        weight: [2 * O, I].

    Returns:
        [R, O].
    """
    rows, inner = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows:
        _gated_kernel[(ceil_div(rows, tile.rows), ceil_div(outputs, tile.outputs))](
            x, weight, bias, out, rows, outputs, inner, x.stride(0), weight.stride(0),
            ACTIVATION=_ACTIVATIONS[activation], BIAS=bias is not None,
            EVEN=inner % tile.inner == 0, BLOCK_O=tile.outputs, BLOCK_M=tile.rows,
            BLOCK_K=tile.inner, PRECISION=dot_precision(x.dtype),
            num_warps=tile.warps, num_stages=tile.stages, **launch.options(x.device),
        )  # fmt: skip
    return out


def best_tile(rows: int, weight: Tensor) -> Tile | None:
    """The tile of a product of few rows, where our own is the faster one; None: cuBLAS."""
    if not _streams(rows, weight):
        return None
    outputs, inner = weight.shape
    split = 1
    while ceil_div(outputs, 64) * split < 96 and inner // (256 * split) >= 4:
        split *= 2
    block = max(16, power_of_two(rows))
    return Tile(64, block, 128, split, warps=4, stages=6 if block == 16 else 5)


def best_gated_tile(rows: int, weight: Tensor) -> Tile | None:
    """The same for `gated_product`; None: a product, then the activation."""
    if not _streams(rows, weight):
        return None
    return Tile(64, max(16, power_of_two(rows)), 128, warps=4, stages=4)


def _streams(rows: int, weight: Tensor) -> bool:
    """Whether a product is one of those that were measured: on Hopper, 16-bit numbers, few rows, whole turns."""
    whole = weight.shape[1] % 128 == 0 and weight.element_size() == 2
    if not whole or rows > MOST_ROWS:
        return False
    limit = limits(weight.device)
    return limit.capability >= 90 and limit.shared_bytes >= _DEEP_BYTES


def tile_for(rows: int, outputs: int, inner: int, itemsize: int, device: torch.device) -> Tile:
    """A tile that keeps every processor busy with a few deep streams of W."""
    limit = limits(device)
    block_rows = min(64, max(16, power_of_two(rows)))
    block_inner = 128 if itemsize <= 2 else 32
    bands = ceil_div(outputs, 64) * ceil_div(rows, block_rows)
    split = 1
    while split < 8 and bands * split < 2 * limit.processors and inner // split >= 4 * block_inner:
        split *= 2
    stages = _stages(64 + block_rows, block_inner, itemsize, limit)
    return Tile(64, block_rows, block_inner, split, warps=4, stages=stages)


def fixed_tile(weight: Tensor) -> Tile:
    """A tile that depends on the weight alone: with it a row's result does not depend on the rows beside it."""
    outputs, inner = weight.shape
    return tile_for(MOST_ROWS, outputs, inner, weight.element_size(), weight.device)


def _stages(rows: int, inner: int, itemsize: int, limit: DeviceLimits) -> int:
    """Turns under way at once: two programs share a processor."""
    return max(2, min(5, (limit.shared_bytes // 2 - 2048) // (rows * inner * itemsize)))


def _tiles(rows: int, outputs: int, tile: Tile) -> int:
    return ceil_div(rows, tile.rows) * ceil_div(outputs, tile.outputs)


def _launch(
    x: Tensor,
    packed: Packed,
    residual: Tensor | None,
    out: Tensor | None,
    parts: Tensor | None,
    tile: Tile,
) -> None:
    """Without `out` the parts are left as they are."""
    rows, inner = x.shape
    weight, bias = packed.weight, packed.bias
    outputs = weight.shape[0]
    grid = (ceil_div(rows, tile.rows), ceil_div(outputs, tile.outputs), tile.split_k)
    _linear_kernel[grid](
        x, weight, bias, residual, out, parts, packed.counters,
        rows, outputs, inner, x.stride(0), weight.stride(0),
        BIAS=bias is not None, RESIDUAL=residual is not None, EVEN=inner % tile.inner == 0,
        BLOCK_O=tile.outputs, BLOCK_M=tile.rows, BLOCK_K=tile.inner, SPLIT=tile.split_k,
        JOIN=parts is not None and out is not None, PRECISION=dot_precision(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
        **launch.options(x.device),
    )  # fmt: skip


@triton.jit
@no_type_check
def _finish(
    result, bias, residual, out, to, o, inside, outputs, BIAS: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """Bias, residual, store; `result` is [rows, outputs] float32."""
    if BIAS:
        result += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        result += tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + to, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _linear_kernel(
    x, weight, bias, residual, out, parts, counters,
    rows, outputs, inner, x_row, weight_row,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    JOIN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    part = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    turns = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT)
    first = part * turns * BLOCK_K
    end = tl.minimum(first + turns * BLOCK_K, inner)
    # Outputs outside repeat the first ones: no mask in the loop, and they are not stored.
    w_at = weight + (o % outputs).to(tl.int64)[:, None] * weight_row + k[None, :]
    own = m < rows  # a masked row is no traffic
    x_at = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    launch.start(PDL)
    acc = tl.zeros([BLOCK_O, BLOCK_M], dtype=tl.float32)
    for at in range(first, end, BLOCK_K):
        if EVEN:
            w = tl.load(w_at + at, eviction_policy="evict_first")
            rows_of_x = tl.load(x_at + at, mask=own[:, None], other=0.0)
        else:
            inside = (at + k < inner)[None, :]
            w = tl.load(w_at + at, mask=inside, other=0.0, eviction_policy="evict_first")
            rows_of_x = tl.load(x_at + at, mask=inside & own[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(rows_of_x), acc, input_precision=PRECISION)
    inside = own[:, None] & (o < outputs)[None, :]
    result = tl.trans(acc)
    to = m.to(tl.int64)[:, None] * outputs + o[None, :]
    if SPLIT == 1:
        _finish(result, bias, residual, out, to, o, inside, outputs, BIAS, RESIDUAL)
    else:
        stride = tl.cast(rows, tl.int64) * outputs
        tl.store(parts + part * stride + to, result, mask=inside)
    if JOIN:
        # Every thread's stores come before the count, and the count before the loads of the last program.
        tl.debug_barrier()
        counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == SPLIT - 1:
            tl.store(counter, 0)  # ready for the next launch
            tl.debug_barrier()
            total = tl.zeros([BLOCK_M, BLOCK_O], dtype=tl.float32)
            for s in range(SPLIT):
                total += tl.load(
                    parts + s * stride + to, mask=inside, other=0.0, cache_modifier=".cg"
                )
            _finish(total, bias, residual, out, to, o, inside, outputs, BIAS, RESIDUAL)


@triton.jit
@no_type_check
def _sum_kernel(
    parts, bias, residual, out, rows, outputs,
    PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < outputs
    result = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        result += tl.load(parts + (part * rows + row) * outputs + o, mask=inside, other=0.0)
    if BIAS:
        result += tl.load(bias + o, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        result += tl.load(residual + row * outputs + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + o, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _gated_kernel(
    x, weight, bias, out, rows, outputs, inner, x_row, weight_row,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    gate_at = weight + (o % outputs).to(tl.int64)[:, None] * weight_row + k[None, :]
    up_at = gate_at + tl.cast(outputs, tl.int64) * weight_row
    own = m < rows
    x_at = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    launch.start(PDL)
    gate = tl.zeros([BLOCK_O, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_O, BLOCK_M], dtype=tl.float32)
    for at in range(0, inner, BLOCK_K):
        if EVEN:
            gate_w = tl.load(gate_at + at, eviction_policy="evict_first")
            up_w = tl.load(up_at + at, eviction_policy="evict_first")
            rows_of_x = tl.load(x_at + at, mask=own[:, None], other=0.0)
        else:
            inside = (at + k < inner)[None, :]
            gate_w = tl.load(gate_at + at, mask=inside, other=0.0, eviction_policy="evict_first")
            up_w = tl.load(up_at + at, mask=inside, other=0.0, eviction_policy="evict_first")
            rows_of_x = tl.load(x_at + at, mask=inside & own[:, None], other=0.0)
        columns = tl.trans(rows_of_x)
        gate = tl.dot(gate_w, columns, gate, input_precision=PRECISION)
        up = tl.dot(up_w, columns, up, input_precision=PRECISION)
    if BIAS:
        gate += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + outputs + o, mask=o < outputs, other=0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    # Rounded as the product would have been, so that fused and separate give the same.
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    result = tl.trans(activate(gate, ACTIVATION) * up)
    inside = own[:, None] & (o < outputs)[None, :]
    to = m.to(tl.int64)[:, None] * outputs + o[None, :]
    tl.store(out + to, result.to(dtype), mask=inside)
