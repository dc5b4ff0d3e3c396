"""Paged attention with an ancestor mask: who sees what is in `ops/meta.py`, the meaning in `ops/reference/attention`.

One kernel for tree rows, one for ragged rows. The query heads that share a KV head are folded into the rows of the
matrix product, so keys and values are read once for all of them and all nodes of a request. Tree rows split the keys
among programs (flash decoding, arXiv 2311.01282); the parts are joined in the order of the keys, by the program that
ends last or by a kernel of their own.

Invariant: keys are taken in tiles that begin at multiples of the tile's size. With `Tuning.split_tokens` the parts too
begin at fixed places and the rows of a product are fixed in number, so a row's result depends on its own keys alone.
Without it the number of parts depends on the batch, never on anything the device knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.ops.meta import LayerKV, Meta, RaggedRows, TreeRows
from foretell.ops.triton import launch
from foretell.ops.triton.device import (
    DeviceLimits,
    ceil_div,
    dense_rows,
    dot_precision,
    limits,
    power_of_two,
)

_KV_HEADS = 128  # most KV heads that the counters of a forward pass have room for
_JOIN_INSIDE = 8  # parts up to which the last program joins them by itself
_MAX_SPLITS = 64
_CROWD = (
    512  # programs from which on more of them on a processor are worth more than deep prefetching
)
_WIDE_HEAD_ROWS = (
    64  # rows of a product whose heads are wider than 128: more would not fit the registers
)
_FIXED_ROWS = 64  # rows of a product over ragged rows, where they must not depend on the batch
_NONE, _APART, _INSIDE = (
    0,
    1,
    2,
)  # who joins the parts: there is but one, a kernel, the last program


@dataclass(frozen=True, slots=True)
class Tuning:
    """How attention over tree rows is divided.

    Args:
        split_tokens: keys of one part, a multiple of 128; None: as many parts as fill the device.
        block_m: most rows of a product (query heads times nodes); rows beyond are in further programs.
        block_n: keys of a tile; None: by the head's size.
        splits: number of parts, for experiments; None: chosen.
        join_inside: whether the last program joins the parts; None: by their number.
        warps, stages: of a program; None: by the tile.
    """

    split_tokens: int | None = None
    block_m: int = 128
    block_n: int | None = None
    splits: int | None = None
    join_inside: bool | None = None
    warps: int | None = None
    stages: int | None = None


FAST = Tuning()
FIXED = Tuning(split_tokens=512, block_m=16, block_n=64, join_inside=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """What `attention` needs besides the meta, made once per forward pass and shared by its layers."""

    tuning: Tuning
    counters: (
        Tensor | None
    )  # [B * tiles * _KV_HEADS] int32, zero between launches; None for ragged rows


def store_kv(k: Tensor, v: Tensor, kv: LayerKV, kv_slots: Tensor) -> None:
    """Write the keys and values of R rows to their places.

    Args:
        k, v: [R, KV, D], the heads of a row dense.
        kv_slots: [R] int64, flat places.
    """
    rows, heads, dim = k.shape
    assert k.stride(1) == v.stride(1) == dim, (k.stride(), v.stride())
    width = heads * dim
    if rows == 0:
        return
    _store_kv_kernel[(rows, 2)](
        k,
        v,
        kv.k,
        kv.v,
        kv_slots,
        k.stride(0),
        v.stride(0),
        width,
        BLOCK=power_of_two(width),
        **launch.options(k.device),
    )


def mask(
    meta: Meta,
    window: int | None,
    block_size: int,
    group: int,
    dtype: torch.dtype,
    tuning: Tuning = FAST,
) -> Plan:
    """What `attention` needs for this meta; the kernels make their masks from the meta itself.

    Args:
        group: query heads per KV head.
        tuning: how the work is divided.
    """
    if isinstance(meta, RaggedRows):
        return Plan(tuning, None)
    rows, nodes = meta.positions.shape
    tiles = ceil_div(nodes * group, _block_m(nodes * group, min(tuning.block_m, 32)))
    counters = torch.zeros(
        rows * tiles * _KV_HEADS, dtype=torch.int32, device=meta.positions.device
    )
    return Plan(tuning, counters)


def attention(
    q: Tensor,
    kv: LayerKV,
    meta: Meta,
    mask: Plan,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attend to the paged keys; the rows' own must be stored already.

    Args:
        q: [R, heads, D], the last axis dense.
        mask: what `mask` returned for this meta and window.
        scale: multiplies the scores.
        softcap: c makes a score s into c * tanh(s / c) before the mask (Gemma 2); None: no cap.

    Returns:
        [R, heads * D]; zeros for a row that sees nothing.
    """
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    if isinstance(meta, TreeRows):
        _tree(q, kv, meta, mask, window, scale, softcap, out)
    else:
        _ragged(q, kv, meta, mask.tuning, window, scale, softcap, out)
    return out


