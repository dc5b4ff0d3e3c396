"""Which random numbers exist: the streams, and how a key is made from (seed, position, stream).

This is the only place that names randomness. Keys depend on the request's seed and on the position of the token being
decided, never on the step, the slot or the batch, so a request's text does not depend on its company, on preemption or,
under the `match` rule, on the drafter (drafter invariance, arXiv 2408.07978).
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from foretell.ops.reference.sample import mix32


class Stream(IntEnum):
    """Disjoint families of random numbers; the `rejection` rule needs four that share nothing."""

    SAMPLE = 0  # the target's own sample at a position; under `match` the drafter uses it too
    DRAFT = 1  # the drafter's draw under `rejection`
    ACCEPT = 2  # the uniform that accepts or rejects a drafted token
    RESIDUAL = 3  # the draw after the last accepted token under `rejection`


def key(seed: Tensor, position: Tensor, stream: Stream, index: Tensor | int = 0) -> Tensor:
    """The two-word key of one random number (or of one Gumbel vector over the vocabulary).

    Args:
        seed: [B] int64, one per request.
        position: [B, N] int64, position of the token that is being decided.
        stream: family of the number.
        index: [N] int64 or 0; tells numbers of one position apart (a node of the draft tree).

    Returns:
        [B, N, 2] int32.
    """
    seed = seed.view(-1, 1)
    low = _word(seed)
    high = _word(seed >> 32)
    first = mix32(mix32(low ^ _word(position * 2654435761)) + high)
    salt = _word(torch.as_tensor(index, device=seed.device) * 40503 + int(stream) * 1640531527)
    second = mix32(mix32(high ^ salt) + mix32(first + _word(position)))
    return torch.stack((mix32(first ^ second), second), dim=-1)


def _word(x: Tensor) -> Tensor:
    """The low 32 bits of int64 values as int32 words (`.to(int32)` of a wrapped value is not defined everywhere)."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)
