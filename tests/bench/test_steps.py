"""Step costs are measured of every tree at every batch, and what could not be measured is told."""

from __future__ import annotations

import json

import pytest
from bench_lab import PROMPTS, TinyEngines

from foretell import SamplingParams
from foretell.bench.costs import read_costs
from foretell.bench.machine import describe
from foretell.bench.offline import Plan
from foretell.bench.record import Record
from foretell.bench.steps import InTurn, step_costs
from foretell.bench.variants import given_variant
from foretell.spec.controller import Wish
from foretell.spec.tree import chain

DRAFTED = given_variant({"model": "models/draft", "num_speculative_tokens": 3}, adaptive=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60)


def quiet(_: str) -> None:
    """Tells nobody."""


def test_every_tree_is_timed_at_every_batch_and_prompts_besides() -> None:
    plan = Plan(PROMPTS, LONG, repeats=2)
    costs, rows, doubts = step_costs(TinyEngines(), DRAFTED, [1, 2], plan, quiet)
    trees = costs.steps.trees
    assert {(row.requests, row.nodes) for row in rows} == {
        (batch, tree.nodes) for batch in (1, 2) for tree in trees
    }
    assert {tree.nodes for tree in trees} >= {1, 4}
    assert all(row.count >= 3 and row.seconds > 0 for row in rows)
    assert doubts == []
    assert costs.prompts.token > 0
    assert len(costs.prompts.points) == 3  # 1, 2 and 4 prompts
    record = Record.made("steps", describe("cpu"), {"model": "m"}, rows, extra=costs.as_json())
    again = read_costs(Record.read(json.loads(record.line())))
    assert again.steps.seconds(2, 1) == pytest.approx(costs.steps.seconds(2, 1), rel=1e-4)


def test_trees_that_were_hardly_verified_are_told() -> None:
    plan = Plan(PROMPTS, SamplingParams(temperature=0.0, max_tokens=4), repeats=1)
    _, _, doubts = step_costs(TinyEngines(), DRAFTED, [1], plan, quiet)
    assert len(doubts) == 1
    assert "chain of 3" in doubts[0]
    assert "Give longer answers" in doubts[0]


def test_trees_are_taken_in_turn_and_none_that_does_not_fit() -> None:
    turn = InTurn((chain(0), chain(1), chain(4)))
    wishes = [Wish("a"), Wish("b")]
    assert [turn.choose(wishes).tree for _ in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [turn.choose(wishes, room=2).tree for _ in range(9)] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
