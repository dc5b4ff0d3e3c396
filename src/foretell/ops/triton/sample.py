"""Filter and Gumbel arg-max over a vocabulary: `ops/reference/sample` and `spec/processors.sample` as kernels.

The random bits are the reference's, bit for bit (32-bit integer arithmetic); the float arithmetic after them is the
same up to the last place of a logarithm. Without filters the vocabulary is split among programs and a second pass joins
the parts. With filters one program has a whole row: it finds the last token that is kept by fixing its bits from the
top, four at a time, since min_p, top_k and top_p each keep a prefix of the order (greatest logit first, ties by id).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.ops.triton import launch
from foretell.ops.triton.device import ceil_div, limits, power_of_two

_SPLIT_BLOCK = 2048
_FILTER_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class Laws:
    """Sampling parameters of B requests, as in `spec.processors.Law`."""

    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32, 0 = greedy
    top_k: Tensor  # [B] int64, 0 = off
    top_p: Tensor  # [B] float32, 1 = off
    min_p: Tensor  # [B] float32, 0 = off


def gumbel(key: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise for every (key, id).

    Args:
        key: [..., 2] int32.
        ids: [V] int32.

    Returns:
        [..., V] float32.
    """
    rows, width = key.numel() // 2, ids.shape[0]
    out = torch.empty(*key.shape[:-1], width, dtype=torch.float32, device=key.device)
    block = min(1024, power_of_two(width))
    _gumbel_kernel[(rows, ceil_div(width, block))](
        key.contiguous(),
        ids.contiguous(),
        out,
        width,
        BLOCK=block,
        **launch.options(key.device),
    )
    return out


def argmax_checked(scores: Tensor) -> Tensor:
    """Arg-max over the last axis, or -1 where a row holds a NaN or no finite score.

    Args:
        scores: [..., V] floating.

    Returns:
        [...] int64; ties go to the lowest id.
    """
    flat = scores.reshape(-1, scores.shape[-1])
    return _plain(flat, flat.shape[0], None, None, 0, None).view(scores.shape[:-1])


def sample(
    logits: Tensor,
    laws: Laws | None,
    positions: Tensor,
    stream: int = 0,
    filtered: bool = False,
    ids: Tensor | None = None,
    targets: Tensor | None = None,
) -> Tensor:
    """Draw from the law of every row: divide by the temperature, filter, add the stream's noise, take the best.

    Args:
        logits: [B, N, V] floating, the last axis dense, before the temperature.
        laws: sampling parameters; None: every row is greedy.
        positions: [B, N] int64, position of the token decided by each row.
        stream: number of the stream (`spec.noise.Stream`).
        filtered: whether some row has top_k, top_p or min_p; if not they are not looked at.
        ids: [V] int32, token id of each column, for the noise; None: 0 .. V - 1.
        targets: [V] int64, what is returned for each column; None: the column.

    Returns:
        [B, N] int64, what was drawn; -1 where the logits hold a NaN or nothing finite.
    """
    rows, nodes, width = logits.shape
    flat = logits.reshape(rows * nodes, width)
    if laws is not None and filtered:
        out = _filtered(flat, nodes, laws, positions.contiguous(), stream, ids)
        if targets is not None:
            out = torch.where(out >= 0, targets[out.clamp(min=0)], -1)
    else:
        out = _plain(flat, nodes, laws, positions.contiguous(), stream, ids, targets)
    return out.view(rows, nodes)


def _plain(
    logits: Tensor,
    nodes: int,
    laws: Laws | None,
    positions: Tensor | None,
    stream: int,
    ids: Tensor | None,
    targets: Tensor | None = None,
) -> Tensor:
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    wanted = ceil_div(4 * limits(logits.device).processors, rows)
    tiles = ceil_div(ceil_div(width, _SPLIT_BLOCK), wanted)  # of one program
    splits = ceil_div(width, tiles * _SPLIT_BLOCK)
    best = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
    place = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    _part_kernel[(splits, rows)](
        logits, best, place,
        logits if laws is None else laws.seed, logits if laws is None else laws.temperature,
        positions, ids, logits.stride(0), width, nodes, splits, tiles,
        STREAM=stream, SAMPLED=laws is not None, MAPPED=ids is not None, BLOCK=_SPLIT_BLOCK,
        num_warps=8,
        **launch.options(logits.device),
    )  # fmt: skip
    _join_kernel[(rows,)](
        best, place, targets, out, splits, MAPPED=targets is not None,
        BLOCK=power_of_two(splits), num_warps=1, **launch.options(logits.device),
    )  # fmt: skip
    return out


