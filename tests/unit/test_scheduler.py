"""The scheduler against a fake device that keeps KV content, so that a wrong block is seen, not guessed.

The device executes plans in order and may deliver results one step late. Every key holds the hash of
the prefix it was computed for; a decode step reads all of them. What a request must emit follows from
its seed alone.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from foretell.engine.blocks import BlockManager
from foretell.engine.request import Request, Status
from foretell.engine.scheduler import Scheduler
from foretell.runner.plan import Plan, SlotResult, StepResult
from foretell.sampling_params import SamplingParams
from foretell.spec.tree import Tree, chain

GARBAGE = -1
STOP = 0


def token_at(seed: int, position: int) -> int:
    """The target's own token: a function of seed and position; one in 31 is the stop token."""
    return hash((seed, position, 77)) % 31


def prefix_ids(tokens: list[int]) -> list[int]:
    ids, last = [], 0
    for token in tokens:
        last = hash((last, token))
        ids.append(last)
    return ids


def expected(request: Request) -> tuple[list[int], str]:
    """What the request emits alone, and why it ends."""
    output: list[int] = []
    while request.prompt_length + len(output) < request.limit:
        output.append(token_at(request.seed, request.prompt_length + len(output)))
        if output[-1] == STOP:
            return output, "stop"
    return output, "length"


@dataclass
class Row:
    """One slot on the fake device."""

    tokens: list[int]
    limit: int
    seed: int
    computed: int
    live: bool = True
    table: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


