"""Percentiles, spreads and bootstrap intervals have the values that their definitions give."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.bench.costs import fit_line
from foretell.bench.stats import Distribution, Spread, bootstrap, percentile

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="of 0 values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="percentile 101"):
        percentile([1.0], 101)


def test_a_spread_knows_its_ends_and_reads_itself_back() -> None:
    spread = Spread.of([3.0, 1.0, 2.0])
    assert (spread.median, spread.low, spread.high) == (2.0, 1.0, 3.0)
    assert spread.relative == 1.0
    assert Spread.read({"values": [3.0, 1.0, 2.0]}) == spread


def test_a_distribution_of_nothing_is_zero() -> None:
    empty = Distribution.of([])
    assert (empty.count, empty.mean, empty.median) == (0, 0.0, 0.0)


def test_a_distribution_has_mean_and_deviation() -> None:
    found = Distribution.of([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.std == pytest.approx(statistics.pstdev([1, 2, 3, 4]))
    assert found.median == 2.5


def test_the_bootstrap_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    draw = random.Random(3)
    covered = 0
    for trial in range(200):
        sample = [draw.gauss(10, 2) for _ in range(40)]
        interval = bootstrap(sample, statistics.fmean, resamples=200, seed=trial)
        covered += interval.low <= 10 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_the_bootstrap_is_the_same_for_the_same_seed() -> None:
    sample = [1.0, 5.0, 2.0, 8.0]
    assert bootstrap(sample, statistics.fmean, seed=1) == bootstrap(
        sample, statistics.fmean, seed=1
    )
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([], statistics.fmean)


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)], (1.0, 2.0)),
        ([(2.0, 6.0)], (0.0, 3.0)),  # one point: through the origin
        ([(1.0, 1.0), (2.0, 4.0), (3.0, 9.0)], (0.0, 36 / 14)),  # a negative start is none
    ],
)
def test_a_fitted_line_is_the_least_squares_one(
    points: list[tuple[float, float]], line: tuple[float, float]
) -> None:
    assert fit_line(points) == pytest.approx(line)
