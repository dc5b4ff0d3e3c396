"""The operations of whole sequences at once, differentiable: the same modules that serve, run for training.

A table like any other (`ops/table.py`), so a Decoder or an EAGLE network built on it computes the equations that are
served, by construction. Keys are not paged: each layer's `Steps` keeps them, one entry per unrolled step. Rows are
packed documents; who sees whom is in `PackedRows`. Weights may be wider than the rows: products cast them.

Not for serving: attention costs the square of the length, and nothing is cached between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.ops.meta import LayerKV, Meta, RaggedRows
from foretell.ops.reference import layers, sample
from foretell.ops.table import OpTable

HIDDEN_SCORE = -30000.0  # added to scores of keys that are not seen; fits 16-bit types


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows(RaggedRows):
    """B rows of L tokens, each several documents one after the other.

    A row sees the keys of its document at its own place and before, from `first_key` on; every row sees itself.
    `positions` are the rotary positions, `places` count from 0 in each document.
    """

    shape: tuple[int, int]  # (B, L)
    places: Tensor  # [B, L] int64
    documents: Tensor  # [B, L] int64, -1 is padding


@dataclass(frozen=True, slots=True)
class Steps(LayerKV):
    """Keys and values of one layer: those of the rows themselves, then those of each further unrolled step."""

    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # ([B * L, KV, D], the same)


def empty_steps(layers_: int, kv_heads: int, device: torch.device) -> tuple[Steps, ...]:
    """For every layer a place for its keys."""
    nothing = torch.empty(0, 1, kv_heads, 1, device=device)
    return tuple(Steps(nothing, nothing) for _ in range(layers_))


def packed_rows(
    places: Tensor, documents: Tensor, positions: Tensor | None = None, first_key: int = 0
) -> PackedRows:
    """The rows of a packed batch.

    Args:
        places: [B, L] int64, from 0 in each document.
        documents: [B, L] int64.
        positions: [B, L] rotary positions; None = the places.
    """
    none = torch.empty(0, dtype=torch.int64, device=places.device)
    return PackedRows(
        positions=(places if positions is None else positions).flatten(),
        kv_slots=none,
        blocks=none,
        starts=none,
        offsets=none,
        lengths=(),
        first_key=first_key,
        shape=(places.shape[0], places.shape[1]),
        places=places,
        documents=documents,
    )


@torch.no_grad()
def run_target(
    target: Decoder, tokens: Tensor, rows: PackedRows, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Whole documents through a decoder that was built on DENSE.

    Args:
        tokens: [B, L] int64.

    Returns:
        ([B, L, H] hidden states after the final norm, [B, L, F] features or None).
    """
    count, kv_heads, _ = target.kv_shape
    hidden, features = target(tokens, rows, empty_steps(count, kv_heads, tokens.device), taps)
    return hidden, features


def _embed(tokens: Tensor, weight: Tensor, scale: float) -> Tensor:
    return layers.embed(tokens, weight, scale)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    normed = F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
    return normed if residual is None else residual + normed


def _rope_store(
    qkv: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: Steps,
    kv_slots: Tensor,
) -> Tensor:
    kv_heads = (qkv.shape[1] - heads) // 2
    qk, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
    if norms is not None:
        q = _rms_norm(qk[:, :heads], norms[0], eps)
        qk = torch.cat((q, _rms_norm(qk[:, heads:], norms[1], eps)), dim=1)
    qk = layers.rope(qk, cos, sin)
    kv.seen.append((qk[:, heads:], v))
    return qk[:, :heads]


def _mask(
    meta: Meta, window: int | None, block_size: int, group: int, dtype: torch.dtype
) -> Tensor:
    """[B, 1, L, L]: what is added to the scores of the rows' own keys."""
    assert isinstance(meta, PackedRows), "dense operations run packed rows"
    behind = meta.places.unsqueeze(2) - meta.places.unsqueeze(1)
    seen = (meta.documents.unsqueeze(2) == meta.documents.unsqueeze(1)) & (behind >= 0)
    if window is not None:
        seen &= behind < window
    if meta.first_key:
        seen &= meta.places.unsqueeze(1) >= meta.first_key
    seen |= torch.eye(seen.shape[-1], dtype=torch.bool, device=seen.device)
    hidden = torch.full((), HIDDEN_SCORE, dtype=dtype, device=seen.device)
    return torch.where(seen, torch.zeros_like(hidden), hidden).unsqueeze(1)