class FakeDevice:
    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.size = scheduler.blocks.block_size
        self.kv = [GARBAGE] * scheduler.blocks.num_blocks * self.size  # the target's
        self.drafter_kv = list(self.kv)
        self.rows: dict[int, Row] = {}
        self.plans: list[Plan] = []
        self.commits: deque[int] = deque()  # scripted commit lengths; random when empty

    def run(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        self._check_budget(plan)
        for new in plan.new:
            row = Row(list(new.tokens), new.limit, new.seed, new.cached)
            row.ids = prefix_ids(row.tokens)
            self.rows[new.slot] = row
        for entry in plan.new_blocks:
            table = self.rows[entry.slot].table
            assert entry.start == len(table), "a block table has a gap"
            table.extend(entry.blocks)
        results = [self._chunk(plan, chunk) for chunk in plan.chunks]
        results += [self._decode(plan, slot) for slot in plan.decode]
        return StepResult(plan.step, tuple(r for r in results if r is not None))

    def _check_budget(self, plan: Plan) -> None:
        cost = sum(c.count for c in plan.chunks)
        cost += len(plan.decode) * self.scheduler.trees[plan.tree].nodes
        assert 0 < cost <= self.scheduler.max_num_batched_tokens
        slots = [c.slot for c in plan.chunks] + list(plan.decode)
        assert len(set(slots)) == len(slots), "a slot has two parts in one step"
        assert len(slots) <= self.scheduler.max_num_seqs

    def _write(self, kv: list[int], row: Row, start: int, stop: int, valid: bool) -> None:
        assert stop <= len(row.table) * self.size, f"key {stop - 1} is past the table"
        for key in range(start, stop):
            place = row.table[key // self.size] * self.size + key % self.size
            assert place >= self.size, "the null block was written"
            kv[place] = row.ids[key] if valid else GARBAGE

    def _read(self, kv: list[int], row: Row, stop: int) -> None:
        for key in range(stop):
            place = row.table[key // self.size] * self.size + key % self.size
            assert kv[place] == row.ids[key], f"key {key} holds somebody else's content"

    def _emit(self, row: Row, most: int) -> tuple[tuple[int, ...], str | None]:
        out: list[int] = []
        while len(out) < most:
            token = token_at(row.seed, len(row.tokens))
            row.tokens.append(token)
            row.ids.append(hash((row.ids[-1], token)))
            out.append(token)
            if token == STOP or len(row.tokens) == row.limit:
                row.live = False
                return tuple(out), "stop" if token == STOP else "length"
        return tuple(out), None

    def _draft(self, plan: Plan, slot: int, start: int) -> None:
        """The drafter ingests the tokens from `start` on, reads all it has, and scribbles behind."""
        row = self.rows[slot]
        if not row.live or slot in plan.undrafted:
            return
        tail = max(self.scheduler.scratch, self.scheduler.trees[plan.next_tree].nodes)
        length = len(row.tokens)
        assert length + tail <= plan.keys
        self._write(self.kv, row, length - 1, length + tail, valid=False)
        if self.scheduler.drafter_kv:
            self._write(self.drafter_kv, row, start, length, valid=True)
            self._read(self.drafter_kv, row, length)
            self._write(self.drafter_kv, row, length, length + tail, valid=False)

    def _chunk(self, plan: Plan, chunk) -> SlotResult | None:
        row = self.rows[chunk.slot]
        assert chunk.start == row.computed
        assert chunk.count > 0
        self._read(self.kv, row, chunk.start)
        row.computed += chunk.count
        for kv in (self.kv, self.drafter_kv):
            self._write(kv, row, chunk.start, row.computed, valid=True)
        assert chunk.last == (row.computed == len(row.tokens))
        if not chunk.last:
            return None
        tokens, finish = self._emit(row, 1)
        self._draft(plan, chunk.slot, row.computed)
        return SlotResult(chunk.slot, tokens, finish)

    def _decode(self, plan: Plan, slot: int) -> SlotResult | None:
        row = self.rows[slot]
        if not row.live:
            return None
        tree = self.scheduler.trees[plan.tree]
        length = len(row.tokens)
        self._read(self.kv, row, length - 1)
        assert length - 1 + tree.nodes <= plan.keys
        self._write(self.kv, row, length - 1, length - 1 + tree.nodes, valid=False)
        most = self.commits.popleft() if self.commits else self.rng.randint(1, tree.depth + 1)
        tokens, finish = self._emit(row, most)
        self._write(self.kv, row, length - 1, len(row.tokens) - 1, valid=True)
        self._draft(plan, slot, length)
        return SlotResult(slot, tokens, finish, None, tree.nodes - 1, len(tokens) - 1)


class Loop:
    """The engine's loop: plan, launch, collect; `late` delivers a result after the next launch."""

    def __init__(self, scheduler: Scheduler, late: bool, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.late = late
        self.rng = random.Random(seed)
        self.device = FakeDevice(scheduler, self.rng)
        self.results: deque[StepResult] = deque()
        self.failed: list[Request] = []
        self.taken: list[tuple[Request, SlotResult]] = []

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.failed += self.scheduler.take_failed()
        self.scheduler.check()
        if plan is not None:
            self.results.append(self.device.run(plan))
        if self.results and (not self.late or plan is None or len(self.results) > 1):
            self.taken += self.scheduler.collect(self.results.popleft())
            self.scheduler.check()

    def drain(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.scheduler.unfinished:
                return
            self.step()
        raise AssertionError("the queue does not drain")


def make(
    blocks: int = 64,
    size: int = 4,
    seqs: int = 8,
    tokens: int = 64,
    length: int = 64,
    trees: tuple[Tree, ...] = (Tree((-1,)), chain(3)),
    **options,
) -> Scheduler:
    return Scheduler(BlockManager(blocks, size), seqs, tokens, length, trees, **options)


_ids = iter(range(1 << 60))


def ask(prompt: list[int], seed: int = 1, priority: int = 0, **params) -> Request:
    params.setdefault("max_tokens", None)
    return Request(f"r{next(_ids)}", prompt, SamplingParams(**params), seed, priority)


def assert_idle(scheduler: Scheduler) -> None:
    scheduler.check()
    assert scheduler.blocks.available == scheduler.blocks.usable
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.unfinished


LATE = pytest.mark.parametrize("late", [False, True], ids=["synchronous", "one-behind"])
WIDE = Tree((-1, 0, 0, 0, 1, 1, 2))


def random_prompt(rng: random.Random, past: list[list[int]], longest: int) -> list[int]:
    kind = rng.random()
    if past and kind < 0.4:  # a follow-up turn, or a shared beginning
        base = rng.choice(past)
        base = base if kind < 0.2 else base[: rng.randint(1, len(base))]
        prompt = base + [rng.randint(1, 30) for _ in range(rng.randint(0, 4))]
    else:
        prompt = [rng.randint(1, 30) for _ in range(rng.randint(1, longest))]
    return prompt[: rng.randint(1, longest)] if len(prompt) > longest else prompt


def simulate(scheduler: Scheduler, late: bool, seed: int, count: int, abort: float) -> Loop:
    """`count` random requests with random aborts; every finished one must have exactly its tokens."""
    loop = Loop(scheduler, late, seed)
    rng = random.Random(seed + 1)
    open_: list[Request] = []
    past: list[list[int]] = []
    added = 0
    longest = min(scheduler.max_model_len - 1, 40)
    while added < count or scheduler.unfinished:
        while added < count and len(open_) < 12 and rng.random() < 0.7:
            most = rng.choice([None, 1, 2, rng.randint(1, 30)])
            request = ask(
                random_prompt(rng, past, longest),
                seed=rng.randint(0, 1 << 30),
                priority=rng.randint(0, 2),
                max_tokens=most,
                speculate=rng.random() < 0.9,
                prompt_logprobs=0 if rng.random() < 0.05 else None,
            )
            scheduler.add(request)
            open_.append(request)
            added += 1
        if open_ and rng.random() < abort:
            scheduler.abort(rng.choice(open_).id)
            scheduler.check()
        loop.step()
        for request in [r for r in open_ if r.status is Status.DONE]:
            open_.remove(request)
            output, finish = expected(request)
            if request.finish == "abort":
                assert request.output == output[: len(request.output)]
                continue
            assert (request.output, request.finish) == (output, finish)
            past = [*past[-20:], request.tokens[:longest]]
    assert not loop.failed
    assert_idle(scheduler)
    return loop


@LATE
@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
def test_ten_thousand_requests_get_their_tokens_and_leave_no_block(late, scheduling):
    scheduler = make(
        blocks=40, seqs=6, tokens=48, trees=(Tree((-1,)), chain(3), WIDE), scheduling=scheduling
    )
    loop = simulate(scheduler, late, seed=3, count=2500, abort=0.02)
    assert scheduler.preemptions > 20
    assert scheduler.blocks.hits > 300
    assert len(loop.device.plans) > 2500
