"""Simulation: our own scheduler on a clock that measured step costs drive, with drawn acceptance. No model runs.

Every replica is a real Scheduler with a real block pool; only the device is replaced, by a table of costs and a draw of
how many drafted tokens are accepted. So admission, chunked prompts, budgets, preemption and the host that plans a step
ahead are not modelled but run. What comes out are the same figures as of a real load (serving.py sums both up).

Invariant: the same seed gives the same result, and nothing reads the real clock.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from foretell.bench.client import Served
from foretell.bench.costs import Costs
from foretell.bench.serving import arrivals
from foretell.engine.blocks import BlockManager
from foretell.engine.request import Request
from foretell.engine.scheduler import Scheduler
from foretell.runner.plan import Plan, SlotResult, StepResult
from foretell.sampling_params import SamplingParams
from foretell.spec.acceptance import best_tree, expected_tokens
from foretell.spec.tree import Tree

Router = Literal["least", "turn", "random"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One replica: the limits of its engine.

    Args:
        blocks: of KV, the null block included.
        tree: index into the costs' trees that every step runs; None = the one that promises the most tokens a second at
            the batch it finds, as the controller does.
        behind: the host plans a step before the last one is collected, as on a GPU.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    block_size: int = 16
    blocks: int = 16384
    tree: int | None = None
    behind: bool = True


@dataclass(frozen=True, slots=True)
class Accepting:
    """How many drafted tokens are accepted.

    Args:
        rates: by depth, as in spec/acceptance.py; the last one holds for deeper nodes; none = nothing is accepted.
        found: share of a request's steps for which its drafter finds anything; below 1 for lookups.
    """

    rates: tuple[float, ...]
    found: float = 1.0

    def __post_init__(self) -> None:
        if any(not 0 <= p <= 1 for p in (*self.rates, self.found)):
            raise ValueError(f"acceptance must lie in [0, 1], got {self!r}")

    def reach(self, tree: Tree) -> tuple[float, ...]:
        """By depth from 1: how often a draft gets that far, as the expected length counts it."""
        lengths = [expected_tokens(tree, self.rates, most=d) for d in range(tree.depth + 1)]
        return tuple(b - a for a, b in pairwise(lengths))


def drawn(reach: Sequence[float], noise: random.Random) -> int:
    """Accepted tokens of one draft."""
    chance = noise.random()
    return next((depth for depth, share in enumerate(reach) if chance >= share), len(reach))


def constant_acceptance(length: float, tree: Tree) -> Accepting:
    """The acceptance, equal at every depth, that gives a tree a mean length.

    Raises:
        ValueError: no acceptance does.
    """
    longest = expected_tokens(tree, (1.0,))
    if not 1 <= length <= longest:
        raise ValueError(
            f"a tree of {tree.nodes} nodes cannot have a mean length of {length}: it lies in [1, {longest:.2f}]"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = expected_tokens(tree, (middle,)) < length
        low, high = (middle, high) if below else (low, middle)
    return Accepting((high,))


@dataclass(frozen=True, slots=True)
class Job:
    """One request to come."""

    due: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What arrives.

    Args:
        lengths: (prompt tokens, output tokens) of real requests; drawn with replacement.
        rate: requests a second, Poisson; infinity = all at once.
        in_order: lengths are taken one after the other instead.
    """

    lengths: Sequence[tuple[int, int]]
    rate: float
    requests: int
    seed: int = 0
    in_order: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or any(p < 1 or o < 1 for p, o in self.lengths):
            raise ValueError("lengths must be pairs (prompt tokens, output tokens), all at least 1")

    def jobs(self) -> list[Job]:
        """The requests, in order of arrival."""
        draw = random.Random(self.seed + 1)
        due = arrivals(self.rate, self.requests, self.seed)
        own = list(self.lengths)
        if self.in_order:
            return [Job(at, *own[i % len(own)]) for i, at in enumerate(due)]
        return [Job(at, *draw.choice(own)) for at in due]


@dataclass(slots=True)
class _Life:
    """What a client sees."""

    job: Job
    pieces: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    """What the device knows of a slot."""

    length: int
    limit: int
    life: _Life
    live: bool = True
    drafted: bool = False  # something was found for its next step


