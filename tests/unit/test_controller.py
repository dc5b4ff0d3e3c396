"""The controller in a made-up world of known costs and acceptance: never slower than plain, never far from the best k.

Emitted tokens are counted as what the world expects of each choice, so that only the controller's own luck with what it
sees is left, not the luck of the draws. Costs are exact. No clock is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from foretell.spec.acceptance import expected_tokens
from foretell.spec.controller import REST, Controller, Wish
from foretell.spec.tree import Tree, chain

LADDER = tuple(chain(k) for k in (0, 1, 2, 3, 4, 6, 8))
WARM_UP = 64
Cost = Callable[[int, Tree], float]

COSTS: dict[str, Cost] = {
    "memory bound": lambda rows, tree: 1.0 + 0.002 * rows * tree.nodes + 0.03 * tree.depth,
    "compute bound": lambda rows, tree: 0.2 + 0.1 * rows * tree.nodes + 0.01 * tree.depth,
    "in between": lambda rows, tree: max(1.0, rows * tree.nodes / 16) + 0.03 * tree.depth,
    "slow drafter": lambda rows, tree: 1.0 + 0.004 * rows * tree.nodes + 0.35 * tree.depth,
    "free drafter": lambda rows, tree: 1.0 + 0.01 * rows * tree.nodes,
}


@dataclass
class World:
    """Costs, and an acceptance that holds at every position and may change."""

    cost: Cost
    rows: int
    rate: float
    seed: int = 0
    trees: tuple[Tree, ...] = LADDER
    chosen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.seed)
        self.controller = Controller(self.trees)
        self.wishes = [Wish(row) for row in range(self.rows)]
        self.tree = self.controller.choose(self.wishes).tree

    def step(self) -> None:
        tree = self.trees[self.tree]
        self.chosen.append(self.tree)
        for row in range(self.rows):
            accepted = 0
            while accepted < tree.depth and self.draws.random() < self.rate:
                accepted += 1
            self.controller.verified(row, self.tree, accepted)
        self.controller.timed(self.rows, self.tree, self.cost(self.rows, tree))
        self.tree = self.controller.choose(self.wishes).tree

    def run(self, steps: int) -> World:
        for _ in range(steps):
            self.step()
        return self

    def speed(self, tree: int) -> float:
        """What a fixed tree brings."""
        shape = self.trees[tree]
        return self.rows * expected_tokens(shape, (self.rate,)) / self.cost(self.rows, shape)

    def achieved(self, since: int) -> float:
        """What the choices from step `since` on bring."""
        shapes = [self.trees[tree] for tree in self.chosen[since:]]
        tokens = sum(self.rows * expected_tokens(shape, (self.rate,)) for shape in shapes)
        return tokens / sum(self.cost(self.rows, shape) for shape in shapes)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
def test_never_slower_than_plain_and_never_far_from_the_best_fixed_k(
    cost: str, rows: int, rate: float
) -> None:
    seeds, steps = (
        (range(6), 400) if rows == 1 else (range(2), 300) if rows == 8 else (range(1), 160)
    )
    worlds = [World(COSTS[cost], rows, rate, seed).run(steps) for seed in seeds]
    best = max(worlds[0].speed(tree) for tree in range(len(LADDER)))
    achieved = sum(world.achieved(WARM_UP) for world in worlds) / len(worlds)
    assert achieved >= 0.98 * best
    assert min(world.achieved(WARM_UP) for world in worlds) >= 0.97 * worlds[0].speed(0)


@pytest.mark.parametrize("cost", ["memory bound", "in between", "free drafter", "slow drafter"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.8, 0.3)])
def test_acceptance_that_falls_is_followed_within_32_steps(
    cost: str, rows: int, before: float, after: float
) -> None:
    worlds = [World(COSTS[cost], rows, before, seed).run(200) for seed in range(4)]
    for world in worlds:
        world.rate = after
        world.run(96)
    best = max(worlds[0].speed(tree) for tree in range(len(LADDER)))
    assert sum(world.achieved(232) for world in worlds) / 4 >= 0.97 * best


@pytest.mark.parametrize("cost", ["memory bound", "in between"])
@pytest.mark.parametrize("rows", [1, 8])
def test_acceptance_that_rises_after_a_pause_is_followed_within_32_steps(
    cost: str, rows: int
) -> None:
    worlds = [World(COSTS[cost], rows, 0.0, seed).run(200) for seed in range(4)]
    for world in worlds:
        assert world.chosen[150:].count(0) > 30, "there was no pause"
        world.rate = 0.9
        world.run(96)
    best = max(worlds[0].speed(tree) for tree in range(len(LADDER)))
    assert sum(world.achieved(232) for world in worlds) / 4 >= 0.97 * best


def test_trials_stop_where_the_drafter_can_never_pay() -> None:
    world = World(lambda rows, tree: 1.0 + 3.0 * tree.depth, 4, 0.99).run(300)
    assert set(world.chosen[WARM_UP:]) == {0}


def test_trials_are_never_closer_than_the_rest_between_them() -> None:
    world = World(COSTS["memory bound"], 4, 0.0).run(400)
    trials = [step for step in range(WARM_UP, 400) if world.chosen[step] != 0]
    assert len(trials) > 10
    assert min(b - a for a, b in pairwise(trials)) >= REST


def test_equal_trees_do_not_flap() -> None:
    """Two lengths of equal worth: one of them is kept."""
    world = World(lambda rows, tree: 1.0 + 0.25 * tree.depth, 8, 0.6).run(400)
    before = world.controller.switches
    world.run(200)
    assert world.controller.switches - before <= 4


def test_the_choice_fits_the_token_budget() -> None:
    world = World(COSTS["memory bound"], 8, 0.9).run(100)
    assert LADDER[world.controller.choose(world.wishes).tree].nodes > 4
    assert LADDER[world.controller.choose(world.wishes, room=4).tree].nodes <= 4
    assert world.controller.choose(world.wishes, room=0).tree == 0


def test_requests_that_want_no_drafts_decode_plainly() -> None:
    controller = Controller(LADDER)
    assert controller.choose([Wish(0, most=0), Wish(1, most=0)]).tree == 0
    assert controller.choose([]).tree == 0


def test_a_request_that_wants_few_drafts_is_not_expected_to_bring_more() -> None:
    world = World(COSTS["slow drafter"], 1, 0.9).run(100)
    assert LADDER[world.tree].depth > 1
    choices = [world.controller.choose([Wish(0, most=1)]) for _ in range(4)]
    assert {LADDER[choice.tree].depth for choice in choices if not choice.trial} <= {0, 1}


def test_the_mix_of_requests_decides() -> None:
    """Half of the batch writes code, half of it chats; when the coders leave, the rest decodes plainly."""
    controller = Controller(LADDER)
    draws, cost = random.Random(3), COSTS["slow drafter"]
    rates = {row: 0.95 if row < 4 else 0.05 for row in range(8)}
    chosen = []
    for step in range(300):
        rows = [row for row in rates if step < 200 or row >= 4]
        if step == 200:
            for row in range(4):
                controller.ended(row)
        choice = controller.choose([Wish(row) for row in rows])
        chosen.append(choice.tree)
        tree = LADDER[choice.tree]
        for row in rows:
            accepted = 0
            while accepted < tree.depth and draws.random() < rates[row]:
                accepted += 1
            controller.verified(row, choice.tree, accepted)
        controller.timed(len(rows), choice.tree, cost(len(rows), tree))
    assert min(chosen[150:200]) > 0
    assert chosen[202:].count(0) >= 0.85 * len(chosen[202:])


def test_a_drafter_that_finds_nothing_costs_what_plain_steps_cost() -> None:
    """N-gram: most steps find nothing and are plain, so a long chain for the others costs little."""
    controller = Controller(LADDER)
    draws, cost = random.Random(5), COSTS["slow drafter"]
    for _ in range(300):
        tree = controller.choose([Wish(0)]).tree
        hit = draws.random() < 0.1
        controller.found(hit)
        run = tree if hit else 0
        controller.verified(0, tree, LADDER[tree].depth if hit else 0)
        controller.timed(1, run, cost(1, LADDER[run]))
    assert tree > 0


def test_expectations_come_with_the_choice() -> None:
    world = World(COSTS["memory bound"], 4, 0.6).run(200)
    choice = world.controller.choose(world.wishes)
    tree = LADDER[choice.tree]
    assert choice.seconds == pytest.approx(COSTS["memory bound"](4, tree))
    assert choice.tokens == pytest.approx(4 * expected_tokens(tree, (0.6,)), rel=0.15)
