"""The small operations of a transformer layer, in plain PyTorch.

R is the number of rows of a forward pass, all requests flat. Written for few, cheap calls: at one row a call costs more
than its arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(tokens: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Token embeddings.

    Args:
        tokens: [R] int64; -1 is padding and embeds like token 0.
        weight: [V, H].
        scale: multiplies the result, rounded to the weight's dtype first (as Gemma was trained).

    Returns:
        [R, H].
    """
    rows = F.embedding(tokens.clamp(min=0), weight)
    if scale == 1.0:
        return rows
    return rows * torch.tensor(scale, dtype=weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Root-mean-square norm (arXiv 1910.07467), computed in the weight's dtype and rounded once.

    Args:
        x: [..., H].
        weight: [H], float32 or wider than x.
        residual: [..., H] or None, added to the rounded norm.

    Returns:
        [..., H] in x's dtype.
    """
    # Few and cheap calls: torch's own rms_norm is some ten small operations on a CPU and twice as slow at one row.
    wide = x.to(weight.dtype)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(length * length / x.shape[-1] + eps)
    normed = (wide * scale * weight).to(x.dtype)
    return normed if residual is None else residual + normed


def angles(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a forward pass; the arithmetic is in float32.

    Args:
        positions: [R] int64.
        frequencies: [dim / 2] or [R, dim / 2] float32, angle per position of each channel pair.
        factor: multiplies the results.

    Returns:
        (cos, sin), each [R, 1, dim] in `dtype`; the sines negated in the first half.
    """
    turned = positions.to(torch.float32).unsqueeze(-1) * frequencies  # [R, dim / 2]
    cos, sin = turned.cos() * factor, turned.sin() * factor
    return (
        torch.cat((cos, cos), -1).to(dtype).unsqueeze(1),
        torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1),
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `dim` channels of each head (arXiv 2104.09864), pairs being (i, i + dim / 2).

    Args:
        x: [R, A, D], queries and keys of a row side by side.
        cos: [R, 1, dim].
        sin: [R, 1, dim], negated in the first half.

    Returns:
        [R, A, D]. An implementation may rotate in place and return x.
    """
    dim = cos.shape[-1]
    turned = x if dim == x.shape[-1] else x[..., :dim]
    out = torch.addcmul(turned * cos, turned.roll(dim // 2, -1), sin)
    return out if dim == x.shape[-1] else torch.cat((out, x[..., dim:]), dim=-1)


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up.

    Args:
        gate_up: [..., 2 * I], the gate first.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        [..., I].
    """
    half = gate_up.shape[-1] // 2
    return activate(gate_up[..., :half], activation) * gate_up[..., half:]


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation functions by name."""
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case _:
            raise AssertionError(f"unknown activation {activation!r}")