def _attention(
    q: Tensor,
    kv: Steps,
    meta: Meta,
    mask: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Rows see the step-0 keys of the mask and, in unrolled step s, their own key of each of the steps 1 to s."""
    assert isinstance(meta, PackedRows), "dense operations run packed rows"
    batch, length = meta.shape
    heads, dim = q.shape[1:]
    k, v = (x.view(batch, length, -1, dim).transpose(1, 2) for x in kv.seen[0])  # [B, KV, L, D]
    kv_heads = k.shape[1]
    folded = (batch, length, kv_heads, heads // kv_heads, dim)
    q = q.reshape(folded).permute(0, 2, 3, 1, 4)  # [B, KV, G, L, D]
    if softcap is None and len(kv.seen) == 1 and not torch.is_grad_enabled():
        flat = q.reshape(batch, heads, length, dim)
        out = F.scaled_dot_product_attention(
            flat,
            k.repeat_interleave(heads // kv_heads, 1),
            v.repeat_interleave(heads // kv_heads, 1),
            attn_mask=mask,
            scale=scale,
        )
        return out.transpose(1, 2).reshape(batch * length, heads * dim)
    scores = _capped(torch.matmul(q * scale, k.unsqueeze(2).transpose(-1, -2)), softcap)
    scores = scores + mask.unsqueeze(1)  # [B, KV, G, L, L]
    later = [
        tuple(x.view(batch, length, kv_heads, 1, dim).permute(0, 2, 3, 1, 4) for x in pair)
        for pair in kv.seen[1:]
    ]  # [B, KV, 1, L, D]
    own = [_capped((q * scale * key).sum(-1, keepdim=True), softcap) for key, _ in later]
    if own:
        # To a multiple of 8 columns: products of 16-bit rows that start anywhere else are slow.
        filler = torch.full_like(own[0], HIDDEN_SCORE).expand(*own[0].shape[:-1], -len(own) % 8)
        scores = torch.cat((scores, *own, filler), -1)
    share = torch.softmax(scores, dim=-1)
    # Split once: the gradient of a slice of `share` is as large as all of it.
    front, back = torch.split(share, [length, share.shape[-1] - length], -1)
    out = torch.matmul(front, v.unsqueeze(2))
    for place, (_, value) in enumerate(later):
        out = out + back[..., place, None] * value
    return out.permute(0, 3, 1, 2, 4).reshape(batch * length, heads * dim)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _linear(
    x: Tensor, packed: tuple[Tensor, Tensor | None], residual: Tensor | None = None
) -> Tensor:
    weight, bias = packed
    out = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return out if residual is None else residual + out


def _gated(x: Tensor, packed: tuple[Tensor, Tensor | None], activation: str) -> Tensor:
    return layers.act_mul(_linear(x, packed), activation)


def _experts(
    x: Tensor, router: Tensor, packed: tuple[Tensor, Tensor], chosen: int, activation: str
) -> Tensor:
    share, which = torch.softmax(router.float(), -1).topk(chosen, -1)
    share = (share / share.sum(-1, keepdim=True)).to(x.dtype)
    out = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(*packed, strict=True)):
        weight = (share * (which == expert)).sum(-1, keepdim=True)
        inner = layers.act_mul(F.linear(x, gate_up.to(x.dtype)), activation)
        out = out + weight * F.linear(inner, down.to(x.dtype))
    return out


def _as_pair(*weights: Any) -> tuple[Any, ...]:
    return weights


class _Fused(torch.autograd.Function):
    """Attention of an unrolled step through the fused kernel, which knows the step-0 keys alone.

    The kernel's result is weighed against the rows' own keys by its log-sum-exp. Its backward pass recomputes the
    weights from the log-sum-exp and the output it is given: with those of all keys it yields just the gradients of the
    step-0 part of the joint softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, scale: float, bias: Tensor, q: Tensor, k: Tensor, v: Tensor, *own: Tensor
    ) -> Tensor:
        out: Tensor
        out, lse, *noise = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, False, scale=scale
        )
        scores = [(q * key).sum(-1, dtype=torch.float32) * scale for key in own[::2]]
        if scores:
            total = torch.logsumexp(torch.stack([lse, *scores]), 0)
            mixed = out * torch.exp(lse - total).unsqueeze(-1)
            for score, value in zip(scores, own[1::2], strict=True):
                mixed = mixed + torch.exp(score - total).unsqueeze(-1) * value
            out, lse = mixed.to(q.dtype), total
        ctx.scale = scale
        ctx.save_for_backward(bias, q, k, v, out, lse, *noise, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        bias, q, k, v, out, lse, seed, offset, *own = ctx.saved_tensors
        scale = ctx.scale
        gradient = gradient.contiguous()
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, bias, out, lse, seed, offset, 0.0, [True, True, True, False], False,
            scale=scale,
        )  # fmt: skip
        found: list[Tensor | None] = [None, None, dq, dk, dv]
        if own:
            delta = (gradient * out).sum(-1, dtype=torch.float32)
        for key, value in zip(own[::2], own[1::2], strict=True):
            share = torch.exp((q * key).sum(-1, dtype=torch.float32) * scale - lse)
            slope = share * ((gradient * value).sum(-1, dtype=torch.float32) - delta) * scale
            slope, share = (x.unsqueeze(-1).to(q.dtype) for x in (slope, share))
            dq = dq + slope * key
            found += [slope * q, share * gradient]
        found[2] = dq
        return tuple(found)