def _tree(
    q: Tensor,
    kv: LayerKV,
    meta: TreeRows,
    plan: Plan,
    window: int | None,
    scale: float,
    softcap: float | None,
    out: Tensor,
) -> None:
    rows, nodes = meta.positions.shape
    heads, dim = q.shape[1:]
    block_size, kv_heads = kv.k.shape[1:3]
    group, tuning = heads // kv_heads, plan.tuning
    block_m = _block_m(nodes * group, min(tuning.block_m, _most_rows(dim, q.dtype)))
    tile = _tile(block_m, dim, q.dtype, tuning.block_n, limits(q.device))
    tiles = ceil_div(nodes * group, block_m)
    chunk = tuning.split_tokens or 0
    assert chunk % tile.block_n == 0, f"split_tokens {chunk} is no multiple of {tile.block_n}"
    programs = rows * tiles * kv_heads
    splits = _splits(meta.keys, programs, tile.block_n, tuning, limits(q.device))
    join = _joins(splits, tuning)
    counters = plan.counters
    assert counters is not None, "the plan is for ragged rows"
    assert programs <= counters.numel(), (programs, counters.numel())
    # Without parts these are never touched, but a kernel's argument must be something.
    parts, stats = out, out
    if join != _NONE:
        parts = torch.empty(rows, splits, nodes * heads, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, splits, 2, nodes * heads, dtype=torch.float32, device=q.device)
    bits, positions = dense_rows(meta.bits), dense_rows(meta.positions)
    tail_positions, blocks = dense_rows(meta.tail_positions), dense_rows(meta.blocks)
    _tree_kernel[(tiles * kv_heads, splits, rows)](
        q, kv.k, kv.v, out, parts, stats, counters,
        blocks, meta.context.contiguous(), bits, tail_positions, positions,
        scale, softcap or 1.0, window or 0, meta.first_key,
        q.stride(0), q.stride(1), kv.k.stride(0), kv.k.stride(1),
        blocks.stride(0), bits.stride(0), positions.stride(0), tail_positions.stride(0),
        nodes, meta.tail_positions.shape[1], tiles, splits, heads,
        GROUP=group, DIM=dim, DIM_PAD=max(16, power_of_two(dim)), BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_N=tile.block_n, CHUNK=chunk, WINDOW=window is not None,
        SOFTCAP=softcap is not None, JOIN=join,
        SPLITS=power_of_two(splits) if join == _INSIDE else 1, PRECISION=dot_precision(q.dtype),
        num_warps=tuning.warps or tile.warps,
        num_stages=tuning.stages or min(tile.stages, 3 if programs > _CROWD else 4),
        **launch.options(q.device),
    )  # fmt: skip
    if join == _APART:
        _join_kernel[(rows * nodes, heads)](
            parts, stats, out, nodes, heads, splits,
            DIM=dim, DIM_PAD=power_of_two(dim), BLOCK_S=16, num_warps=4,
            **launch.options(q.device),
        )  # fmt: skip


