"""Costs and expected lengths: what was measured is returned, what was not is estimated on the right side."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.runner.graphs import BUCKETS as CAPTURED
from foretell.spec.acceptance import (
    Rates,
    best_tree,
    break_even,
    expected_speed,
    expected_tokens,
    rates_of,
)
from foretell.spec.costs import BUCKETS, StepCosts, bucket_of
from foretell.spec.presets import preset
from foretell.spec.tree import Tree, chain, from_paths

CHAINS = (chain(0), chain(1), chain(2), chain(4))


def costs(rows: dict[int, list[float]]) -> StepCosts:
    table = StepCosts(CHAINS)
    for bucket, seconds in rows.items():
        for tree, value in enumerate(seconds):
            table.add(bucket, tree, value)
    return table


def test_buckets_are_those_that_graphs_are_captured_for() -> None:
    assert BUCKETS == CAPTURED
    assert [bucket_of(rows) for rows in (1, 3, 24, 25, 256, 257, 600)] == [
        1,
        4,
        24,
        32,
        256,
        512,
        768,
    ]


def test_a_measured_cell_is_the_median_of_its_newest_steps() -> None:
    table = StepCosts(CHAINS)
    for seconds in (9.0, 1.0, 1.0, 50.0, 1.0):
        table.add(3, 0, seconds)
    assert table.seconds(4, 0) == 1.0
    for _ in range(4):
        table.add(4, 0, 2.0)
    assert table.seconds(3, 0) == 2.0
    assert table.measured(4, 0) == 9


def test_nothing_measured_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="no step was measured"):
        StepCosts(CHAINS).seconds(1, 0)


def test_an_untried_tree_is_hoped_to_cost_what_the_next_smaller_one_does() -> None:
    table = StepCosts(CHAINS)
    table.add(1, 0, 1.0)
    assert table.seconds(1, 3) == 1.0
    table.add(1, 2, 1.5)
    assert table.seconds(1, 3) == 1.5
    assert table.seconds(1, 1) == 1.0


def test_an_untried_bucket_takes_the_ratio_of_a_known_one() -> None:
    table = costs({1: [1.0, 1.1, 1.2, 1.4]})
    table.add(8, 0, 2.0)
    assert table.seconds(8, 3) == pytest.approx(2.8)


def test_between_two_buckets_costs_are_on_the_line() -> None:
    table = costs({8: [1.0, 1.0, 1.0, 2.0], 16: [2.0, 2.0, 2.0, 4.0]})
    table.cells[24, 0] = table.cells[16, 0]
    table.cells[32, 3] = table.cells[16, 3].scaled(2)
    assert table.seconds(24, 3) == pytest.approx(6.0)


def test_costs_survive_json() -> None:
    table = costs({1: [1.0, 1.1, 1.2, 1.4], 8: [2.0, 3.0, 4.0, 6.0]})
    table.add(8, 3, 7.0, draft=1.0)
    again = StepCosts.read(json.loads(json.dumps(table.as_json())))
    assert again == table
    with pytest.raises(ValueError, match="step costs"):
        StepCosts.read({"trees": []})


@given(st.floats(0, 0.99), st.integers(0, 20))
def test_a_chain_of_equal_rates_is_leviathans_equation_1(rate: float, k: int) -> None:
    closed = (1 - rate ** (k + 1)) / (1 - rate)
    assert expected_tokens(chain(k), (rate,)) == pytest.approx(closed)


def test_expected_tokens_are_the_sum_over_nodes() -> None:
    tree = from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    a, b = 0.5, 0.4
    by_hand = 1 + a * 1.3 + a * b * (1 + 0.3 + 0.3)
    assert expected_tokens(tree, (a, b)) == pytest.approx(by_hand)
    assert expected_tokens(tree, (a, b), most=1) == pytest.approx(1 + a * 1.3)


def test_a_wider_tree_never_expects_less() -> None:
    full = preset("mc_sim_7b_63")
    assert expected_tokens(full, (0.6, 0.4)) > expected_tokens(chain(4), (0.6, 0.4))


def test_speed_counts_every_request_with_its_own_rates() -> None:
    table = costs({2: [1.0, 1.0, 1.0, 2.0]})
    assert expected_speed(table, 2, 0, ()) == 2.0
    assert expected_speed(table, 2, 2, [(0.0,), (0.5,)]) == pytest.approx(1.0 + 1.75)


def test_the_best_tree_and_the_break_even_rate() -> None:
    table = costs({1: [1.0, 1.2, 1.3, 1.5]})
    assert best_tree(table, 1, (0.0,)) == 0
    assert best_tree(table, 1, (0.9,)) == 3
    even = break_even(table, 1, 1)
    assert even == pytest.approx(0.2, abs=1e-6)
    assert break_even(costs({1: [1.0, 3.0, 9.0, 9.0]}), 1, 1) is None


def test_a_refused_draft_says_nothing_about_later_positions() -> None:
    rates = Rates(memory=1e9)
    for _ in range(100):
        rates.add(chain(4), accepted=0)
    assert rates.seen(1) == pytest.approx(100, rel=1e-3)
    assert rates.seen(2) == 0
    rates.add(chain(4), accepted=2)
    assert [round(rates.seen(d), 3) for d in (1, 2, 3, 4)] == [101, 1, 1, 0]


def test_a_request_that_ended_was_not_refused() -> None:
    rates = Rates(memory=1e9)
    rates.add(chain(4), accepted=1, cut=True)
    assert rates.rates(1, weight=0.0) == (pytest.approx(0.995),)
    assert rates.seen(2) == 0


@pytest.mark.parametrize("tree", [chain(4), preset("mc_sim_7b_63"), Tree((-1, 0, 0, 1, 1, 2))])
def test_rates_are_found_again_from_censored_drafts(tree: Tree) -> None:
    truth, draws = (0.5, 0.45, 0.4, 0.5), random.Random(1)
    rates = Rates(memory=1e6)
    for _ in range(20_000):
        node, accepted = 0, 0
        while True:
            children = [n for n in range(1, tree.nodes) if tree.parents[n] == node]
            falls = [
                (1.0, 0.3, 0.15, 0.09, 0.06, 0.045, 0.035, 0.03, 0.025, 0.02)[tree.ranks[n]]
                for n in children
            ]
            u, taken = draws.random(), None
            for child, fall in zip(children, falls, strict=True):
                u -= truth[accepted] * fall
                if u < 0:
                    taken = child
                    break
            if taken is None:
                break
            node, accepted = taken, accepted + 1
        rates.add(tree, accepted)
    found = rates.rates(2, weight=0.0)
    assert found == pytest.approx(truth[:2], abs=0.03)


def test_rates_from_counters() -> None:
    assert rates_of((80, 40, 30), 100) == (0.8, 0.5, 0.75)
    assert rates_of((), 0) == ()
