"""Rotary position embedding: its settings, and the cosines and sines of a forward pass.

Not the rotation itself (that is `ops.rope_store`), and no table: angles are computed from positions once per forward,
so no length is too long. Every row's angles depend on its own position alone, whatever else is in the batch: that
is what keeps a token's KV the same in every chunking, batch and draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from foretell.ops.reference import layers
from foretell.ops.table import REFERENCE, OpTable


class Scaling(Enum):
    """How frequencies are changed to reach beyond the trained length."""

    NONE = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class Rope:
    """Settings of one rotary embedding. A field that its `scaling` does not read keeps its default.

    `dim` is the number of rotated channels of a head, the first ones. `divisors` (dim / 2 numbers) divide the
    frequencies; longrope has them from its short or long factors, GGUF files may carry them as a tensor.
    """

    dim: int
    base: float = 10000.0
    scaling: Scaling = Scaling.NONE
    factor: float = 1.0
    trained_length: int = 0  # positions the unscaled embedding was trained on
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of R rows, as `ops.rope_store` takes them."""

    cos: Tensor  # [R, 1, dim]
    sin: Tensor  # [R, 1, dim], negated in the first half


def rotation(
    rope: Rope,
    frequencies: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    ops: OpTable = REFERENCE,
) -> Rotation:
    """Cosines and sines of positions.

    Args:
        frequencies: [dim / 2] float32, from `inverse_frequencies`.
        positions: [R] int64.
        dtype: of the result; the arithmetic is in float32.
    """
    factor = rope.attention_factor
    if rope.scaling is Scaling.DYNAMIC:
        own = _dynamic(rope, positions.to(torch.float32).unsqueeze(-1))
        return Rotation(*layers.angles(positions, own, factor, dtype))
    return Rotation(*ops.angles(positions, frequencies, factor, dtype))


def inverse_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """[dim / 2] float32 angle per position of each channel pair.

    Reckoned on the host whatever the device: the same bits everywhere, and a power on the meta device would import
    the whole of torch's decompositions (140 MiB).
    """
    host = torch.device("cpu")
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=host) / rope.dim
    plain = 1.0 / rope.base**exponents
    match rope.scaling:
        case Scaling.LINEAR:
            plain = plain / rope.factor
        case Scaling.LLAMA3:
            plain = _llama3(rope, plain)
        case Scaling.YARN:
            plain = _yarn(rope, plain)
        case Scaling.NONE | Scaling.DYNAMIC | Scaling.LONGROPE:
            pass
    if rope.divisors:
        plain = plain / torch.tensor(rope.divisors, dtype=torch.float32, device=host)
    return plain.to(device)


def _dynamic(rope: Rope, positions: Tensor) -> Tensor:
    """[R, dim / 2]: the base grows with the length a row ends ("dynamic NTK"), as in one-token-at-a-time decoding."""
    length = (positions + 1).clamp(min=rope.trained_length)
    growth = rope.factor * length / rope.trained_length - (rope.factor - 1)
    base = rope.base * growth ** (rope.dim / (rope.dim - 2))
    exponents = (
        torch.arange(0, rope.dim, 2, dtype=torch.float32, device=positions.device) / rope.dim
    )
    return 1.0 / base**exponents


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended."""
    turns = rope.trained_length * plain / (2 * math.pi)  # full turns within the trained length
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: Rope, plain: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate slow channels, keep fast ones, ramp between them."""

    def channel(
        turns: float,
    ) -> float:  # where a channel makes so many turns within the trained length
        length = rope.trained_length / (turns * 2 * math.pi)
        return rope.dim * math.log(length) / (2 * math.log(rope.base))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    place = torch.arange(rope.dim // 2, dtype=torch.float32, device=plain.device)
    ramp = ((place - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