def _ragged(
    q: Tensor,
    kv: LayerKV,
    meta: RaggedRows,
    tuning: Tuning,
    window: int | None,
    scale: float,
    softcap: float | None,
    out: Tensor,
) -> None:
    heads, dim = q.shape[1:]
    block_size, kv_heads = kv.k.shape[1:3]
    group = heads // kv_heads
    longest = max(rows for _, rows in meta.lengths)
    block_m = _block_m(longest * group, _most_rows(dim, q.dtype))
    if tuning.split_tokens is not None:
        block_m = min(_FIXED_ROWS, _most_rows(dim, q.dtype))  # however long the chunks are
    tile = _tile(block_m, dim, q.dtype, None, limits(q.device))
    tiles = ceil_div(longest * group, block_m)
    blocks = dense_rows(meta.blocks)
    _ragged_kernel[(tiles, kv_heads, len(meta.lengths))](
        q, kv.k, kv.v, out, blocks, meta.starts.contiguous(), meta.offsets.contiguous(),
        scale, softcap or 1.0, window or 0, meta.first_key,
        q.stride(0), q.stride(1), kv.k.stride(0), kv.k.stride(1), blocks.stride(0), heads,
        GROUP=group, DIM=dim, DIM_PAD=max(16, power_of_two(dim)), BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_N=tile.block_n, WINDOW=window is not None,
        SOFTCAP=softcap is not None, PRECISION=dot_precision(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
        **launch.options(q.device),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tile:
    block_n: int
    warps: int
    stages: int


def _block_m(rows: int, most: int) -> int:
    return max(16, min(power_of_two(rows), most))


def _most_rows(dim: int, dtype: torch.dtype) -> int:
    if dtype == torch.float32:
        return 32  # exact products are made of scalar ones: more would spill
    return 128 if dim <= 128 else _WIDE_HEAD_ROWS


def _tile(
    block_m: int, dim: int, dtype: torch.dtype, block_n: int | None, device: DeviceLimits
) -> _Tile:
    """Keys of a tile, warps, and how many tiles are under way at once, so that they fit the shared memory."""
    padded = power_of_two(dim)
    widths = (block_n,) if block_n is not None else (64, 32, 16)
    for width in widths:
        own = block_m * (padded + 2 * width) * dtype.itemsize + 4096  # queries, weights, the rest
        stages = min(
            4 if block_m <= 16 else 3,
            (device.shared_bytes - own) // _key_bytes(width, padded, dtype),
        )
        if stages >= 3 or (width == widths[-1] and stages >= 1):
            break
    return _Tile(width, warps=8 if block_m * padded >= 128 * 128 else 4, stages=max(1, stages))


def _key_bytes(width: int, padded: int, dtype: torch.dtype) -> int:
    return 2 * width * padded * dtype.itemsize


def _splits(keys: int, programs: int, block_n: int, tuning: Tuning, device: DeviceLimits) -> int:
    """Number of parts: a function of host-side bounds only."""
    if tuning.split_tokens is not None:
        return ceil_div(keys, tuning.split_tokens)
    if tuning.splits is not None:
        return tuning.splits
    if programs >= device.processors:
        return 1
    wanted = min(2 * device.processors // programs, ceil_div(keys, block_n), _MAX_SPLITS)
    # A few parts more are not worth a kernel that joins them.
    return _JOIN_INSIDE if _JOIN_INSIDE < wanted <= _JOIN_INSIDE * 3 // 2 else max(1, wanted)


def _joins(splits: int, tuning: Tuning) -> int:
    if splits == 1:
        return _NONE
    inside = tuning.join_inside if tuning.join_inside is not None else splits <= _JOIN_INSIDE
    return _INSIDE if inside else _APART


@triton.jit
@no_type_check
def _store_kv_kernel(
    k, v, k_pages, v_pages, kv_slots, k_row, v_row, width, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slots + row)
    place = tl.arange(0, BLOCK)
    inside = place < width
    if tl.program_id(1) == 0:
        values = tl.load(k + row * k_row + place, mask=inside)
        tl.store(k_pages + slot * width + place, values, mask=inside)
    else:
        values = tl.load(v + row * v_row + place, mask=inside)
        tl.store(v_pages + slot * width + place, values, mask=inside)


@triton.jit
@no_type_check
def _blocks_of(table, keys, end, BLOCK_SIZE: tl.constexpr):
    """Blocks of a tile's keys. Loaded a turn ahead: a load that waits for another is not prefetched by the compiler."""
    return tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)


@triton.jit
@no_type_check
def _load_keys(
    pages, block, keys, ok, dims, head, page, page_row,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """[keys, DIM_PAD] of one KV head, zero where not ok: what is there may be NaN, and 0 * NaN is NaN."""
    rows = block * page + (keys % BLOCK_SIZE) * page_row + head * DIM
    inside = ok[:, None]
    if DIM_PAD != DIM:
        inside = inside & (dims < DIM)[None, :]
    return tl.load(pages + rows[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
@no_type_check
def _score(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of a tile, in units whose exponential is a power of two."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), whose ends are right where exp overflows.
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
    return scores * 1.4426950408889634


@triton.jit
@no_type_check
def _gather(scores, v, acc, peak, mass, PRECISION: tl.constexpr):
    """One tile of the running softmax (arXiv 2205.14135), in powers of two; an unseen key scores -inf."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet
    weights = tl.exp2(scores - safe[:, None])
    decay = tl.exp2(peak - safe)
    mass = mass * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_peak, mass


@triton.jit
@no_type_check
def _tree_kernel(
    q, k_pages, v_pages, out, parts, stats, counters,
    blocks, context, bits, tail_positions, positions,
    scale, softcap, window, first_key,
    q_row, q_head, page, page_row, table_row, bits_row, positions_row, tail_row,
    nodes, tails, tiles, splits, heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, JOIN: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A part of the keys, for a KV head and a tile of a request's rows; row m is head m % GROUP of node m // GROUP."""
    launch.start(PDL)
    head = tl.program_id(0) // tiles
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    m = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    node = m // GROUP
    own = node < nodes
    query_head = head * GROUP + m % GROUP
    dims = tl.arange(0, DIM_PAD)
    places = tl.arange(0, BLOCK_N)

    shared = tl.load(context + request).to(tl.int32)  # keys below it are everyone's
    total = shared + tails
    seen = tl.load(bits + request * bits_row + node, mask=own, other=0)
    position = tl.load(positions + request * positions_row + node, mask=own, other=1 << 40)
    low = tl.minimum(first_key, shared)
    if WINDOW:
        nearest = tl.min(position, 0).to(tl.int32)
        low = tl.minimum(tl.maximum(first_key, nearest - window + 1), shared)
    first = low // BLOCK_N * BLOCK_N
    if CHUNK > 0:
        start = tl.maximum(split * CHUNK, first)
        end = tl.minimum((split + 1) * CHUNK, total)
    else:
        chunk = tl.cdiv(tl.cdiv(total - first, splits), BLOCK_N) * BLOCK_N
        start = first + split * chunk
        end = tl.minimum(start + chunk, total)
    tail = shared // BLOCK_N * BLOCK_N  # the first tile that holds a tail key

    rows = (request * nodes + node) * q_row + query_head * q_head
    inside = own[:, None]
    if DIM_PAD != DIM:
        inside = inside & (dims < DIM)[None, :]
    queries = tl.load(q + rows[:, None] + dims[None, :], mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, DIM_PAD], dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    table = blocks + request * table_row

    block = _blocks_of(table, start + places, end, BLOCK_SIZE)
    for base in range(start, end, BLOCK_N):
        keys = base + places
        ok = (keys >= low) & (keys < total)
        k = _load_keys(
            k_pages, block, keys, ok, dims, head, page, page_row, DIM, DIM_PAD, BLOCK_SIZE
        )
        v = _load_keys(
            v_pages, block, keys, ok, dims, head, page, page_row, DIM, DIM_PAD, BLOCK_SIZE
        )
        block = _blocks_of(table, keys + BLOCK_N, end, BLOCK_SIZE)
        scores = _score(queries, k, scale, softcap, SOFTCAP, PRECISION)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        if base >= tail:  # some key is a tail key: the ancestor bits decide
            behind = tl.minimum(tl.maximum(keys - shared, 0), 63).to(tl.int64)
            ancestor = ((seen[:, None] >> behind[None, :]) & 1) > 0
            visible = tl.where((keys >= shared)[None, :], ancestor, (keys >= first_key)[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        if WINDOW:
            in_tail = keys >= shared
            place = tl.minimum(tl.maximum(keys - shared, 0), tails - 1)
            key_position = tl.load(
                tail_positions + request * tail_row + place, mask=in_tail & ok, other=0
            )
            key_position = tl.where(in_tail, key_position, keys.to(tl.int64))
            near = position[:, None] - key_position[None, :] < window
            scores = tl.where(near, scores, float("-inf"))
        acc, peak, mass = _gather(scores, v, acc, peak, mass, PRECISION)

    row = node * heads + query_head  # within the request
    width = nodes * heads
    if JOIN != 0:
        part = request * splits + split
        tl.store(stats + part * 2 * width + row, peak, mask=own)
        tl.store(stats + (part * 2 + 1) * width + row, mass, mask=own)
        if start < end:
            tl.store(parts + (part * width + row[:, None]) * DIM + dims[None, :], acc, mask=inside)
    if JOIN == 2:
        # Every thread's stores come before the count, and the count before the loads of the last program.
        tl.debug_barrier()
        counter = counters + request * tl.num_programs(0) + tl.program_id(0)
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == splits - 1:
            tl.store(counter, 0)  # ready for the next layer
            tl.debug_barrier()
            # Unrolled: every part is on its way before the first is needed.
            peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            for s in tl.static_range(SPLITS):
                at = (request * splits + s) * 2 * width
                there = own & (row * 0 + s < splits)
                found = tl.load(
                    stats + at + row, mask=there, other=float("-inf"), cache_modifier=".cg"
                )
                peak = tl.maximum(peak, found)
            safe = tl.where(peak == float("-inf"), 0.0, peak)
            acc = tl.zeros([BLOCK_M, DIM_PAD], dtype=tl.float32)
            mass = tl.zeros([BLOCK_M], dtype=tl.float32)
            for s in tl.static_range(SPLITS):
                part = request * splits + s
                at = part * 2 * width
                there = own & (row * 0 + s < splits)
                part_peak = tl.load(
                    stats + at + row, mask=there, other=float("-inf"), cache_modifier=".cg"
                )
                part_mass = tl.load(
                    stats + at + width + row, mask=there, other=0.0, cache_modifier=".cg"
                )
                some = part_peak > float("-inf")
                values = tl.load(
                    parts + (part * width + row[:, None]) * DIM + dims[None, :],
                    mask=inside & there[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                factor = tl.where(some, tl.exp2(part_peak - safe), 0.0)
                # What an empty part left behind may be anything.
                acc += tl.where(some[:, None], values, 0.0) * factor[:, None]
                mass += part_mass * factor
    if JOIN != 1:
        last = True
        if JOIN == 2:
            last = before == splits - 1
        if last:
            divided = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
            at = (request * width + row[:, None]) * DIM + dims[None, :]
            tl.store(out + at, divided.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _join_kernel(
    parts, stats, out, nodes, heads, splits,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Join the parts of one head of one node, in the order of the keys."""
    launch.start(PDL)
    request = (tl.program_id(0) // nodes).to(tl.int64)
    row = (tl.program_id(0) % nodes) * heads + tl.program_id(1)
    width = nodes * heads
    dims = tl.arange(0, DIM_PAD)
    place = tl.arange(0, BLOCK_S)
    peak = tl.full([BLOCK_S], float("-inf"), dtype=tl.float32)
    for base in range(0, splits, BLOCK_S):
        s = base + place
        at = (request * splits + s) * 2 * width + row
        peak = tl.maximum(peak, tl.load(stats + at, mask=s < splits, other=float("-inf")))
    top = tl.max(peak, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([DIM_PAD], dtype=tl.float32)
    mass = 0.0
    for base in range(0, splits, BLOCK_S):
        s = base + place
        part = request * splits + s
        part_peak = tl.load(stats + part * 2 * width + row, mask=s < splits, other=float("-inf"))
        part_mass = tl.load(stats + (part * 2 + 1) * width + row, mask=s < splits, other=0.0)
        some = part_peak > float("-inf")
        values = tl.load(
            parts + (part[:, None] * width + row) * DIM + dims[None, :],
            mask=some[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        factor = tl.exp2(part_peak - safe)
        acc += tl.sum(values * factor[:, None], 0)
        mass += tl.sum(part_mass * factor, 0)
    divided = acc / tl.where(mass == 0.0, 1.0, mass)
    at = (request * width + row) * DIM + dims
    tl.store(out + at, divided.to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit
@no_type_check
def _ragged_kernel(
    q, k_pages, v_pages, out, blocks, starts, offsets,
    scale, softcap, window, first_key,
    q_row, q_head, page, page_row, table_row, heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one chunk and one KV head; row m is head m % GROUP of the chunk's row m // GROUP."""
    launch.start(PDL)
    tile = (
        tl.num_programs(0) - 1 - tl.program_id(0)
    )  # the late rows have the most keys: they go first
    head = tl.program_id(1)
    request = tl.program_id(2)
    offset = tl.load(offsets + request)
    count = (tl.load(offsets + request + 1) - offset).to(tl.int32)
    if tile * BLOCK_M >= count * GROUP:
        return
    start = tl.load(starts + request).to(tl.int32)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUP
    own = row < count
    query_head = head * GROUP + m % GROUP
    dims = tl.arange(0, DIM_PAD)
    places = tl.arange(0, BLOCK_N)
    index = start + row  # key index of each row
    first_row = start + tile * BLOCK_M // GROUP
    last_row = start + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1)
    low = first_key
    if WINDOW:
        low = tl.maximum(first_key, first_row - window + 1)
    end = last_row + 1

    at = (offset + row) * q_row + query_head * q_head
    inside = own[:, None]
    if DIM_PAD != DIM:
        inside = inside & (dims < DIM)[None, :]
    queries = tl.load(q + at[:, None] + dims[None, :], mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, DIM_PAD], dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    table = blocks + request.to(tl.int64) * table_row

    begin = low // BLOCK_N * BLOCK_N
    block = _blocks_of(table, begin + places, end, BLOCK_SIZE)
    for base in range(begin, end, BLOCK_N):
        keys = base + places
        ok = (keys >= low) & (keys < end)
        k = _load_keys(
            k_pages, block, keys, ok, dims, head, page, page_row, DIM, DIM_PAD, BLOCK_SIZE
        )
        v = _load_keys(
            v_pages, block, keys, ok, dims, head, page, page_row, DIM, DIM_PAD, BLOCK_SIZE
        )
        block = _blocks_of(table, keys + BLOCK_N, end, BLOCK_SIZE)
        scores = _score(queries, k, scale, softcap, SOFTCAP, PRECISION)
        visible = ok[None, :] & (keys[None, :] <= index[:, None])
        if WINDOW:
            visible = visible & (index[:, None] - keys[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        acc, peak, mass = _gather(scores, v, acc, peak, mass, PRECISION)
    divided = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
    at = ((offset + row) * heads + query_head) * DIM
    tl.store(out + at[:, None] + dims[None, :], divided.to(out.dtype.element_ty), mask=inside)
