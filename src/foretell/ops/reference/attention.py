"""Paged attention with an ancestor mask, in plain PyTorch: who sees what is in `ops/meta.py`.

Keys are gathered block by block into one dense tensor and a mask is added to the scores. The mask does not depend on
the layer, so it is made once per forward pass and sliding window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.ops.meta import LayerKV, Meta, RaggedRows, TreeRows
from foretell.ops.reference.layers import rms_norm, rope

Mask = Tensor | tuple[Tensor | None, ...] | None


def store_kv(k: Tensor, v: Tensor, kv: LayerKV, kv_slots: Tensor) -> None:
    """Write the keys and values of R rows to their places.

    Args:
        k: [R, KV, D].
        v: [R, KV, D].
        kv_slots: [R] int64, flat places.
    """
    kv.k.view(-1, *kv.k.shape[2:]).index_copy_(0, kv_slots, k)
    kv.v.view(-1, *kv.v.shape[2:]).index_copy_(0, kv_slots, v)


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
    """All between the QKV product and attention: query and key norms, rotation, KV write.

    Args:
        qkv: [R, heads + 2 * KV, D].
        heads: number of query heads.
        norms: (query weight [D], key weight [D]), or None.
        cos, sin: as `layers.rope` takes them.
        kv_slots: [R] int64, flat places.

    Returns:
        q [R, heads, D], normed and rotated. An implementation may write over qkv.
    """
    kv_heads = kv.k.shape[2]
    qk, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
    if norms is not None:
        q = rms_norm(qk[:, :heads], norms[0], eps)
        qk = torch.cat((q, rms_norm(qk[:, heads:], norms[1], eps)), dim=1)
    qk = rope(qk, cos, sin)
    store_kv(qk[:, heads:], v, kv, kv_slots)
    return qk[:, :heads]


def mask(meta: Meta, window: int | None, block_size: int, group: int, dtype: torch.dtype) -> Mask:
    """What `attention` adds to the scores: 0 where a row sees a key, a very negative number elsewhere.

    The number is finite so that a row which sees nothing (padding) yields junk and not NaN.

    Args:
        window: keys this far behind and further are unseen; None: no limit.
        group: query heads per KV head.

    Returns:
        Opaque to all but `attention`. Here: for tree rows [B, 1, group * N, S] with S the gathered keys; for ragged
        rows one [rows, keys] per request, None meaning plain causality.
    """
    if isinstance(meta, TreeRows):
        visible = _visible(meta, window, block_size)
        return _additive(visible, dtype).repeat(1, group, 1).unsqueeze(1)
    return tuple(
        None
        if _plainly_causal(meta, window, start + rows, start)
        else _causal(meta, window, start, rows, dtype)
        for start, rows in meta.lengths
    )


def attention(
    q: Tensor,
    kv: LayerKV,
    meta: Meta,
    mask: Mask,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attend to the paged keys; the rows' own must be stored already.

    Args:
        q: [R, heads, D].
        mask: what `mask` returned for this meta and window.
        scale: multiplies the scores.
        softcap: c makes a score s into c * tanh(s / c) before the mask (Gemma 2); None: no cap.

    Returns:
        [R, heads * D].
    """
    if isinstance(meta, TreeRows):
        assert isinstance(mask, Tensor), "the mask is of another meta"
        return _tree(q, kv, meta, mask, scale, softcap)
    assert isinstance(mask, tuple), "the mask is of another meta"
    return _ragged(q, kv, meta, mask, scale, softcap)