class Replica:
    """One engine, simulated.

    Args:
        noise: draws acceptance.
    """

    def __init__(
        self, shape: Shape, costs: Costs, accepting: Accepting, noise: random.Random
    ) -> None:
        self.shape = shape
        self.costs = costs
        self.accepting = accepting
        self.clock = 0.0
        self.busy = 0.0  # seconds that steps took
        self.steps = 0
        self.tokens = 0
        self.lives: list[_Life] = []
        self._noise = noise
        self.scheduler = Scheduler(
            BlockManager(shape.blocks, shape.block_size, prefix_cache=False),
            shape.max_num_seqs,
            shape.max_num_batched_tokens,
            shape.max_model_len,
            costs.steps.trees,
        )
        self._rows: dict[int, _Row] = {}
        self._chosen: dict[int, int] = {}  # rows -> tree
        self._cost: dict[tuple[int, int], float] = {}  # (rows, tree) -> seconds
        self._reach = {tree: accepting.reach(tree) for tree in costs.steps.trees}
        self._ready: deque[StepResult] = deque()
        self._named: dict[str, _Life] = {}

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def add(self, job: Job) -> None:
        """A request arrives; the clock of an idle replica moves on to it.

        Raises:
            ValueError: it can never run here.
        """
        if not self.scheduler.unfinished:
            self.clock = max(self.clock, job.due)
        name = str(len(self.lives))
        params = SamplingParams(max_tokens=job.output, ignore_eos=True)
        self.scheduler.add(Request(name, (0,) * job.prompt, params, seed=0))
        self._named[name] = _Life(job)
        self.lives.append(self._named[name])

    def advance(self, until: float) -> None:
        """Run steps that begin before `until`."""
        while self.scheduler.unfinished and self.clock < until:
            self._step()

    def _step(self) -> None:
        self.scheduler.wanted_tree = self._best() if self.shape.tree is None else self.shape.tree
        plan = self.scheduler.plan()
        if plan is not None:
            seconds = self._seconds(plan)
            self.clock += seconds
            self.busy += seconds
            self.steps += 1
            self._ready.append(self._run(plan))
        keep = 1 if self.shape.behind and plan is not None else 0
        while len(self._ready) > keep:
            self.scheduler.collect(self._ready.popleft())

    def _best(self) -> int:
        rows = max(1, len(self.scheduler.running))
        if rows not in self._chosen:
            self._chosen[rows] = best_tree(self.costs.steps, rows, self.accepting.rates)
        return self._chosen[rows]

    def _seconds(self, plan: Plan) -> float:
        prompt = self.costs.prompts.seconds(sum(chunk.count for chunk in plan.chunks))
        key = len(plan.decode), plan.tree
        if key[0] and key not in self._cost:
            self._cost[key] = self.costs.steps.seconds(*key)
        return prompt + self._cost.get(key, 0.0)

    def _run(self, plan: Plan) -> StepResult:
        """What the device would have done."""
        if plan.new:
            owner = {r.slot: self._named[r.id] for r in self.scheduler.running}
            for new in plan.new:
                self._rows[new.slot] = _Row(len(new.tokens), new.limit, owner[new.slot])
        trees = self.costs.steps.trees
        results = [self._emit(c.slot, trees[self.costs.steps.plain]) for c in plan.chunks if c.last]
        results += [self._emit(slot, trees[plan.tree]) for slot in plan.decode]
        ran = [self._rows[r.slot] for r in results if r is not None]
        for row in ran:
            row.drafted = self._noise.random() < self.accepting.found
        if not self.shape.behind and not any(row.drafted for row in ran if row.live):
            self.scheduler.nothing_drafted()
        return StepResult(plan.step, tuple(r for r in results if r is not None))

    def _emit(self, slot: int, tree: Tree) -> SlotResult | None:
        row = self._rows[slot]
        if not row.live:
            return None
        drafts = tree.nodes - 1 if row.drafted else 0
        accepted = drawn(self._reach[tree], self._noise) if drafts else 0
        count = min(accepted + 1, row.limit - row.length)
        row.length += count
        row.live = row.length < row.limit
        self.tokens += count
        row.life.pieces.append(self.clock)
        return SlotResult(
            slot,
            (0,) * count,
            finish=None if row.live else "length",
            drafted=drafts,
            accepted=min(accepted, count),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fleet did.

    Args:
        served: one per request, in order of arrival, as clients saw them.
        busy: share of the time that replicas were computing.
        step_ms: mean seconds of a step, in milliseconds.
        tokens_per_step: emitted tokens per step and replica.
    """

    served: tuple[Served, ...]
    replicas: int
    busy: float
    step_ms: float
    tokens_per_step: float
    preemptions: int


def simulate(
    traffic: Traffic,
    shape: Shape,
    costs: Costs,
    accepting: Accepting,
    replicas: int = 1,
    router: Router = "least",
) -> Outcome:
    """Run the traffic through `replicas` engines behind one router.

    Args:
        router: "least" sends a request where the fewest are, "turn" goes round, "random" draws.

    Raises:
        ValueError: a request can never run, or there is no replica.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    fleet = [
        Replica(shape, costs, accepting, random.Random(f"{traffic.seed} {i}"))
        for i in range(replicas)
    ]
    pick = _router(router, fleet, random.Random(traffic.seed + 2))
    jobs = traffic.jobs()
    for turn, job in enumerate(jobs):
        for replica in fleet:
            replica.advance(job.due)
        pick(turn).add(job)
    for replica in fleet:
        replica.advance(float("inf"))
    lives = sorted((life for r in fleet for life in r.lives), key=lambda life: life.job.due)
    steps = sum(r.steps for r in fleet)
    span = max(r.clock for r in fleet) - (jobs[0].due if jobs else 0.0)
    return Outcome(
        served=tuple(map(_seen, lives)),
        replicas=replicas,
        busy=sum(r.busy for r in fleet) / (replicas * span) if span > 0 else 0.0,
        step_ms=1e3 * sum(r.busy for r in fleet) / steps if steps else 0.0,
        tokens_per_step=sum(r.tokens for r in fleet) / steps if steps else 0.0,
        preemptions=sum(r.scheduler.preemptions for r in fleet),
    )


def _router(
    name: Router, fleet: Sequence[Replica], draw: random.Random
) -> Callable[[int], Replica]:
    match name:
        case "least":
            return lambda _: min(fleet, key=lambda replica: replica.load)
        case "turn":
            return lambda turn: fleet[turn % len(fleet)]
        case "random":
            return lambda _: draw.choice(fleet)
        case _:
            raise ValueError(f"router must be least, turn or random, got {name!r}")


def _seen(life: _Life) -> Served:
    return Served(
        sent=life.job.due,
        pieces=tuple(life.pieces),
        ended=life.pieces[-1],
        tokens=life.job.output,
        prompt_tokens=life.job.prompt,
        counted=True,
    )
