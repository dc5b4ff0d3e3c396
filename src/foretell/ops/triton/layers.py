"""The small operations of a transformer layer as kernels, and the fused ones that the step runs on.

`embed`, `rms_norm`, `rope` and `act_mul` mean what they mean in `ops/reference/layers`. Fused: `add_rms_norm` (addition
and norm), `rope_store` (query and key norms, rotation, KV write). The fused ones also take the parts of a split matrix
product, [S, R, O] float32, and add them up first, in order: no launch of its own for that.

Arithmetic is in float32 and rounded where the reference rounds a sum that others see (the residual stream).
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.ops.meta import LayerKV
from foretell.ops.triton import launch
from foretell.ops.triton.device import ceil_div, power_of_two

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_HEADS_PER_PROGRAM = 8


def embed(tokens: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Token embeddings.

    Args:
        tokens: [R] int64; -1 is padding and embeds like token 0.
        weight: [V, H].
        scale: multiplies the result, rounded to the weight's dtype first.

    Returns:
        [R, H].
    """
    rows, width = tokens.shape[0], weight.shape[1]
    out = torch.empty(rows, width, dtype=weight.dtype, device=weight.device)
    if rows:
        block = min(1024, power_of_two(width))
        _embed_kernel[(rows, ceil_div(width, block))](
            tokens,
            weight,
            out,
            scale,
            width,
            SCALED=scale != 1.0,
            BLOCK=block,
            **launch.options(weight.device),
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Root-mean-square norm (arXiv 1910.07467), in float32, rounded once; then the residual is added.

    Args:
        x: [..., H], at most three axes, the last one dense.
        weight: [H], float32.
        residual: [..., H] or None.

    Returns:
        [..., H] in x's dtype.
    """
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = out.numel() // width
    if rows == 0:
        return out
    inner, outer_stride, inner_stride = _two_axes(x)
    if residual is not None:
        residual = residual.contiguous()
    block = power_of_two(width)
    _rms_norm_kernel[(rows,)](
        x, weight, residual if residual is not None else x, out,
        inner, outer_stride, inner_stride, width, eps,
        RESIDUAL=residual is not None, BLOCK=block, num_warps=_warps(block),
        **launch.options(x.device),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after an addition, and its norm.

    Args:
        x: [R, H].
        delta: [R, H], or the parts [S, R, H] float32 of a split matrix product.
        weight: [H], float32.

    Returns:
        (x + delta [R, H], rms_norm of that sum as rounded [R, H]).
    """
    rows, width = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x)
    if rows == 0:
        return total, normed
    block = power_of_two(width)
    parts = delta.shape[0] if delta.dim() == 3 else 0
    delta = delta.contiguous()
    _add_rms_norm_kernel[(rows,)](
        x, delta, weight, total, normed, x.stride(0), rows, width, eps,
        PARTS=parts, BLOCK=block, num_warps=_warps(block),
        **launch.options(x.device),
    )  # fmt: skip
    return total, normed


