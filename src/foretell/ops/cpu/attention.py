"""Rotation with the KV write, and attention of tree rows straight from the blocks. Who sees what is in `ops/meta.py`.

Keys are not gathered and no mask is made: a row walks over its context's keys and over those tail keys whose bit it
has. Prompt chunks have many rows for the same keys: PyTorch's blocked attention is faster there.

Invariant: a row's result is a function of that row and the keys it sees. The score of context key s lies at place s,
those of the tail keys it sees lie behind the context without gaps, sums are taken in parts of `_PART` places, and what
is not seen adds an exact zero: so a node of any tree gets the bits that its path, one token after the other, would get.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from torch import Tensor

from foretell.ops.cpu.compiled import ELEMENTS, RELAXED, Kernel
from foretell.ops.cpu.lanes import (
    ONE,
    WIDTH,
    ZERO,
    exp,
    load,
    load_float32,
    load_int32,
    load_int64,
    load_vector,
    load_vector_float32,
    multiply_add,
    order,
    ordered,
    spread,
    store,
    store_float32,
    store_int64,
    store_vector,
    total_of,
)
from foretell.ops.meta import LayerKV, Meta, TreeRows
from foretell.ops.reference import attention as reference

_PART = 64  # places whose sum is taken at once
_UNSEEN = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class TreeKeys:
    """The numbers of tree rows where a kernel can read them: dense, and kept alive as long as their addresses."""

    places: Tensor  # [B, keys] int64, flat place of each key
    context: Tensor  # [B] int64
    bits: Tensor  # [B, N] int64
    positions: Tensor  # [B, N] int64
    tail_positions: Tensor  # [B, T] int64
    numbers: tuple[int, ...]  # the addresses of the five, then B, N, T, first key, keys


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
    """Query and key norms, rotation, KV write; queries are written over qkv. See `reference.attention.rope_store`."""
    if qkv.dtype not in ELEMENTS or kv.k.dtype != qkv.dtype or qkv.requires_grad:
        return reference.rope_store(qkv, heads, norms, eps, cos, sin, kv, kv_slots)
    assert qkv.is_contiguous(), qkv.stride()
    rows, every, dim = qkv.shape
    q_norm, k_norm = (0, 0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
    ROPE_STORE[qkv.dtype](
        qkv.data_ptr(),
        q_norm,
        k_norm,
        cos.data_ptr(),
        sin.data_ptr(),
        kv.k.data_ptr(),
        kv.v.data_ptr(),
        kv_slots.data_ptr(),
        rows,
        heads,
        (every - heads) // 2,
        dim,
        cos.shape[-1],
        eps,
    )
    return qkv[:, :heads]


def mask(
    meta: Meta, window: int | None, block_size: int, group: int, dtype: torch.dtype
) -> TreeKeys | reference.Mask:
    """What `attention` needs of this meta besides the window. See `reference.attention.mask`."""
    if not isinstance(meta, TreeRows) or dtype not in ELEMENTS:
        return reference.mask(meta, window, block_size, group, dtype)
    requests, nodes = meta.positions.shape
    blocks, width = meta.blocks.contiguous(), meta.blocks.shape[1]
    keys = min(meta.keys, width * block_size)
    places = torch.empty(requests, keys, dtype=torch.int64)
    KEY_PLACES[dtype](blocks.data_ptr(), places.data_ptr(), requests, width, keys, block_size)
    context, bits = meta.context.contiguous(), meta.bits.contiguous()
    positions, tails = meta.positions.contiguous(), meta.tail_positions.contiguous()
    numbers = (
        *(part.data_ptr() for part in (places, context, bits, positions, tails)),
        *(requests, nodes, tails.shape[1], meta.first_key, keys),
    )
    return TreeKeys(places, context, bits, positions, tails, numbers)


def attention(
    q: Tensor,
    kv: LayerKV,
    meta: Meta,
    mask: TreeKeys | reference.Mask,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attend to the paged keys. See `reference.attention.attention`; a row that sees nothing yields zeros."""
    if not isinstance(mask, TreeKeys):
        return reference.attention(q, kv, meta, mask, window, scale, softcap)
    rows, heads, dim = q.shape
    assert q.stride(1) == dim, q.stride()
    kv_heads = kv.k.shape[2]
    out = torch.empty(rows, heads * dim, dtype=q.dtype)
    TREE_ATTENTION[q.dtype](
        q.data_ptr(),
        q.stride(0),
        kv.k.data_ptr(),
        kv.v.data_ptr(),
        out.data_ptr(),
        *mask.numbers,
        heads,
        kv_heads,
        dim,
        window or 0,
        scale,
        softcap or 0.0,
    )
    return out