def _filtered(
    logits: Tensor, nodes: int, laws: Laws, positions: Tensor, stream: int, ids: Tensor | None
) -> Tensor:
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _filter_kernel[(rows,)](
            logits, out, laws.seed, laws.temperature, laws.top_k, laws.top_p, laws.min_p,
            positions, ids, logits.stride(0), width, nodes,
            STREAM=stream, MAPPED=ids is not None,
            BLOCK=min(_FILTER_BLOCK, power_of_two(width)), num_warps=16,
            **launch.options(logits.device),
        )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _mix32(x):
    """uint32 → uint32; `ops.reference.sample.mix32`."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
@no_type_check
def _unit(bits):
    """uint32 → float32 in (0, 1)."""
    high = (bits >> 16).to(tl.float32)
    low = (bits & 0xFFFF).to(tl.float32)
    return tl.minimum(high * (2.0**-16) + (low + 0.5) * (2.0**-32), 1.0 - 2.0**-24)


@triton.jit
@no_type_check
def _key(seed, position, STREAM: tl.constexpr):
    """The two words of `spec.noise.key` with index 0."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    where = position.to(tl.uint32)
    first = _mix32(_mix32(low ^ (where * tl.full([], 2654435761, tl.uint32))) + high)
    salt = tl.full([], (STREAM * 1640531527) % 4294967296, tl.uint32)
    second = _mix32(_mix32(high ^ salt) + _mix32(first + where))
    return _mix32(first ^ second), second


@triton.jit
@no_type_check
def _gumbel(first, second, ids):
    """Noise of the ids, uint32. log1p(-u) is log(w) (-u) / (w - 1) with w = 1 - u, exact where u is tiny."""
    h = _mix32((ids * tl.full([], 0x9E3779B9, tl.uint32)) ^ first)
    u = _unit(_mix32(h + second))
    w = 1.0 - u
    off = w - 1.0
    exponential = tl.where(off == 0.0, u, tl.log(w) * u / tl.where(off == 0.0, 1.0, off))
    return -tl.log(exponential)