def angles(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a forward pass.

    Args:
        positions: [R] int64.
        frequencies: [dim / 2] float32.
        factor: multiplies the results.

    Returns:
        (cos, sin), each [R, 1, dim] in `dtype`; the sines negated in the first half.
    """
    rows, half = positions.shape[0], frequencies.shape[0]
    both = torch.empty(2, rows, 1, 2 * half, dtype=dtype, device=positions.device)
    if rows:
        _angles_kernel[(rows,)](
            positions.contiguous(), frequencies, both, rows, factor,
            HALF=half, BLOCK=power_of_two(half), num_warps=1, **launch.options(positions.device),
        )  # fmt: skip
    cos, sin = both.unbind()
    return cos, sin


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `dim` channels of each head in place (arXiv 2104.09864), pairs being (i, i + dim / 2).

    Args:
        x: [R, A, D], heads dense, rows at any stride.
        cos: [R, 1, dim].
        sin: [R, 1, dim], negated in the first half.

    Returns:
        x.
    """
    rows, heads, width = x.shape
    assert x.stride(1) == width, x.stride()
    if rows:
        _launch_rope(x, x, heads, 0, None, None, 0.0, cos, sin, None, None, 0)
    return x


def rope_store(
    qkv: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    kv_slots: Tensor,
) -> Tensor:
    """All between the QKV product and attention: query and key norms, rotation, KV write; one launch.

    Args:
        qkv: [R, heads + 2 * KV, D] dense; the parts [S, R, (heads + 2 * KV) * D] float32 of a split product are
            added up first.
        heads: number of query heads.
        norms: (query weight [D], key weight [D]) float32, or None.
        cos, sin: as `rope` takes them.
        kv: where keys and values go.
        kv_slots: [R] int64, flat places.

    Returns:
        q [R, heads, D], normed and rotated: a view of qkv if that is not in parts.
    """
    kv_heads, width = kv.k.shape[2:]
    in_parts = qkv.shape[2] == (heads + 2 * kv_heads) * width
    parts = qkv.shape[0] if in_parts else 0
    if parts:
        q = torch.empty(qkv.shape[1], heads, width, dtype=kv.k.dtype, device=qkv.device)
    else:
        assert qkv.shape[1:] == (heads + 2 * kv_heads, width), qkv.shape
        q = qkv[:, :heads]
    if q.shape[0]:
        q_weight, k_weight = norms or (None, None)
        _launch_rope(
            qkv, q, heads, kv_heads, q_weight, k_weight, eps, cos, sin, kv, kv_slots, parts
        )
    return q


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up.

    Args:
        gate_up: [..., 2 * I], the gate first; the parts [S, R, 2 * I] float32 of a split product go to `act_mul_parts`.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        [..., I].
    """
    inner = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    _launch_act_mul(gate_up.contiguous(), out, 0, activation)
    return out


def act_mul_parts(parts: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """`act_mul` of a split product.

    Args:
        parts: [S, R, 2 * I] float32.
        dtype: of the result.

    Returns:
        [R, I].
    """
    out = torch.empty(parts.shape[1], parts.shape[2] // 2, dtype=dtype, device=parts.device)
    _launch_act_mul(parts.contiguous(), out, parts.shape[0], activation)
    return out


def _launch_act_mul(source: Tensor, out: Tensor, parts: int, activation: str) -> None:
    inner = out.shape[-1]
    rows = out.numel() // inner
    if rows == 0:
        return
    block = min(1024, power_of_two(inner))
    _act_mul_kernel[(rows, ceil_div(inner, block))](
        source,
        out,
        rows,
        inner,
        PARTS=parts,
        ACTIVATION=_ACTIVATIONS[activation],
        BLOCK=block,
        **launch.options(out.device),
    )


def _launch_rope(
    source: Tensor,
    q: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV | None,
    kv_slots: Tensor | None,
    parts: int,
) -> None:
    rows, width = q.shape[0], q.shape[2]
    rotated = cos.shape[-1]
    everything = heads + 2 * kv_heads
    cos, sin = cos.contiguous(), sin.contiguous()
    _rope_kernel[(rows, ceil_div(everything, _HEADS_PER_PROGRAM))](
        source, q, q if kv is None else kv.k, q if kv is None else kv.v,
        cos if kv_slots is None else kv_slots, cos, sin,
        cos if q_weight is None else q_weight, cos if k_weight is None else k_weight,
        everything * width if parts else source.stride(0), q.stride(0), rows,
        heads, kv_heads, eps,
        PARTS=parts, NORMED=q_weight is not None, STORE=kv is not None, DIM=width, HALF=rotated // 2,
        BLOCK_A=_HEADS_PER_PROGRAM, BLOCK_H=power_of_two(rotated // 2),
        BLOCK_R=power_of_two(max(width - rotated, 1)), PASSED=rotated < width,
        **launch.options(q.device),
    )  # fmt: skip


def _two_axes(x: Tensor) -> tuple[int, int, int]:
    """(length of the inner axis, outer stride, inner stride) that reach every row of x."""
    assert x.stride(-1) == 1, x.stride()
    if x.dim() == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    assert x.dim() == 2, x.shape
    return 1, x.stride(0), 0


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


@triton.jit
@no_type_check
def _embed_kernel(
    tokens, weight, out, scale, width, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.maximum(tl.load(tokens + row), 0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    values = tl.load(weight + token * width + place, mask=inside)
    if SCALED:
        rounded = (tl.zeros([BLOCK], dtype=tl.float32) + scale).to(values.dtype).to(tl.float32)
        values = (values.to(tl.float32) * rounded).to(values.dtype)
    tl.store(out + row * width + place, values, mask=inside)


@triton.jit
@no_type_check
def _rms_norm_kernel(
    x, weight, residual, out, inner, outer_stride, inner_stride, width, eps,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    at = (row // inner) * outer_stride + (row % inner) * inner_stride
    launch.release(PDL)
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    launch.wait(PDL)
    values = tl.load(x + at + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, 0) / width
    normed = (values * tl.rsqrt(mean + eps) * gain).to(out.dtype.element_ty)
    if RESIDUAL:
        before = tl.load(residual + row * width + place, mask=inside, other=0.0).to(tl.float32)
        normed = (before + normed.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * width + place, normed, mask=inside)


@triton.jit
@no_type_check
def _add_rms_norm_kernel(
    x, delta, weight, total, normed, x_row, rows, width, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    launch.release(PDL)
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    launch.wait(PDL)
    values = tl.load(x + row * x_row + place, mask=inside, other=0.0)
    if PARTS == 0:
        added = tl.load(delta + row * width + place, mask=inside, other=0.0).to(tl.float32)
    else:
        added = tl.zeros([BLOCK], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(delta + (part * rows + row) * width + place, mask=inside, other=0.0)
        added = added.to(values.dtype).to(
            tl.float32
        )  # as the whole product would have been rounded
    rounded = (values.to(tl.float32) + added).to(values.dtype)
    tl.store(total + row * width + place, rounded, mask=inside)
    values = rounded.to(tl.float32)
    mean = tl.sum(values * values, 0) / width
    tl.store(
        normed + row * width + place,
        (values * tl.rsqrt(mean + eps) * gain).to(normed.dtype.element_ty),
        mask=inside,
    )


@triton.jit
@no_type_check
def _angles_kernel(
    positions, frequencies, both, rows, factor,
    HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, BLOCK)
    inside = place < HALF
    launch.release(PDL)
    frequency = tl.load(frequencies + place, mask=inside, other=0.0)
    launch.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    dtype = both.dtype.element_ty
    cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor
    at = both + row * 2 * HALF + place
    tl.store(at, cos.to(dtype), mask=inside)
    tl.store(at + HALF, cos.to(dtype), mask=inside)
    at += tl.cast(rows, tl.int64) * 2 * HALF
    tl.store(at, (-sin).to(dtype), mask=inside)
    tl.store(at + HALF, sin.to(dtype), mask=inside)


@triton.jit
@no_type_check
def _load_parts(source, at, part_stride, inside, dtype, PARTS: tl.constexpr):
    """Values at `at`, or the sum of the parts there, rounded as the whole product would have been; in float32."""
    values = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(1, PARTS):
            values += tl.load(source + part * part_stride + at, mask=inside, other=0.0)
        values = values.to(dtype).to(tl.float32)
    return values


@triton.jit
@no_type_check
def _rope_kernel(
    source, q, k_pages, v_pages, kv_slots, cos, sin, q_weight, k_weight,
    source_row, q_row, rows, heads, kv_heads, eps,
    PARTS: tl.constexpr, NORMED: tl.constexpr, STORE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, PASSED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A few heads of one row: first half, second half and rest of the channels of each."""
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    half = tl.arange(0, BLOCK_H)
    rest = 2 * HALF + tl.arange(0, BLOCK_R)
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    exists = head < heads + 2 * kv_heads
    inside = exists[:, None] & (half < HALF)[None, :]
    inside_rest = exists[:, None] & (rest < DIM)[None, :]
    part_stride = rows * source_row
    dtype = q.dtype.element_ty
    at = (row * source_row + head * DIM)[:, None]
    one = _load_parts(source, at + half[None, :], part_stride, inside, dtype, PARTS)
    two = _load_parts(source, at + (half + HALF)[None, :], part_stride, inside, dtype, PARTS)
    turns = is_q | is_k
    if PASSED:
        last = _load_parts(source, at + rest[None, :], part_stride, inside_rest, dtype, PARTS)
    if NORMED:
        squares = tl.sum(one * one, 1) + tl.sum(two * two, 1)
        if PASSED:
            squares += tl.sum(last * last, 1)
        factor = tl.rsqrt(squares / DIM + eps)
        factor = tl.where(turns, factor, 1.0)[:, None]
        one = one * factor * _gain(q_weight, k_weight, half, is_q, is_k, half < HALF)
        two = two * factor * _gain(q_weight, k_weight, half + HALF, is_q, is_k, half < HALF)
        # Rounded between norm and rotation, as two operations would.
        one, two = one.to(dtype).to(tl.float32), two.to(dtype).to(tl.float32)
        if PASSED:
            last = last * factor * _gain(q_weight, k_weight, rest, is_q, is_k, rest < DIM)
    angle = row * 2 * HALF + half
    cos_one = tl.load(cos + angle, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    cos_two = tl.load(cos + angle + HALF, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    sin_one = tl.load(sin + angle, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    sin_two = tl.load(sin + angle + HALF, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    turned_one = tl.where(turns[:, None], one * cos_one + two * sin_one, one)
    turned_two = tl.where(turns[:, None], two * cos_two + one * sin_two, two)
    to = (row * q_row + head * DIM)[:, None]
    tl.store(q + to + half[None, :], turned_one.to(dtype), mask=inside & is_q[:, None])
    tl.store(q + to + (half + HALF)[None, :], turned_two.to(dtype), mask=inside & is_q[:, None])
    if PASSED:
        tl.store(q + to + rest[None, :], last.to(dtype), mask=inside_rest & is_q[:, None])
    if STORE:
        slot = tl.load(kv_slots + row)
        kv_head = tl.where(is_k, head - heads, head - heads - kv_heads)
        to = ((slot * kv_heads + kv_head) * DIM)[:, None]
        is_v = (exists & (head >= heads + kv_heads))[:, None]
        is_k = is_k[:, None]
        tl.store(k_pages + to + half[None, :], turned_one.to(dtype), mask=inside & is_k)
        tl.store(k_pages + to + (half + HALF)[None, :], turned_two.to(dtype), mask=inside & is_k)
        tl.store(v_pages + to + half[None, :], turned_one.to(dtype), mask=inside & is_v)
        tl.store(v_pages + to + (half + HALF)[None, :], turned_two.to(dtype), mask=inside & is_v)
        if PASSED:
            tl.store(k_pages + to + rest[None, :], last.to(dtype), mask=inside_rest & is_k)
            tl.store(v_pages + to + rest[None, :], last.to(dtype), mask=inside_rest & is_v)


@triton.jit
@no_type_check
def _gain(q_weight, k_weight, place, is_q, is_k, inside):
    """[heads, channels]: the norm weight of each head's kind, 1 for values."""
    of_q = tl.load(q_weight + place, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_k = tl.load(k_weight + place, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q[:, None], of_q, tl.where(is_k[:, None], of_k, 1.0))


@triton.jit
@no_type_check
def _act_mul_kernel(
    source,
    out,
    rows,
    inner,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < inner
    dtype = out.dtype.element_ty
    part_stride = rows * 2 * inner
    at = row * 2 * inner + place
    gate = _load_parts(source, at, part_stride, inside, dtype, PARTS)
    up = _load_parts(source, at + inner, part_stride, inside, dtype, PARTS)
    tl.store(out + row * inner + place, (activate(gate, ACTIVATION) * up).to(dtype), mask=inside)


@triton.jit
@no_type_check
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU, GELU, or GELU by tanh; of float32."""
    if ACTIVATION == 0:
        result = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 1:
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # 1 + tanh, whose exponential must not overflow.
        result = 0.5 * x * (2.0 - 2.0 / (1.0 + tl.exp(tl.minimum(2.0 * inner, 80.0))))
    return result