def _fused_attention(
    q: Tensor,
    kv: Steps,
    meta: Meta,
    mask: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """`_attention` through the fused kernel where it can."""
    assert isinstance(meta, PackedRows), "dense operations run packed rows"
    batch, length = meta.shape
    if softcap is not None or length % 32 or q.dtype.itemsize != 2 or not torch.is_grad_enabled():
        return _attention(q, kv, meta, mask, window, scale, softcap)
    heads, dim = q.shape[1:]
    group = heads // kv.seen[0][0].shape[1]
    flat = [
        x.view(batch, length, -1, dim).transpose(1, 2).repeat_interleave(group, 1)
        for pair in kv.seen
        for x in pair
    ]  # [B, heads, L, D]
    bias = mask.expand(batch, heads, length, length)
    rows = q.view(batch, length, heads, dim).transpose(1, 2)
    out: Tensor = _Fused.apply(scale, bias, rows, *flat)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).reshape(batch * length, heads * dim)


DENSE = OpTable(
    embed=_embed,
    rms_norm=_rms_norm,
    rope_store=_rope_store,
    mask=_mask,
    attention=_attention,
    act_mul=layers.act_mul,
    repacks=lambda weight: False,
    pack_linear=_as_pair,
    linear=_linear,
    gated=_gated,
    pack_experts=_as_pair,
    experts=_experts,
    argmax=sample.argmax_checked,
)


FUSED = replace(DENSE, attention=_fused_attention)


def table_for_training(device: torch.device) -> OpTable:
    """The dense operations for a device: on a GPU attention is fused, if it proves equal there to the plain one."""
    return FUSED if device.type == "cuda" and _fused_is_exact(device) else DENSE


def _fused_is_exact(device: torch.device) -> bool:
    """Compare outputs and gradients of both attentions on noise, three unrolled steps."""
    generator = torch.Generator(device).manual_seed(0)
    places = torch.arange(64, device=device).expand(2, -1)
    meta = packed_rows(places, places // 40)
    mask = _mask(meta, None, 1, 3, torch.bfloat16)

    def noise(heads: int) -> Tensor:
        return torch.randn(128, heads, 64, generator=generator, device=device).bfloat16()

    rows, keys = noise(6), [noise(2) for _ in range(6)]
    found = []
    for attend in (_attention, _fused_attention):
        q, *kv = [x.clone().requires_grad_(True) for x in (rows, *keys)]
        store = empty_steps(1, 2, device)[0]
        store.seen.extend(zip(kv[::2], kv[1::2], strict=True))
        try:
            out = attend(q, store, meta, mask, None, 0.125, None)
            gradients = torch.autograd.grad((out * rows.view(128, -1)).sum(), [q, *kv])
        except (RuntimeError, TypeError):  # a build without the kernel, or with another signature
            return False
        found.append([out.detach(), *gradients])
    return all(float((a - b).norm() / b.norm()) < 0.02 for a, b in zip(*found, strict=True))


def trainable(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Switch gradients on: parameters are born without."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    return list(parameters)
