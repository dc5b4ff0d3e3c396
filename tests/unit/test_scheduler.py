"""The scheduler against a fake device that keeps KV content, so that a wrong block is seen, not guessed.

The device executes plans in order and may deliver results one step late. Every key holds the hash of
the prefix it was computed for; a decode step reads all of them. What a request must emit follows from
its seed alone.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.engine.blocks import BlockManager
from foretell.engine.request import Request, Status
from foretell.engine.scheduler import Scheduler
from foretell.runner.plan import LogprobRow, Plan, SlotResult, StepResult
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

    def serve(self, *requests: Request) -> None:
        """Add all, run to the end, and see that nothing is left."""
        for request in requests:
            self.scheduler.add(request)
        self.drain()
        assert_idle(self.scheduler)

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


def by_slot(step: int, *results: SlotResult) -> StepResult:
    return StepResult(step, results)


def run_all(scheduler: Scheduler, requests: list[Request], late: bool) -> Loop:
    loop = Loop(scheduler, late)
    loop.serve(*requests)
    return loop


def assert_exact(requests: list[Request]) -> None:
    for request in requests:
        assert (request.output, request.finish) == expected(request)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(1, 9),
    seqs=st.integers(1, 7),
    tokens=st.integers(7, 70),
    room=st.integers(0, 60),
    late=st.booleans(),
    scheduling=st.sampled_from(["fcfs", "priority"]),
    trees=st.sampled_from([(chain(0),), (chain(3),), (WIDE, chain(0)), (chain(1), chain(5), WIDE)]),
    scratch=st.sampled_from([0, 12]),
    cached=st.booleans(),
    drafter_kv=st.booleans(),
)
def test_any_sizes_serve_random_requests_exactly(
    seed, size, seqs, tokens, room, late, scheduling, trees, scratch, cached, drafter_kv
):
    length = 48
    slack = max(scratch, *(tree.nodes for tree in trees), 0)
    pool = -(-(length + slack) // size) + 1 + room // size  # one request fits alone; often no two
    blocks = BlockManager(pool, size, cached)
    scheduler = Scheduler(
        blocks, seqs, tokens, length, trees, scheduling, scratch, drafter_kv=drafter_kv
    )
    simulate(scheduler, late, seed, count=25, abort=0.05)


# Order.


@LATE
def test_first_come_first_served(late):
    requests = [ask([i + 1] * (3 * i + 2), seed=i, max_tokens=4) for i in range(9)]
    loop = run_all(make(seqs=2, tokens=16), requests, late)
    firsts = list(dict.fromkeys(request.id for request, _ in loop.taken))
    assert firsts == [request.id for request in requests]


@LATE
def test_priority_goes_first_and_ties_go_by_arrival(late):
    order = [2, 0, 1, 0, 2, 1]
    requests = [ask([i + 1] * 5, seed=i, priority=p, max_tokens=3) for i, p in enumerate(order)]
    loop = run_all(make(seqs=1, scheduling="priority"), requests, late)
    firsts = list(dict.fromkeys(request.id for request, _ in loop.taken))
    assert firsts == [requests[i].id for i in (1, 3, 2, 5, 0, 4)]


def test_priority_is_not_read_under_fcfs():
    requests = [ask([i + 1] * 5, seed=i, priority=-i, max_tokens=3) for i in range(4)]
    loop = run_all(make(seqs=1), requests, late=False)
    firsts = list(dict.fromkeys(request.id for request, _ in loop.taken))
    assert firsts == [request.id for request in requests]


# Budgets.


def long_talks(count: int, prompt: int = 6, most: int = 30) -> list[Request]:
    """Requests that do not stop before their limit."""
    seeds = iter(range(1 << 30))
    talks = []
    while len(talks) < count:
        request = ask([len(talks) + 1] * prompt, seed=next(seeds), max_tokens=most)
        request.limit = prompt + most
        if expected(request)[1] == "length" and STOP not in expected(request)[0]:
            talks.append(request)
    return talks


@LATE
@pytest.mark.parametrize("count", range(1, 21))
@pytest.mark.parametrize("trees", [(chain(3),), (chain(0), chain(3))], ids=["one", "two"])
def test_drafts_never_push_a_step_over_the_token_budget(late, count, trees):
    # 16 requests times 4 nodes fill 64 tokens exactly; one more must not break the step.
    scheduler = make(blocks=400, seqs=20, tokens=64, trees=trees)
    requests = long_talks(count, most=16)
    loop = run_all(scheduler, [*requests, ask([9] * 40, seed=5, max_tokens=3)], late)
    assert_exact(requests)
    assert scheduler.preemptions == 0
    assert max(len(plan.decode) for plan in loop.device.plans) >= min(count, 16)


def test_a_smaller_tree_is_taken_when_the_large_one_does_not_fit_all():
    scheduler = make(blocks=400, seqs=20, tokens=64, trees=(chain(0), chain(1), chain(3)))
    loop = run_all(scheduler, long_talks(20), late=False)
    full = [plan for plan in loop.device.plans if len(plan.decode) == 20]
    assert full
    assert {plan.tree for plan in full} == {1}
    alone = make(blocks=400, seqs=20, tokens=64, trees=(chain(0), chain(1), chain(3)))
    assert {p.tree for p in run_all(alone, long_talks(1), late=False).device.plans[1:-1]} == {2}


@LATE
def test_requests_take_turns_when_no_tree_fits_all(late):
    # Four rows of 4 nodes leave 2 tokens a step: prompts of 2 enter until ten requests decode.
    scheduler = make(blocks=400, seqs=20, tokens=18, trees=(chain(3),))
    loop = Loop(scheduler, late)
    for request in long_talks(10, prompt=2, most=50):
        scheduler.add(request)
    most, gaps = 0, []
    while scheduler.unfinished:
        before = {request: request.served for request in scheduler.running if request.decodes}
        loop.step()
        most = max(most, len(before))
        gaps += [r.served - step for r, step in before.items() if r.served != step]
    assert most == 10
    assert max(gaps) <= 3, "ten requests, four a step: everyone has a turn in three"


@LATE
def test_a_long_prompt_is_computed_beside_decoding(late):
    scheduler = make(blocks=400, seqs=5, tokens=20, length=200, trees=(chain(3),))
    long = ask(list(range(1, 31)) * 4, seed=5, max_tokens=2)
    loop = run_all(scheduler, [*long_talks(4, most=100), long], late)
    assert sum(bool(plan.chunks) and bool(plan.decode) for plan in loop.device.plans) > 5
    first = next(i for i, (request, _) in enumerate(loop.taken) if request is long)
    assert first < len(loop.taken) - 40, "the prompt waited for the others to end"


@LATE
def test_a_prompt_begun_does_not_starve_when_decoding_fills_the_budget(late):
    # The short prompt's leftover starts the long one; then four rows of 4 nodes take all 16 tokens.
    scheduler = make(blocks=400, seqs=6, tokens=16, length=200, trees=(chain(3),))
    loop = Loop(scheduler, late)
    for request in long_talks(3, most=150):
        scheduler.add(request)
    for _ in range(4):
        loop.step()
    (short,), long = long_talks(1, prompt=2, most=150), ask(list(range(1, 31)) * 2, max_tokens=2)
    scheduler.add(short)
    scheduler.add(long)
    steps = 0
    while long.status is not Status.DONE:
        loop.step()
        steps += 1
        assert steps < 40
    assert len(scheduler.running) == 4, "the others still run"
    loop.drain()
    assert_exact([short, long])


@LATE
def test_a_starved_prompt_that_ends_first_in_a_step_does_not_decode_in_it(late):
    # As above; then half of the others leave, and the budget would do for its first draft as well.
    scheduler = make(blocks=400, seqs=6, tokens=16, length=200, trees=(chain(3),))
    loop = Loop(scheduler, late)
    talks = long_talks(3, most=150)
    for request in talks:
        scheduler.add(request)
    for _ in range(4):
        loop.step()
    (short,), rest = long_talks(1, prompt=2, most=150), ask([7] * 5, seed=2, max_tokens=20)
    scheduler.add(short)
    scheduler.add(rest)
    loop.step()
    loop.step()
    assert rest.prefilling
    assert rest.served < loop.device.plans[-1].step
    scheduler.abort(talks[0].id)
    scheduler.abort(talks[1].id)
    loop.step()
    plan = loop.device.plans[-1]
    assert [(chunk.slot, chunk.last) for chunk in plan.chunks] == [(rest.slot, True)]
    assert sorted(plan.decode) == sorted([talks[2].slot, short.slot])
    loop.drain()
    assert_exact([talks[2], short, rest])


def test_drafts_leave_room_for_waiting_prompts():
    scheduler = make(blocks=400, seqs=5, tokens=16, length=200, trees=(chain(0), chain(3)))
    loop = Loop(scheduler, late=False)
    for request in long_talks(3, most=150):
        scheduler.add(request)
    for _ in range(4):
        loop.step()
    assert loop.device.plans[-1].next_tree == 1
    scheduler.add(ask(list(range(1, 31)) * 4, max_tokens=2))
    loop.step()
    loop.step()
    assert [p.next_tree for p in loop.device.plans[-2:]] == [0, 0]
    assert sum(c.count for c in loop.device.plans[-1].chunks) == 13


def test_the_wanted_tree_is_drafted_for_the_next_step():
    scheduler = make(trees=(chain(0), chain(1), chain(3)))
    loop = Loop(scheduler, late=False)
    scheduler.add(long_talks(1)[0])
    assert scheduler.wanted_tree == 2
    loop.step()
    scheduler.wanted_tree = 1
    loop.step()
    loop.step()
    assert [(p.tree, p.next_tree) for p in loop.device.plans[1:]] == [(2, 1), (1, 1)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
        ({"length": 0}, "max_model_len must be at least 1, got 0"),
        ({"trees": ()}, "trees must hold at least one tree"),
        ({"scheduling": "lifo"}, "scheduling must be one of fcfs, priority, got 'lifo'"),
        ({"tokens": 3, "trees": (chain(3),)}, "max_num_batched_tokens=3 is less than the 4 nodes"),
    ],
)
def test_impossible_limits_are_refused_by_name(options, text):
    with pytest.raises(ValueError, match=text):
        make(**options)


# Limits of a request.


@LATE
@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("length", range(56, 64))
def test_a_request_ends_exactly_at_the_context_limit(late, k, length):
    def fresh() -> Request:
        seed = next(s for s in range(1000) if STOP not in [token_at(s, p) for p in range(64)])
        return ask([3] * length, seed=seed)

    plain, resumed, other = fresh(), fresh(), ask([4] * 5, seed=8, max_tokens=20)
    run_all(make(trees=(chain(k),)), [plain], late)
    scheduler = make(trees=(chain(k),))
    loop = Loop(scheduler, late)
    scheduler.add(other)
    scheduler.add(resumed)
    while resumed.status is Status.WAITING or resumed.prefilling:
        loop.step()
    if resumed.status is Status.RUNNING:
        scheduler._preempt(resumed)
        scheduler.check()
    loop.drain()
    for request in (plain, resumed):
        assert len(request.output) == 64 - length
        assert request.finish == "length"
    assert plain.output == resumed.output
    assert_exact([other])


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_that_leaves_no_room_is_refused(length):
    scheduler = make()
    with pytest.raises(ValueError, match=r"^This model's maximum context length is 64 tokens"):
        scheduler.add(ask([1] * length))
    assert not scheduler.unfinished


def test_an_empty_prompt_and_a_doubled_id_are_refused():
    scheduler = make()
    with pytest.raises(ValueError, match="the prompt is empty"):
        scheduler.add(ask([]))
    request = ask([1])
    scheduler.add(request)
    with pytest.raises(ValueError, match=f"'{request.id}' is already in use"):
        scheduler.add(Request(request.id, [1], SamplingParams(), 0))


def test_a_prompt_that_never_fits_the_pool_is_refused_with_the_numbers():
    scheduler = make(blocks=5, size=4)
    with pytest.raises(ValueError, match=r"needs 6 KV blocks for 21 tokens .* has 4 blocks of 4"):
        scheduler.add(ask([1] * 16))


@LATE
def test_a_request_that_outgrows_the_pool_alone_ends_with_an_error(late):
    scheduler = make(blocks=7, size=4)
    (doomed,) = long_talks(1, prompt=8, most=50)
    after = ask([5] * 4, seed=3, max_tokens=4)
    loop = run_all(scheduler, [doomed, after], late)
    assert loop.failed == [doomed]
    assert doomed.finish == "error"
    assert "needs 7 KV blocks" in str(doomed.error)
    assert "has 6 blocks of 4 tokens" in str(doomed.error)
    assert doomed.output == expected(doomed)[0][: len(doomed.output)]
    assert len(doomed.output) >= 8
    assert_exact([after])


@LATE
@pytest.mark.parametrize("most", range(1, 13))
def test_a_request_gets_exactly_max_tokens_and_the_sums_agree(late, most):
    (request,) = long_talks(1, most=most)
    loop = run_all(make(trees=(chain(0), chain(5))), [request], late)
    assert len(request.output) == most
    assert sum(len(result.tokens) for _, result in loop.taken) == most
    assert request.counts.accepted == sum(result.accepted for _, result in loop.taken)
    assert request.counts.accepted == sum(request.counts.accepted_at)


def scripted(
    scheduler: Scheduler, request: Request, *steps: tuple[tuple[int, ...], str | None]
) -> None:
    """Feed the given results to the only request."""
    scheduler.add(request)
    for tokens, finish in steps:
        plan = scheduler.plan()
        assert plan is not None
        result = SlotResult(request.slot, tokens, finish, None, 4 * bool(plan.decode), 0)
        if plan.decode:
            result = replace(result, accepted=min(4, len(tokens)))
        scheduler.collect(by_slot(plan.step, result))
        scheduler.check()


def test_a_stop_inside_a_block_ends_the_request_with_what_left():
    # All four drafts match and the second is the end: 2 tokens leave and count as 2, not 5 and 4.
    scheduler = make(trees=(chain(4),))
    request = ask([1, 2, 3], max_tokens=50)
    scripted(scheduler, request, ((30,), None), ((31, 32), "stop"))
    assert request.output == [30, 31, 32]
    assert request.finish == "stop"
    assert (request.counts.drafts, request.counts.drafted, request.counts.accepted) == (1, 4, 2)
    assert request.counts.accepted_at == [1, 1]
    assert_idle(scheduler)


def test_a_stop_on_the_last_allowed_place_is_a_stop():
    scheduler = make(trees=(chain(4),))
    request = ask([1, 2, 3], max_tokens=5)
    scripted(scheduler, request, ((31,), None), ((32, 33, 34, 0), "stop"))
    assert (len(request.output), request.finish) == (5, "stop")
    assert_idle(scheduler)


def test_more_tokens_than_asked_are_an_assertion():
    scheduler = make(trees=(chain(4),))
    with pytest.raises(AssertionError, match="limit 5"):
        scripted(scheduler, ask([1, 2, 3], max_tokens=2), ((31,), None), ((32, 33), "length"))


# Preemption.


@LATE
def test_preempted_requests_get_the_tokens_of_an_ample_pool(late):
    def fresh() -> list[Request]:
        return [
            ask([i + 1] * 6, seed=r.seed, max_tokens=40)
            for i, r in enumerate(long_talks(6, most=40))
        ]

    requests = fresh()
    scheduler = make(blocks=26, size=4, seqs=6)
    run_all(scheduler, requests, late)
    assert sum(request.counts.preemptions >= 2 for request in requests) >= 2
    assert requests[0].counts.preemptions == 0, "the oldest is never preempted"
    ample = fresh()
    run_all(make(blocks=200, seqs=6), ample, late)
    assert [r.output for r in requests] == [r.output for r in ample]
    assert scheduler.preemptions == sum(request.counts.preemptions for request in requests)


@LATE
def test_the_lowest_priority_is_preempted_whatever_its_age(late):
    requests = long_talks(6, most=40)
    for i, request in enumerate(requests):
        request.priority = 5 - i
    run_all(make(blocks=26, size=4, seqs=6, scheduling="priority"), requests, late)
    assert_exact(requests)
    assert requests[-1].counts.preemptions == 0
    assert requests[0].counts.preemptions > 0


def test_a_preempted_request_returns_with_all_its_tokens_and_its_prompt_length():
    scheduler = make()
    loop = Loop(scheduler, late=False)
    (request,) = long_talks(1, prompt=6, most=30)
    scheduler.add(request)
    for _ in range(4):
        loop.step()
    scheduler._preempt(request)
    scheduler.check()
    tokens = tuple(request.tokens)
    loop.step()
    (new,) = loop.device.plans[-1].new
    assert new.tokens == tokens
    assert (new.prompt_length, new.limit) == (6, 36)
    assert new.cached > 0, "its own blocks are found again"
    loop.drain()
    assert_exact([request])


def test_a_request_preempted_with_a_step_in_flight_waits_for_its_tokens():
    scheduler = make()
    loop = Loop(scheduler, late=True)
    (request,) = long_talks(1, prompt=6, most=30)
    scheduler.add(request)
    for _ in range(3):
        loop.step()
    scheduler._preempt(request)
    known = len(request.tokens)
    assert scheduler.plan() is None
    scheduler.collect(loop.results.popleft())
    assert len(request.tokens) > known
    loop.step()
    assert loop.device.plans[-1].new[0].tokens == tuple(request.tokens)
    loop.drain()
    assert_exact([request])


@LATE
def test_nobody_is_preempted_while_blocks_are_about_to_come_back(late):
    scheduler = make(blocks=26, size=4, seqs=6)
    preempt, seen = scheduler._preempt, []

    def watched(request: Request) -> None:
        seen.append(len(scheduler._leaving))
        preempt(request)

    scheduler._preempt = watched
    simulate(scheduler, late, seed=9, count=300, abort=0.1)
    assert len(seen) > 5
    assert not any(seen)


@LATE
def test_a_newcomer_waits_until_the_running_ones_have_room_to_grow(late):
    # 5 blocks and 7 blocks fill the pool of 12 exactly; the first would preempt the second at once.
    scheduler = make(blocks=13, size=4, trees=(chain(0),))
    first, second = long_talks(1, prompt=15, most=12)[0], ask([9] * 23, seed=3, max_tokens=12)
    run_all(scheduler, [first, second], late)
    assert scheduler.preemptions == 0
    assert_exact([first, second])


# Aborting.


@LATE
def test_blocks_and_slot_come_back_when_the_last_step_in_flight_is_collected(late):
    scheduler = make()
    loop = Loop(scheduler, late)
    gone, stays = long_talks(2, most=20)
    scheduler.add(gone)
    scheduler.add(stays)
    for _ in range(3):
        loop.step()
    known = list(gone.output)
    assert scheduler.abort(gone.id) is gone
    scheduler.check()
    assert (gone.status, gone.finish) == (Status.DONE, "abort")
    assert bool(gone.blocks) is late
    loop.step()
    assert gone.slot == -1
    assert gone.output == known, "the late result is dropped"
    loop.drain()
    assert all(request is stays for request, _ in loop.taken[-3:])
    assert_exact([stays])
    assert_idle(scheduler)


def test_aborting_what_waits_or_is_over_or_unknown_does_no_harm():
    scheduler = make(seqs=1)
    first, second = ask([1], max_tokens=1), ask([2], max_tokens=1)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.abort(second.id) is second
    Loop(scheduler, late=False).drain()
    assert scheduler.abort(first.id) is None
    assert scheduler.abort("nobody") is None
    assert second.output == []
    assert_idle(scheduler)


@LATE
def test_an_id_can_be_used_again_after_an_abort_in_flight(late):
    scheduler = make()
    loop = Loop(scheduler, late)
    (old,) = long_talks(1)
    scheduler.add(old)
    loop.step()
    scheduler.abort(old.id)
    new = Request(old.id, [7, 8], SamplingParams(max_tokens=3), seed=4)
    scheduler.add(new)
    loop.drain()
    assert_exact([new])
    assert_idle(scheduler)


@LATE
def test_lookahead_blocks_do_not_leak(late):
    # Block 16, 5 drafts, lengths 1..70, one in ten cancelled in mid-step, some preempted.
    scheduler = make(blocks=20, size=16, seqs=8, tokens=128, length=160, trees=(chain(0), chain(5)))
    loop, rng = Loop(scheduler, late), random.Random(4)
    requests = []
    for i in range(200):
        prompt = [rng.randint(1, 30) for _ in range(rng.randint(1, 70))]
        requests.append(ask(prompt, seed=i, max_tokens=rng.randint(1, 70)))
        scheduler.add(requests[-1])
        loop.step()
        if i % 10 == 0:
            scheduler.abort(rng.choice(scheduler.running or requests).id)
    loop.drain()
    assert scheduler.preemptions > 0
    assert_exact([request for request in requests if request.finish != "abort"])
    assert_idle(scheduler)


def test_a_request_that_ended_late_is_in_one_more_step_and_emits_nothing():
    scheduler = make(trees=(chain(0),))
    loop = Loop(scheduler, late=True)
    request = next(r for s in range(99) if (r := stops_after(s, 3)) is not None)
    scheduler.add(request)
    loop.drain()
    assert len(loop.device.plans) == 4
    assert len(loop.taken) == 3
    assert request.finish == "stop"


def stops_after(seed: int, count: int) -> Request | None:
    request = ask([1, 2], seed=seed, max_tokens=30)
    request.limit = 32
    return request if len(expected(request)[0]) == count else None


def test_a_request_sure_to_be_over_is_in_no_further_step():
    scheduler = make(trees=(chain(0),))
    loop = Loop(scheduler, late=True)
    (request,) = long_talks(1, most=3)
    scheduler.add(request)
    loop.drain()
    assert len(loop.device.plans) == 3


# The prefix cache.


@LATE
def test_a_second_prompt_reuses_the_full_blocks_of_the_first(late):
    scheduler = make(size=4)
    prompt = list(range(1, 18))
    first = ask(prompt, seed=1, max_tokens=3)
    loop = run_all(scheduler, [first], late)
    second, other = ask(prompt, seed=1, max_tokens=3), ask([*prompt[:9], 30, 30], max_tokens=3)
    loop.serve(second, other)
    assert (first.counts.cached, second.counts.cached, other.counts.cached) == (0, 16, 8)
    assert second.output == first.output
    assert (scheduler.blocks.queries, scheduler.blocks.hits) == (17 + 17 + 11, 24)


@LATE
def test_a_follow_up_turn_reuses_what_was_generated(late):
    scheduler = make(size=4, blocks=100)
    (first,) = long_talks(1, prompt=6, most=30)
    loop = run_all(scheduler, [first], late)
    second = ask([*first.tokens, 5, 6, 7], max_tokens=4)
    loop.serve(second)
    assert second.counts.cached >= 24
    assert_exact([second])


@LATE
def test_equal_prompts_at_once_compute_their_prefix_once(late):
    scheduler = make(size=4, seqs=8, tokens=256)
    requests = [ask(list(range(1, 22)), seed=i, max_tokens=5) for i in range(8)]
    run_all(scheduler, requests, late)
    assert [request.counts.cached for request in requests] == [0] + [20] * 7
    assert_exact(requests)


@LATE
def test_prompt_logprobs_do_not_read_the_prefix_cache(late):
    scheduler = make(size=4)
    prompt = list(range(1, 18))
    run_all(scheduler, [ask(prompt, max_tokens=2)], late)
    request = ask(prompt, max_tokens=2, prompt_logprobs=1)
    loop = run_all(scheduler, [request], late)
    assert request.counts.cached == 0
    assert sum(c.count for p in loop.device.plans for c in p.chunks) == 17


def test_prompt_logprob_rows_are_delivered_once_across_a_preemption():
    scheduler = make(tokens=8)
    request = ask(list(range(1, 13)), max_tokens=5, prompt_logprobs=0)
    scheduler.add(request)
    rows: list[LogprobRow] = []

    def step(tokens: tuple[int, ...] = ()) -> None:
        plan = scheduler.plan()
        assert plan is not None
        got = None
        for chunk in plan.chunks:
            got = tuple(
                LogprobRow(i, 0.0, 1)
                for i in range(chunk.start + 1, chunk.start + chunk.count + (not chunk.last))
            )
        for _, result in scheduler.collect(
            by_slot(plan.step, SlotResult(request.slot, tokens, prompt_logprobs=got))
        ):
            rows.extend(result.prompt_logprobs or ())

    step()
    scheduler._preempt(request)
    step()
    step((30,))
    scheduler._preempt(request)
    step()
    step((29,))
    assert [row.token for row in rows] == list(range(1, 12))


def test_what_a_broken_request_computed_is_not_shared():
    scheduler = make(size=4)
    prompt = list(range(1, 18))
    request = ask(prompt, max_tokens=9)
    scripted(scheduler, request, ((), "error"))
    assert (request.finish, request.output) == ("error", [])
    assert "NaN" in str(request.error)
    second = ask(prompt, max_tokens=2)
    run_all(scheduler, [second], late=False)
    assert second.counts.cached == 0


@pytest.mark.parametrize(("drafter_kv", "cached"), [(True, 4), (False, 28)])
def test_tokens_the_drafter_never_saw_are_shared_only_if_it_keeps_no_kv(drafter_kv, cached):
    scheduler = make(size=4, blocks=100, drafter_kv=drafter_kv)
    (talk,) = long_talks(1, prompt=6, most=30)
    silent = ask(talk.prompt, seed=talk.seed, max_tokens=30, speculate=False)
    loop = run_all(scheduler, [silent], late=False)
    second = ask([*silent.tokens[:28], 1], max_tokens=3)
    loop.serve(second)
    assert second.counts.cached == cached


@LATE
def test_nothing_computed_before_a_reset_is_found_after_it(late):
    scheduler = make(size=4, blocks=100)
    loop = Loop(scheduler, late)
    (talk,) = long_talks(1, prompt=9, most=30)
    scheduler.add(talk)
    for _ in range(4):
        loop.step()
    before = talk.registered
    assert before > 2
    scheduler.reset_prefix_cache()
    scheduler.check()
    loop.drain()
    stale = talk.tokens[: before * 4 + 1]
    again, longer = ask(stale, max_tokens=1), ask([*talk.tokens, 1], max_tokens=1)
    loop.serve(again)
    assert again.counts.cached == 0
    loop.serve(longer)
    assert longer.counts.cached == before * 4, "only what was computed after the reset"


def test_a_request_that_starts_over_after_a_reset_is_shared_again():
    scheduler = make(size=4, blocks=100)
    loop = Loop(scheduler, late=False)
    (talk,) = long_talks(1, prompt=9, most=30)
    scheduler.add(talk)
    for _ in range(4):
        loop.step()
    scheduler.reset_prefix_cache()
    scheduler._preempt(talk)
    loop.drain()
    request = ask([*talk.prompt, 1], max_tokens=1)
    loop.serve(request)
    assert request.counts.cached == 8


# Who gets no draft.


@pytest.mark.parametrize(
    ("params", "undrafted"),
    [
        ({"max_tokens": 1}, True),
        ({"max_tokens": 2}, True),
        ({"max_tokens": 3}, False),
        ({"max_tokens": 30, "speculate": False}, True),
        ({"max_tokens": 30, "num_speculative_tokens": 0}, True),
        ({"max_tokens": 30, "num_speculative_tokens": 1}, False),
    ],
)
def test_no_draft_where_it_is_useless_or_unwanted(params, undrafted):
    scheduler = make()
    request = ask([1, 2, 3], **params)
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.undrafted == (frozenset({request.slot}) if undrafted else frozenset())
    assert plan.next_tree == (0 if undrafted else 1)


def test_an_unfinished_chunk_is_not_called_undrafted():
    scheduler = make(tokens=4, trees=(chain(3),))
    scheduler.add(ask(list(range(9)), speculate=False))
    plan = scheduler.plan()
    assert plan is not None
    assert not plan.chunks[0].last
    assert plan.undrafted == frozenset()


# Proof that check() sees.


def test_results_out_of_order_or_of_strange_slots_are_assertions():
    scheduler = make()
    scheduler.add(ask([1, 2]))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(AssertionError, match="is the oldest"):
        scheduler.collect(by_slot(plan.step + 1))
    scheduler = make()
    scheduler.add(ask([1, 2]))
    plan = scheduler.plan()
    assert plan is not None
    mine, strange = SlotResult(plan.chunks[0].slot, (3,)), SlotResult(5, (3,))
    with pytest.raises(AssertionError, match=r"results for slots \[5\]"):
        scheduler.collect(by_slot(plan.step, mine, strange))