@triton.jit
@no_type_check
def _gumbel_kernel(
    key,
    ids,
    out,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    token = tl.load(ids + place, mask=inside, other=0).to(tl.uint32)
    first = tl.load(key + 2 * row).to(tl.uint32)
    second = tl.load(key + 2 * row + 1).to(tl.uint32)
    tl.store(out + row * width + place, _gumbel(first, second, token), mask=inside)


@triton.jit
@no_type_check
def _token_ids(ids, place, inside, MAPPED: tl.constexpr):
    token = place
    if MAPPED:
        token = tl.load(ids + place, mask=inside, other=0)
    return token.to(tl.uint32)


@triton.jit
@no_type_check
def _scaled(logits, place, inside, temperature):
    """Logits divided by the temperature, correctly rounded; -inf outside."""
    x = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.math.div_rn(x, temperature + tl.zeros_like(x))


@triton.jit
@no_type_check
def _part_kernel(
    logits, best, place_of_best, seeds, temperatures, positions, ids,
    row_stride, width, nodes, splits, tiles,
    STREAM: tl.constexpr, SAMPLED: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The best score of one part of one row and where it is; NaN if the part holds one."""
    launch.start(PDL)
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    logits += row * row_stride
    temperature = 0.0
    divisor = 1.0
    if SAMPLED:
        temperature = tl.load(temperatures + row // nodes)
        divisor = tl.where(temperature > 0.0, temperature, 1.0)
        first, second = _key(tl.load(seeds + row // nodes), tl.load(positions + row), STREAM)
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    where = tl.full([BLOCK], 2147483647, dtype=tl.int32)
    sick = tl.zeros([BLOCK], dtype=tl.int32)
    for tile in range(tiles):
        place = (split * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        inside = place < width
        if SAMPLED:
            x = _scaled(logits, place, inside, divisor)
            if temperature > 0.0:
                x += _gumbel(first, second, _token_ids(ids, place, inside, MAPPED))
        else:
            x = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
        sick = sick | (x != x).to(tl.int32)
        better = x > top
        where = tl.where(better, place, where)
        top = tl.where(better, x, top)
    peak = tl.max(top, 0)
    lowest = tl.min(tl.where(top == peak, where, 2147483647), 0)
    peak = tl.where(tl.max(sick, 0) > 0, float("nan"), peak)
    tl.store(best + row * splits + split, peak)
    tl.store(place_of_best + row * splits + split, lowest)


@triton.jit
@no_type_check
def _join_kernel(
    best, place_of_best, targets, out, splits,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    inside = split < splits
    top = tl.load(best + row * splits + split, mask=inside, other=float("-inf"))
    where = tl.load(place_of_best + row * splits + split, mask=inside, other=2147483647)
    sick = tl.max((top != top).to(tl.int32), 0) > 0
    peak = tl.max(tl.where(top != top, float("-inf"), top), 0)
    lowest = tl.min(tl.where(top == peak, where, 2147483647), 0)
    sound = (sick == 0) & (peak > float("-inf")) & (peak < float("inf"))
    drawn = tl.where(sound, lowest, -1).to(tl.int64)
    if MAPPED:
        drawn = tl.load(targets + drawn, mask=sound, other=-1)
    tl.store(out + row, drawn)


@triton.jit
@no_type_check
def _ordered(x):
    """float32 → uint32 in the same order; -0 and 0 are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 > 0, ~bits, bits | 0x80000000)


@triton.jit
@no_type_check
def _mass(x, peak):
    """Weight of a scaled logit, relative to the greatest one."""
    return tl.exp(x - peak)


@triton.jit
@no_type_check
def _deepest(
    logits, divisor, peak, width, wanted, floor, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The greatest ordered value t such that tokens at or above t (and the floor) number `wanted`, or weigh it."""
    digit = tl.arange(0, 16).to(tl.uint32)
    prefix = tl.full([], 0, tl.uint32)
    shift = tl.full([], 28, tl.uint32)
    for _ in range(8):
        candidates = prefix | (digit << shift)
        total = tl.zeros([16, BLOCK], dtype=tl.float32)  # added up once, behind the loop
        for base in range(0, width, BLOCK):
            place = base + tl.arange(0, BLOCK)
            inside = place < width
            x = _scaled(logits, place, inside, divisor)
            value = _ordered(x)
            above = (value[None, :] >= candidates[:, None]) & (inside & (value >= floor))[None, :]
            weight = tl.full([BLOCK], 1.0, tl.float32)
            if BY_MASS:
                weight = _mass(x, peak)
            total += tl.where(above, weight[None, :], 0.0)
        reached = tl.sum((tl.sum(total, 1) >= wanted).to(tl.int32), 0)
        prefix = prefix | (tl.maximum(reached - 1, 0).to(tl.uint32) << shift)
        shift = shift - tl.full([], 4, tl.uint32)
    return prefix


@triton.jit
@no_type_check
def _above(logits, divisor, peak, width, limit, BLOCK: tl.constexpr):
    """(number of tokens above the limit, their weight, number of tokens at it)."""
    count = tl.zeros([BLOCK], dtype=tl.float32)
    weight = tl.zeros([BLOCK], dtype=tl.float32)
    ties = tl.zeros([BLOCK], dtype=tl.float32)
    for base in range(0, width, BLOCK):
        place = base + tl.arange(0, BLOCK)
        inside = place < width
        x = _scaled(logits, place, inside, divisor)
        value = _ordered(x)
        over = inside & (value > limit)
        count += over.to(tl.float32)
        weight += tl.where(over, _mass(x, peak), 0.0)
        ties += (inside & (value == limit)).to(tl.float32)
    return tl.sum(count, 0), tl.sum(weight, 0), tl.sum(ties, 0)


@triton.jit
@no_type_check
def _filter_kernel(
    logits, out, seeds, temperatures, top_ks, top_ps, min_ps, positions, ids,
    row_stride, width, nodes,
    STREAM: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row. What is kept: tokens above `limit`, and the first `kept_ties` of those equal to it."""
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    request = row // nodes
    logits += row * row_stride
    temperature = tl.load(temperatures + request)
    sampled = temperature > 0.0
    divisor = tl.where(sampled, temperature, 1.0)
    top_k = tl.load(top_ks + request)
    top_p = tl.load(top_ps + request)
    min_p = tl.load(min_ps + request)
    first, second = _key(tl.load(seeds + request), tl.load(positions + row), STREAM)

    peaks = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    sick = tl.zeros([BLOCK], dtype=tl.int32)
    for base in range(0, width, BLOCK):
        place = base + tl.arange(0, BLOCK)
        x = _scaled(logits, place, place < width, divisor)
        sick = sick | (x != x).to(tl.int32)
        peaks = tl.maximum(peaks, x)
    peak = tl.max(peaks, 0)
    sound = (tl.max(sick, 0) == 0) & (peak > float("-inf")) & (peak < float("inf"))

    limit = tl.full([], 0, tl.uint32)  # everything is kept
    kept_ties = width * 1.0
    if sound & sampled:
        if min_p > 0.0:
            # The least token that stays: p / p_max >= min_p. Found as the others are: its value is one of the row's.
            least = peak
            for base in range(0, width, BLOCK):
                place = base + tl.arange(0, BLOCK)
                inside = place < width
                x = _scaled(logits, place, inside, divisor)
                stays = inside & (_mass(x, peak) >= min_p)
                least = tl.minimum(least, tl.min(tl.where(stays, x, float("inf")), 0))
            limit = _ordered(least)
        if (top_k > 0) & (top_k < width):
            found = _deepest(
                logits, divisor, peak, width, top_k.to(tl.float32), limit, False, BLOCK
            )
            count, _, _ = _above(logits, divisor, peak, width, found, BLOCK)
            # With fewer than k left by min_p nothing is found, and its limit holds.
            if found > limit:
                kept_ties = top_k.to(tl.float32) - count
                limit = found
            elif found == limit:
                kept_ties = top_k.to(tl.float32) - count
        if top_p < 1.0:
            _, over, ties = _above(logits, divisor, peak, width, limit, BLOCK)
            each = _mass(_value(limit), peak)
            kept_ties = tl.minimum(kept_ties, ties)
            all_mass = over + kept_ties * tl.where(kept_ties > 0, each, 0.0)
            found = _deepest(logits, divisor, peak, width, top_p * all_mass, limit, True, BLOCK)
            if found >= limit:
                _, over, ties = _above(logits, divisor, peak, width, found, BLOCK)
                each = _mass(_value(found), peak)
                needed = tl.ceil((top_p * all_mass - over) / tl.where(each > 0, each, 1.0))
                most = tl.where(found == limit, kept_ties, ties)
                kept_ties = tl.minimum(tl.maximum(needed, 1.0), most)
                limit = found

    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    where = tl.full([BLOCK], 2147483647, dtype=tl.int32)
    seen = 0.0
    for base in range(0, width, BLOCK):
        place = base + tl.arange(0, BLOCK)
        inside = place < width
        x = _scaled(logits, place, inside, divisor)
        value = _ordered(x)
        tie = (inside & (value == limit)).to(tl.float32)
        rank = seen + tl.cumsum(tie, 0)
        seen += tl.sum(tie, 0)
        kept = inside & ((value > limit) | ((tie > 0) & (rank <= kept_ties)))
        if sampled:
            x += _gumbel(first, second, _token_ids(ids, place, inside, MAPPED))
        x = tl.where(kept, x, float("-inf"))
        better = x > top
        where = tl.where(better, place, where)
        top = tl.where(better, x, top)
    peak = tl.max(top, 0)
    lowest = tl.min(tl.where(top == peak, where, 2147483647), 0)
    sound = sound & (peak > float("-inf"))
    drawn = tl.where(sound, lowest, -1).to(tl.int64)
    tl.store(out + row, drawn)


@triton.jit
@no_type_check
def _value(ordered):
    """uint32 → float32; the inverse of `_ordered`."""
    bits = tl.where(ordered >> 31 > 0, ordered & 0x7FFFFFFF, ~ordered)
    return bits.to(tl.float32, bitcast=True)