@njit(fastmath=RELAXED, error_model="numpy")
def _weigh(scores, start, stop):  # type: ignore[no-untyped-def]
    """Scores become weights e^(score - greatest), exactly 0 where unseen; returns one over their sum, or 0."""
    greatest = order(_UNSEEN)
    for s in range(start, stop):
        key = order(load_float32(scores, s))
        greatest = key if key > greatest else greatest
    peak = ordered(greatest)
    total = ZERO
    for part in range(start, stop, _PART):
        mass = ZERO
        for s in range(part, part + _PART):
            score = load_float32(scores, s)
            weight = ZERO if score == _UNSEEN else exp(score - peak)
            store_float32(scores, s, weight)
            mass += weight
        total += mass
    return ZERO if total == ZERO else ONE / total


def _rope_store(
    qkv: int,
    q_norm: int,
    k_norm: int,
    cos: int,
    sin: int,
    k_pages: int,
    v_pages: int,
    kv_slots: int,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rotated: int,
    eps: float,
) -> None:
    half = rotated // 2
    for row in range(rows):
        angle = row * rotated
        page = load_int64(kv_slots, row) * kv_heads * dim
        first = row * (heads + 2 * kv_heads) * dim
        for head in range(heads + kv_heads):
            x = first + head * dim
            is_query = head < heads
            norm = q_norm if is_query else k_norm
            if norm != 0:
                total = ZERO
                for i in range(dim):
                    total += load(qkv, x + i) * load(qkv, x + i)
                gain = ONE / np.float32(math.sqrt(total / np.float32(dim) + np.float32(eps)))
                for i in range(dim):
                    store(qkv, x + i, load(qkv, x + i) * gain * load_float32(norm, i))
            for i in range(half):
                a, b = load(qkv, x + i), load(qkv, x + half + i)
                store(qkv, x + i, a * load(cos, angle + i) + b * load(sin, angle + i))
                turned = b * load(cos, angle + half + i) + a * load(sin, angle + half + i)
                store(qkv, x + half + i, turned)
            if not is_query:
                target = page + (head - heads) * dim
                for i in range(dim):
                    store(k_pages, target + i, load(qkv, x + i))
        values = first + (heads + kv_heads) * dim
        for i in range(kv_heads * dim):
            store(v_pages, page + i, load(qkv, values + i))


