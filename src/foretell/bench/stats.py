"""Figures from samples: percentiles, medians with their spread, bootstrap intervals. Plain Python, torch-free.

Invariant: nothing here knows what was measured; units are the caller's.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

T = TypeVar("T")
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repeats with the lowest and the highest of them."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value."""
        assert values, "a spread needs a value"
        return cls(statistics.median(values), min(values), max(values), tuple(values))

    @classmethod
    def read(cls, data: Mapping[str, object]) -> Self:
        """From its JSON."""
        return cls.of([float(str(value)) for value in _listed(data["values"])])

    @property
    def relative(self) -> float:
        """(high - low) / median: how far repeats lie apart."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """A figure over many events: mean, deviation and percentiles."""

    count: int
    mean: float
    std: float
    percentiles: dict[str, float]  # "p50" -> value

    @classmethod
    def of(cls, values: Sequence[float], wanted: Sequence[float] = PERCENTILES) -> Self:
        """Of any number of values; all zero where there are none, as vLLM reports it."""
        named = {f"p{q:g}": percentile(values, q) if values else 0.0 for q in wanted}
        mean = statistics.fmean(values) if values else 0.0
        return cls(len(values), mean, statistics.pstdev(values) if values else 0.0, named)

    @property
    def median(self) -> float:
        """The 50th percentile."""
        return self.percentiles["p50"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the interval that holds it in `level` of resamples."""

    value: float
    low: float
    high: float
    level: float


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, linear between the two nearest ranks (numpy's default, and vLLM's).

    Example: percentile([1, 2, 3, 4], 50) == 2.5.

    Raises:
        ValueError: there are no values, or q is outside [0, 100].
    """
    if not values or not 0 <= q <= 100:
        raise ValueError(f"percentile {q} of {len(values)} values does not exist")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def bootstrap(
    items: Sequence[T],
    figure: Callable[[Sequence[T]], float],
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """A percentile bootstrap interval of `figure` over `items` drawn with replacement (Efron 1979).

    Raises:
        ValueError: there are no items.
    """
    if not items:
        raise ValueError("a bootstrap interval needs at least one item")
    draw = random.Random(seed)
    seen = [figure(draw.choices(items, k=len(items))) for _ in range(resamples)]
    tail = 50 * (1 - level)
    return Interval(figure(items), percentile(seen, tail), percentile(seen, 100 - tail), level)


def _listed(value: object) -> list[object]:
    assert isinstance(value, list | tuple), f"expected a list, got {value!r}"
    return list(value)
