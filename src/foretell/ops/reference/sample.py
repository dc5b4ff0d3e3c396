"""Random numbers that are a function of their key, and the filters between logits and a law, in plain PyTorch.

There is no generator and no state: the same key gives the same number on every device, in every batch, at every time.
Which keys exist is decided in `foretell.spec.noise`; here is only the arithmetic. Noise is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)  # as a signed 32-bit word
_GOLDEN = 0x9E3779B9 - (1 << 32)


def mix32(x: Tensor) -> Tensor:
    """A bijective 32-bit finaliser with low bias (two multiply-xorshift rounds) on int32 words.

    Example: `mix32(torch.tensor([0], dtype=torch.int32))` is 0; neighbours land far apart.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _M1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _M2
    return x ^ ((x >> 16) & 0xFFFF)


def _unit(bits: Tensor) -> Tensor:
    """int32 words to floats in (0, 1), exact near 0 (float32 has the fine steps there, not near 1)."""
    high = ((bits >> 16) & 0xFFFF).float()
    low = (bits & 0xFFFF).float()
    return torch.clamp(high * 2.0**-16 + (low + 0.5) * 2.0**-32, max=1.0 - 2.0**-24)


def uniform(key: Tensor) -> Tensor:
    """One uniform number in (0, 1) for each key.

    Args:
        key: [..., 2] int32, the two words of a key.

    Returns:
        [...] float32.
    """
    return _unit(mix32(mix32(key[..., 0] ^ _GOLDEN) + key[..., 1]))


def gumbel(key: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise for every (key, id): arg-max of logits + gumbel is a draw from softmax(logits).

    Args:
        key: [..., 2] int32, the two words of a key.
        ids: [V] int32, token ids (a tensor-parallel rank passes those of its own shard).

    Returns:
        [..., V] float32.
    """
    h = mix32((ids * _GOLDEN) ^ key[..., 0:1])
    h = mix32(h + key[..., 1:2])
    exponential = -torch.log1p(-_unit(h))
    return -torch.log(exponential)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Cut the tail of a law: min_p, then top_k, then top_p on what is left, as vLLM orders them.

    Ties with the last kept token of top_k are kept by their order in the sort, so exactly k stay.

    Args:
        logits: [B, N, V] float, already divided by the temperature.
        top_k: [B] int64; 0 keeps all.
        top_p: [B] float; 1 keeps all. The smallest set whose mass reaches top_p stays, at least one token.
        min_p: [B] float; tokens under min_p times the greatest probability go.

    Returns:
        [B, N, V], -inf where a token was cut.
    """
    vocabulary = logits.shape[-1]
    probs = torch.softmax(logits, -1)
    floor = probs.amax(-1, keepdim=True) * min_p.view(-1, 1, 1)
    logits = torch.where(probs < floor, -torch.inf, logits)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    keep = torch.where(top_k > 0, top_k, vocabulary).view(-1, 1, 1)
    rank = torch.arange(vocabulary, device=logits.device)
    ordered = torch.where(rank >= keep, -torch.inf, ordered)
    mass = torch.softmax(ordered, -1)
    before = mass.cumsum(-1) - mass
    p = top_p.view(-1, 1, 1)
    ordered = torch.where((before >= p) & (p < 1), -torch.inf, ordered)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def argmax_checked(scores: Tensor) -> Tensor:
    """Arg-max over the last axis, or -1 where a row holds a NaN or no finite score.

    Args:
        scores: [..., V] float.

    Returns:
        [...] int64; ties go to the lowest id.
    """
    best, index = scores.max(dim=-1)
    return torch.where(torch.isfinite(best), index, -1)