def _key_places(
    blocks: int, places: int, requests: int, table_width: int, keys: int, block_size: int
) -> None:
    for request in range(requests):
        for block in range((keys + block_size - 1) // block_size):
            first = load_int32(blocks, request * table_width + block) * block_size
            start = block * block_size
            for i in range(min(block_size, keys - start)):
                store_int64(places, request * keys + start + i, first + i)


def _tree_attention(
    q: int,
    q_stride: int,
    k_pages: int,
    v_pages: int,
    out: int,
    places: int,
    contexts: int,
    bits: int,
    positions: int,
    tail_positions: int,
    requests: int,
    nodes: int,
    tails: int,
    first_key: int,
    keys: int,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    scale: float,
    softcap: float,
) -> None:
    group = heads // kv_heads
    even = dim // WIDTH * WIDTH  # channels in whole vectors
    width = (keys + _PART - 1) // _PART * _PART  # places of the scores of one head
    scratch = np.empty(group * (dim + width + 1), np.float32)
    query = scratch.ctypes.data  # [group, dim], scaled
    scores = query + 4 * group * dim  # [group, width]
    inverses = scores + 4 * group * width  # [group], one over the sum of each head's weights
    own_places = np.empty(
        tails, np.int64
    )  # of the tail keys a row sees, in their order; -1: out of its window
    own = own_places.ctypes.data
    cap = np.float32(softcap)
    for row in range(requests * nodes):
        request = row // nodes
        context = load_int64(contexts, request)
        place = places + 8 * request * keys
        position = load_int64(positions, row)
        seen = load_int64(bits, row)  # of the tail keys
        end = context  # behind the last place used
        for j in range(tails):
            if (seen >> j) & 1 != 0:
                ahead = position - load_int64(tail_positions, request * tails + j)
                near = window == 0 or ahead < window
                store_int64(own, end - context, load_int64(place, context + j) if near else -1)
                end += 1
        begin = first_key if window == 0 else max(first_key, position - window + 1)
        begin = min(begin, context)  # tail keys are seen wherever they are
        start = begin // _PART * _PART
        stop = (end + _PART - 1) // _PART * _PART
        for kv_head in range(kv_heads):
            source = row * q_stride + kv_head * group * dim
            for i in range(group * dim):
                store_float32(query, i, load(q, source + i) * np.float32(scale))
            for s in range(start, stop):
                key_place = -1
                if begin <= s < end:
                    key_place = (
                        load_int64(place, s) if s < context else load_int64(own, s - context)
                    )
                if key_place < 0:
                    for g in range(group):
                        store_float32(scores, g * width + s, _UNSEEN)
                    continue
                at = (key_place * kv_heads + kv_head) * dim
                for first in range(0, group, 4):  # four heads share what was loaded
                    second, third = min(first + 1, group - 1), min(first + 2, group - 1)
                    fourth = min(first + 3, group - 1)
                    a = b = c = d = spread(ZERO)
                    for i in range(0, even, WIDTH):
                        key = load_vector(k_pages, at + i)
                        a = multiply_add(key, load_vector_float32(query, first * dim + i), a)
                        b = multiply_add(key, load_vector_float32(query, second * dim + i), b)
                        c = multiply_add(key, load_vector_float32(query, third * dim + i), c)
                        d = multiply_add(key, load_vector_float32(query, fourth * dim + i), d)
                    store_float32(scores, first * width + s, total_of(a))
                    store_float32(scores, second * width + s, total_of(b))
                    store_float32(scores, third * width + s, total_of(c))
                    store_float32(scores, fourth * width + s, total_of(d))
                for g in range(group):
                    if even < dim or softcap > 0:
                        score = load_float32(scores, g * width + s)
                        for i in range(even, dim):
                            score += load_float32(query, g * dim + i) * load(k_pages, at + i)
                        if softcap > 0:  # c * tanh(x / c) is c - 2 c / (1 + e^(2 x / c))
                            score = cap - (cap + cap) / (ONE + exp((score + score) / cap))
                        store_float32(scores, g * width + s, score)
            for g in range(group):
                store_float32(inverses, g, _weigh(scores + 4 * g * width, start, stop))
            target = row * heads * dim + kv_head * group * dim
            for first in range(0, group, 4):
                second, third = min(first + 1, group - 1), min(first + 2, group - 1)
                fourth = min(first + 3, group - 1)
                for i in range(0, even, WIDTH):
                    a = b = c = d = spread(ZERO)
                    for s in range(begin, end):
                        key_place = (
                            load_int64(place, s) if s < context else load_int64(own, s - context)
                        )
                        if key_place < 0:
                            continue
                        at = (key_place * kv_heads + kv_head) * dim
                        value = load_vector(v_pages, at + i)
                        a = multiply_add(value, spread(load_float32(scores, first * width + s)), a)
                        b = multiply_add(value, spread(load_float32(scores, second * width + s)), b)
                        c = multiply_add(value, spread(load_float32(scores, third * width + s)), c)
                        d = multiply_add(value, spread(load_float32(scores, fourth * width + s)), d)
                    # Through the query's memory, which is not needed any more, to be rounded.
                    store_vector(query, first * dim + i, a)
                    store_vector(query, second * dim + i, b)
                    store_vector(query, third * dim + i, c)
                    store_vector(query, fourth * dim + i, d)
            for g in range(group):
                for i in range(even, dim):
                    total = ZERO
                    for s in range(begin, end):
                        key_place = (
                            load_int64(place, s) if s < context else load_int64(own, s - context)
                        )
                        if key_place >= 0:
                            at = (key_place * kv_heads + kv_head) * dim
                            total += load_float32(scores, g * width + s) * load(v_pages, at + i)
                    store_float32(query, g * dim + i, total)
                inverse = load_float32(inverses, g)
                for i in range(g * dim, (g + 1) * dim):
                    store(out, target + i, load_float32(query, i) * inverse)


ROPE_STORE, KEY_PLACES = Kernel(_rope_store), Kernel(_key_places)
TREE_ATTENTION = Kernel(_tree_attention)