def _tree(
    q: Tensor, kv: LayerKV, meta: TreeRows, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    rows, nodes = meta.positions.shape
    block_size, kv_heads, dim = kv.k.shape[1:]
    group = q.shape[1] // kv_heads
    # The group is folded into the rows: [B, N, KV, G, D] → [B, KV, G * N, D].
    q = (
        q.view(rows, nodes, kv_heads, group, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(rows, kv_heads, -1, dim)
    )
    blocks = meta.blocks[:, : _blocks(meta.keys, block_size)].flatten()
    k = kv.k.index_select(0, blocks).view(rows, -1, kv_heads, dim).transpose(1, 2)
    v = kv.v.index_select(0, blocks).view(rows, -1, kv_heads, dim).transpose(1, 2)
    out = _attend(q, k, v, mask, scale, softcap)  # [B, KV, G * N, D]
    out = out.view(rows, kv_heads, group, nodes, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * nodes, -1)


def _ragged(
    q: Tensor,
    kv: LayerKV,
    meta: RaggedRows,
    masks: tuple[Tensor | None, ...],
    scale: float,
    softcap: float | None,
) -> Tensor:
    block_size, kv_heads = kv.k.shape[1:3]
    group = q.shape[1] // kv_heads
    parts, offset = [], 0
    for i, ((start, rows), mask) in enumerate(zip(meta.lengths, masks, strict=True)):
        blocks = meta.blocks[i, : _blocks(start + rows, block_size)]
        k = _heads(kv.k.index_select(0, blocks), start + rows, group)
        v = _heads(kv.v.index_select(0, blocks), start + rows, group)
        part = q[offset : offset + rows].transpose(0, 1).unsqueeze(0)  # [1, heads, rows, D]
        parts.append(_attend(part, k, v, mask, scale, softcap)[0].transpose(0, 1))
        offset += rows
    return torch.cat(parts).reshape(offset, -1)


def _heads(gathered: Tensor, keys: int, group: int) -> Tensor:
    """[blocks, block_size, KV, D] → [1, KV * group, keys, D], each KV head repeated for its query heads."""
    kv_heads, dim = gathered.shape[2:]
    flat = gathered.view(-1, kv_heads, dim)[:keys].transpose(0, 1)
    return flat.unsqueeze(1).expand(-1, group, -1, -1).reshape(1, kv_heads * group, keys, dim)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """[..., n, D]; without a mask row i sees the keys up to i."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    scores = softcap * torch.tanh((q @ k.transpose(-1, -2)) * (scale / softcap))
    if mask is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        mask = _additive(seen, scores.dtype)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores + mask, dim=-1, dtype=wide).to(q.dtype) @ v


def _visible(meta: TreeRows, window: int | None, block_size: int) -> Tensor:
    """[B, N, S] bool."""
    tails = meta.tail_positions.shape[1]
    keys = torch.arange(_blocks(meta.keys, block_size) * block_size, device=meta.positions.device)
    tail = keys - meta.context.unsqueeze(1)  # [B, S], which tail key a key index is
    in_tail = (tail >= 0) & (tail < tails)
    tail = tail.clamp(0, tails - 1)
    bits = (meta.bits.unsqueeze(2) >> tail.unsqueeze(1)) & 1
    in_context = (keys >= meta.first_key) & (keys < meta.context.unsqueeze(1))
    visible = torch.where(in_tail.unsqueeze(1), bits > 0, in_context.unsqueeze(1))
    if window is None:
        return visible
    positions = torch.where(in_tail, meta.tail_positions.gather(1, tail), keys)
    return visible & (meta.positions.unsqueeze(2) - positions.unsqueeze(1) < window)


def _plainly_causal(meta: RaggedRows, window: int | None, keys: int, start: int) -> bool:
    return start == 0 and meta.first_key == 0 and (window is None or window >= keys)


def _causal(
    meta: RaggedRows, window: int | None, start: int, rows: int, dtype: torch.dtype
) -> Tensor:
    """[rows, start + rows] additive."""
    keys = torch.arange(start + rows, device=meta.positions.device)
    ahead = keys[start:].unsqueeze(1) - keys  # how far behind the row a key is
    visible = (ahead >= 0) & (keys >= meta.first_key)
    if window is not None:
        visible = visible & (ahead < window)
    return _additive(visible, dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    lowest = torch.finfo(dtype).min / 2  # halved: adding a score to it stays finite
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
        ~visible, lowest
    )


def _blocks(keys: int, block_size: int) -> int:
    return -(-keys // block_size)
