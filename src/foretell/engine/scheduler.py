"""Scheduler: who runs in the next step, in which blocks, under which tree. Knows no tensors.

The host may plan step k before it has collected step k - 1. A request's true length is then unknown
within bounds (`Request.low`, `Request.high`) and every reservation is made for the upper one. On a
synchronous device the bounds meet and reservations are tight.

What makes late knowledge safe: all device work is on one stream, in the order of the plans. So a
block taken from a preempted request may be handed on at once (the old step runs before the new
owner's), and blocks can be registered as soon as the step that fills them is launched. A request
that ends or is aborted keeps its slot and blocks until the last step that names them is collected.

Invariants: running requests own a slot and blocks that cover every key index a launched step can
touch; waiting ones own nothing; a plan costs at most `max_num_batched_tokens` tokens; the
best-ranked request is never preempted, so something always makes progress.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

from foretell.engine.blocks import BlockManager, extend_chain
from foretell.engine.plan_builder import Entry, PlanBuilder
from foretell.engine.request import Request, Status
from foretell.metrics import StepReport
from foretell.runner.plan import Plan, SlotResult, StepResult
from foretell.spec.controller import Choice, Controller, Wish
from foretell.spec.tree import Tree

POLICIES = ("fcfs", "priority")
PROMPT_SHARE = 4  # while prompts wait, drafts leave one part in this many of the budget to them

NO_CHOICE = Choice(tree=-1, tokens=0.0, seconds=0.0)  # nobody expected anything


@dataclass(slots=True)
class _Launched:
    """A step that was planned and not collected."""

    step: int
    entries: list[Entry]
    tree: int
    rows: int  # that decode
    chunked: bool  # prompts were computed in it, or in the step that drafted for it
    uneven: bool  # the drafter caught up before it drafted for it
    rest: bool
    choice: Choice
    emitted: int = 0


class Scheduler:
    """First come, first served (or by priority): chunked prefill, prefix cache, preemption.

    Args:
        blocks: the block pool.
        max_num_seqs: slots, the most requests that run at once.
        max_num_batched_tokens: the most tokens one step computes: chunk rows + N per decoding row.
        max_model_len: the context limit; no request grows past it.
        trees: the trees a step may verify; one with a single node is plain decoding.
        scheduling: "fcfs" or "priority" (lower number first, ties by arrival).
        scratch: key indices past the committed length that the drafter writes while it drafts.
        drafter_kv: the drafter keeps KV of its own behind the block ids.
        drafted_length: longest text that is drafted for; None = `max_model_len`.
        learned_prompt: the drafter learns of texts that ended, with so many prompt tokens before them; None = no.
        controller: picks what is drafted; None = always the largest tree that fits.
        rests: the drafter need not run in plain steps of a controller, it catches up.

    Raises:
        ValueError: a limit is below 1, the policy is unknown, or no tree fits the token budget.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        trees: tuple[Tree, ...],
        scheduling: str = "fcfs",
        scratch: int = 0,
        drafter_kv: bool = True,
        drafted_length: int | None = None,
        learned_prompt: int | None = None,
        controller: Controller | None = None,
        rests: bool = False,
    ) -> None:
        _check_limits(max_num_seqs, max_num_batched_tokens, max_model_len, trees, scheduling)
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.trees = trees
        self.scheduling = scheduling
        self.scratch = scratch
        self.drafter_kv = drafter_kv
        self.drafted_length = max_model_len if drafted_length is None else drafted_length
        self.learned_prompt = learned_prompt
        self._past: list[tuple[int, ...]] = []  # texts that ended since the last plan
        self.waiting: list[Request] = []  # best rank first
        self.running: list[Request] = []  # best rank first
        self.preemptions = 0
        self._by_size = sorted(range(len(trees)), key=lambda i: -trees[i].nodes)
        self.wanted_tree = self._fit(self._by_size[0], 1, max_num_batched_tokens)
        self._drafted_tree = self.wanted_tree  # what the drafts on the device were made for
        self._requests: dict[str, Request] = {}
        self._leaving: list[Request] = []  # over, but named by a step in flight
        self._failed: list[Request] = []
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self.controller = controller
        self.rests = rests
        self._launched: deque[_Launched] = deque()
        self._collected: _Launched | None = None
        self._choice = self._verifying = (
            NO_CHOICE  # for the draft of the step, and for its verification
        )
        self._chunked = self._launched_rest = False  # of the last step
        self._found = True  # the drafter found something in the last step
        self._uneven = False  # the last step's drafting took more than drafting takes
        self._arrivals = 0
        self._step = 0

    @property
    def slack(self) -> int:
        """Key indices past `max_model_len` that a step may touch."""
        return max(self.scratch, *(tree.nodes for tree in self.trees), 0)

    @property
    def table_width(self) -> int:
        """M, the blocks a table must have room for."""
        return self.blocks.blocks_for(self.max_model_len + self.slack)

    @property
    def unfinished(self) -> bool:
        """Something runs, waits or is still to be collected."""
        return bool(self.running or self.waiting or self._launched)

    @property
    def in_flight(self) -> int:
        """Steps planned and not collected."""
        return len(self._launched)

    # The engine's calls.

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty, too long or too big for the pool; the id is in use.
        """
        length = request.prompt_length
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is already in use; give another one")
        if length == 0:
            raise ValueError("the prompt is empty; it must contain at least one token")
        if length >= self.max_model_len:
            raise ValueError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt has {length} tokens, which leaves no room for output; shorten it."
            )
        limit = self.max_model_len
        if request.params.max_tokens is not None:
            limit = min(limit, length + request.params.max_tokens)
        keys = length + 1 + self.slack
        if self.blocks.blocks_for(keys) > self.blocks.usable:
            raise ValueError(self._too_small(request, keys))
        request.limit = limit
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.id] = request
        insort(self.waiting, request, key=self._rank)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; what its steps in flight bring is dropped. None: it is unknown."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "abort")
        return request

    def plan(self) -> Plan | None:
        """The next step, to be launched at once. None: nothing can run before a collect."""
        build = self._open()
        self._plan_starved(build)
        self._plan_decode(build)
        self._plan_prefill(build)
        self._admit(build)
        if not build.entries:
            assert self._launched or not (self.running or self.waiting), (
                f"nothing runs: {len(self.running)} running, {len(self.waiting)} waiting, "
                f"{self.blocks.available} of {self.blocks.usable} blocks available"
            )
            return None
        return self._close(build)

    def collect(self, result: StepResult) -> list[tuple[Request, SlotResult]]:
        """Take in the results of the oldest launched step; those still wanted are returned."""
        launched = self._launched.popleft()
        self._collected, step, entries = launched, launched.step, launched.entries
        assert step == result.step, f"step {result.step} collected, but {step} is the oldest"
        by_slot = {slot.slot: slot for slot in result.slots}
        taken = []
        for entry in entries:
            request = entry.request
            request.in_flight.popleft()
            got = by_slot.pop(entry.slot, None)
            if request.status is Status.DONE:
                self._let_go(request)
            elif got is None:
                assert entry.most == 0, (
                    f"request {request.id} ran in step {step} and emitted nothing"
                )
            else:
                launched.emitted += len(got.tokens)
                self._learn(entry, got)
                taken.append((request, self._take(entry, got, launched.rest)))
        assert not by_slot, (
            f"step {step}: results for slots {sorted(by_slot)}, which it did not run"
        )
        return taken

    def nothing_drafted(self) -> None:
        """The last launched step left no draft on the device: the next one verifies the smallest tree."""
        self._found = False
        self._drafted_tree = self._by_size[-1]

    def timed(self, seconds: float, draft: float = 0.0) -> StepReport | None:
        """The step that was just collected took so long, its drafting (in the step before) included.

        Returns:
            What became of it; None for steps that did something beside decoding.
        """
        step, self._collected = self._collected, None
        if step is None or step.rows == 0 or step.chunked:
            return None
        tree = self.trees[step.tree]
        if self.controller is not None and seconds > 0:
            self.controller.timed(step.rows, step.tree, seconds, draft, steady=not step.uneven)
        return StepReport(
            rows=step.rows,
            depth=tree.depth,
            nodes=tree.nodes,
            emitted=step.emitted,
            seconds=seconds,
            expected_tokens=step.choice.tokens,
            expected_seconds=step.choice.seconds,
            trial=step.choice.trial,
        )

    def in_slots(self, slots: Collection[int]) -> list[Request]:
        """The running requests in these slots."""
        return [request for request in self.running if request.slot in slots]

    def stop_drafting(self, slots: Collection[int]) -> list[Request]:
        """The drafter failed for the requests in these slots: no more drafts for them; they are returned.

        What it wrote behind their blocks is not trusted, so nobody shares them from here on.
        """
        stopped = self.in_slots(slots)
        for request in stopped:
            request.drafts = request.shareable = False
            self.blocks.forget(request.blocks)
        return stopped

    def take_failed(self) -> list[Request]:
        """Requests that `plan` ended since the last call; `Request.error` says why."""
        failed, self._failed = self._failed, []
        return failed

    def reset_prefix_cache(self) -> None:
        """Forget all shared content, as after a change of the weights. Running requests go on."""
        self.blocks.reset_prefix_cache()
        for request in self.running:
            request.shareable = False

    def check(self) -> None:
        """Assert every invariant of the scheduler and its pool."""
        owners = [*self.running, *self._leaving]
        self.blocks.check([request.blocks for request in owners])
        slots = [request.slot for request in owners] + self._slots
        assert sorted(slots) == list(range(self.max_num_seqs)), f"slots lost or doubled: {slots}"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=self._rank), "a queue is out of order"
        for request in self.waiting:
            assert not request.blocks, f"waiting request {request.id} owns blocks"
            assert request.slot == -1, f"waiting request {request.id} owns slot {request.slot}"
        for request in self._leaving:
            assert request.in_flight, f"request {request.id} is over and was not let go"
        for request in self.running:
            assert request.status is Status.RUNNING, f"{request.id} runs but is {request.status}"
            assert len(request.blocks) <= self.table_width, f"table of {request.id} is too wide"
            held = len(request.blocks) * self.blocks.block_size
            assert held >= max(request.computed, request.high), f"table of {request.id} is short"

    # Parts of plan().

    def _open(self) -> PlanBuilder:
        decoding = sum(request.decodes for request in self.running)
        prompts = sum(request.prefilling for request in self.running)
        prompts += bool(self.waiting and self._slots)
        budget = self.max_num_batched_tokens
        tree = self._fit(self._drafted_tree, decoding, budget, made=True)
        room = budget - budget // PROMPT_SHARE if prompts else budget
        self._choose(room // max(decoding + prompts, 1))
        next_tree = self._fit(self.wanted_tree, decoding + prompts, room)
        tail = max(self.scratch, self.trees[next_tree].nodes)
        found = self._found
        return PlanBuilder(
            self._step + 1, budget, tree, next_tree, tail, self.drafted_length, found
        )

    def _choose(self, room: int) -> None:
        """Ask the controller which tree to draft, for those that will verify it."""
        if self.controller is None:
            return
        if self._verifying.tree not in (NO_CHOICE.tree, self.controller.plain):
            self.controller.found(self._found)
        coming = self.running or self.waiting[: len(self._slots)]
        wishes = [self._wish(request) for request in coming if request.low < request.limit]
        self._choice = self.controller.choose(wishes, room)
        self.wanted_tree = self._choice.tree

    def _wish(self, request: Request) -> Wish:
        params = request.params
        drafts = params.speculates and request.drafts and request.low < self.drafted_length
        return Wish(request.id, params.num_speculative_tokens if drafts else 0)

    def _plan_starved(self, build: PlanBuilder) -> None:
        """A prompt that got nothing in the last step goes first, with up to half the budget."""
        for request in self.running:
            if request.prefilling and request.served < self._step:
                self._chunk(request, build, max(1, build.budget // 2))
                return

    def _plan_decode(self, build: PlanBuilder) -> None:
        nodes = self.trees[build.tree].nodes
        # A starved prompt may have ended in this very step; it decodes from the next one on.
        candidates = [r for r in self.running if r.decodes and r.served != build.step]
        if len(candidates) * nodes > build.budget:  # take turns: who waited longest goes first
            candidates.sort(key=lambda request: (request.served, self._rank(request)))
        for request in candidates:
            if build.budget < nodes:
                break
            if request.status is Status.RUNNING:  # a better-ranked one may have preempted it
                self._decode(request, build)

    def _plan_prefill(self, build: PlanBuilder) -> None:
        for request in tuple(self.running):
            if request.prefilling and request.served != build.step and build.budget > 0:
                self._chunk(request, build, build.budget)

    def _admit(self, build: PlanBuilder) -> None:
        while self.waiting and self._slots and build.budget > 0:
            request = self.waiting[0]
            if request.in_flight:  # preempted: its last tokens are still to come
                return
            # Prompt log-probabilities need every prompt row computed.
            read = request.params.prompt_logprobs is None
            hit = self.blocks.match(request.tokens, request.chain) if read else []
            if read and self._is_promised(request, len(hit), build):
                return
            keys = min(len(request.tokens) + 1, request.limit) + build.tail
            fresh = self.blocks.blocks_for(keys) - len(hit)
            if fresh + len(hit) > self.blocks.usable:
                self._fail(request, keys)
                continue
            # One block to grow for each running request, or the newcomer is soon preempted again.
            room = self.blocks.available - self.blocks.idle_among(hit) - len(self.running)
            if fresh > room:
                return
            self._start(request, build, hit, fresh)
            self._chunk(request, build, build.budget)

    def _is_promised(self, request: Request, hit: int, build: PlanBuilder) -> bool:
        """This step fills the block after the hit: a step later it need not be computed again."""
        shared = (len(request.tokens) - 1) // self.blocks.block_size
        return hit < shared and bool(build.promised) and request.chain[hit] in build.promised

    def _start(self, request: Request, build: PlanBuilder, hit: list[int], fresh: int) -> None:
        self.waiting.remove(request)
        self.blocks.hold(hit)
        request.blocks = [*hit, *self.blocks.alloc(fresh)]
        request.status = Status.RUNNING
        request.slot = self._slots.pop()
        request.computed = request.ingested = len(hit) * self.blocks.block_size
        request.target = len(request.tokens)
        request.registered = len(hit)
        request.shareable = True
        if request.counts.preemptions == 0:
            request.counts.cached = request.computed
            self.blocks.count(request.target, request.computed)
        insort(self.running, request, key=self._rank)
        build.admit(request)

    def _decode(self, request: Request, build: PlanBuilder) -> None:
        tree = self.trees[build.tree]
        longest = min(request.high, request.limit - 1)  # a request at its limit is over
        committed = min(longest + tree.depth + 1, request.limit)
        keys = max(longest - 1 + tree.nodes, committed + build.tail)
        if not self._reserve(request, keys, build):
            return
        self._assert_writable(request, request.low - 1, keys)
        build.decode(request, tree)

    def _chunk(self, request: Request, build: PlanBuilder, most: int) -> None:
        start = request.computed
        count = min(request.target - start, most)
        if start + count == request.target:
            keys = min(request.target + 1, request.limit) + build.tail
            if not self._reserve(request, keys, build):
                return
        self._assert_writable(request, start, start + count)
        build.chunk(request, count)
        if request.shareable and self.blocks.prefix_cache:
            size = self.blocks.block_size
            extend_chain(request.chain, request.tokens, size)
            build.promised.update(request.chain[start // size : request.computed // size])

    def _close(self, build: PlanBuilder) -> Plan:
        self._step = build.step
        if build.drafts_nothing:
            build.next_tree = self._by_size[-1]
        plain = build.next_tree == self._by_size[-1]
        build.rest = self.controller is not None and self.rests and plain
        rested = bool(self._launched_rest)
        choice = self._verifying if self._verifying.tree == build.tree else NO_CHOICE
        self._launched.append(
            _Launched(
                step=build.step,
                entries=build.entries,
                tree=build.tree,
                rows=len(build.decoding),
                chunked=bool(build.chunks) or self._chunked,
                uneven=self._uneven,
                rest=build.rest,
                choice=choice,
            )
        )
        self._chunked = bool(build.chunks)
        self._uneven = rested and not build.rest and self.drafter_kv
        self._launched_rest = build.rest
        self._verifying = self._choice if self._choice.tree == build.next_tree else NO_CHOICE
        self._found = True
        for entry in build.entries:
            request = entry.request
            if entry.most:
                request.draft_tree = build.next_tree if entry.drafted else -1
            self._register(request, request.computed)
        self._drafted_tree = build.next_tree
        build.past, self._past = self._past, []
        return build.close()

    # Blocks.

    def _reserve(self, request: Request, keys: int, build: PlanBuilder) -> bool:
        """Own blocks for `keys` key indices; may preempt. False: not in this step."""
        need = self.blocks.blocks_for(keys) - len(request.blocks)
        if need + len(request.blocks) > self.blocks.usable:
            if not request.in_flight:  # else the bound is loose; it may fit once it is known
                self._fail(request, keys)
            return False
        while self.blocks.available < need:
            victim = self._victim(request, build)
            if self._leaving or victim is None:  # blocks come back with the steps in flight
                return False
            self._preempt(victim)
        if need > 0:
            build.grow(request, self.blocks.alloc(need))
        build.keys = max(build.keys, keys)
        return True

    def _victim(self, request: Request, build: PlanBuilder) -> Request | None:
        """The worst-ranked running request behind `request` that is not in the step yet."""
        for other in reversed(self.running):
            if other is request:
                return None
            if other.served != build.step:
                return other
        return None

    def _preempt(self, request: Request) -> None:
        """Back to the queue; all it has committed becomes the tokens to compute."""
        self.running.remove(request)
        self._free(request)
        request.status = Status.WAITING
        request.computed = request.target = request.registered = request.ingested = 0
        request.counts.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=self._rank)

    def _register(self, request: Request, valid: int) -> None:
        """Offer the full blocks below `valid` computed and committed tokens to the prefix cache.

        While a drafter with KV rests, its half of the blocks is empty.
        """
        if not (request.shareable and self.blocks.prefix_cache):
            return
        if self.drafter_kv:
            valid = min(valid, request.ingested)
        full = valid // self.blocks.block_size
        if full <= request.registered:
            return
        extend_chain(request.chain, request.tokens, self.blocks.block_size)
        for i in range(request.registered, full):
            self.blocks.register(request.blocks[i], request.chain[i])
        request.registered = full

    def _assert_writable(self, request: Request, start: int, stop: int) -> None:
        size = self.blocks.block_size
        self.blocks.assert_writable(request.blocks[start // size : self.blocks.blocks_for(stop)])

    # Parts of collect() and abort().

    def _learn(self, entry: Entry, got: SlotResult) -> None:
        """Tell the controller what became of a draft."""
        if self.controller is None or entry.verified < 0 or not got.tokens:
            return
        tree, most = self.trees[entry.verified], entry.request.params.num_speculative_tokens
        deepest = tree.depth if most is None else min(tree.depth, most)
        accepted, cut = min(got.accepted, deepest), got.finish is not None
        self.controller.verified(entry.request.id, entry.verified, accepted, cut, most)

    def _take(self, entry: Entry, got: SlotResult, rest: bool) -> SlotResult:
        request = entry.request
        request.tokens.extend(got.tokens)
        length = len(request.tokens)
        assert len(got.tokens) <= entry.most, f"{len(got.tokens)} tokens, at most {entry.most}"
        assert length <= request.limit, f"{request.id}: length {length}, limit {request.limit}"
        request.counts.add(got.drafted, got.accepted)
        got = _new_prompt_rows(entry, got)
        if got.finish is not None:
            # Not registered: a request that is over does not hand its last tokens to the drafter.
            request.stop_token = got.stop_token
            if got.finish == "error":
                self.blocks.forget(request.blocks)  # NaN may sit in what it computed
                request.error = (
                    "no token could be chosen: the model returned NaN or infinite logits, or the "
                    "parameters of the request forbid every token"
                )
                if request.params.structured_outputs is not None:
                    request.error += ", or no token was left that structured_outputs allows"
            self._end(request, got.finish)
            return got
        assert length < request.limit, f"{request.id} is at its limit {request.limit} but goes on"
        if request.status is Status.RUNNING and entry.most:
            if self.drafter_kv and not entry.drafted:
                request.shareable = False  # from here on the drafter's half of the blocks is empty
            request.computed = length - 1
            if not rest:
                request.ingested = request.computed
            self._register(request, request.computed)
        return got

    def _end(self, request: Request, finish: str) -> None:
        queue = self.waiting if request.status is Status.WAITING else self.running
        queue.remove(request)
        request.status = Status.DONE
        request.finish = finish
        del self._requests[request.id]
        if self.controller is not None:
            self.controller.ended(request.id)
        if self.learned_prompt is not None and finish != "error" and request.output:
            start = max(0, request.prompt_length - self.learned_prompt)
            self._past.append(tuple(request.tokens[start:]))
        if request.slot >= 0:
            self._leaving.append(request)
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if request in self._leaving and not request.in_flight:
            self._leaving.remove(request)
            self._free(request)

    def _free(self, request: Request) -> None:
        self.blocks.release(request.blocks)
        request.blocks = []
        self._slots.append(request.slot)
        request.slot = -1

    def _fail(self, request: Request, keys: int) -> None:
        request.error = self._too_small(request, keys)
        self._end(request, "error")
        self._failed.append(request)

    def _too_small(self, request: Request, keys: int) -> str:
        blocks = self.blocks
        return (
            f"request {request.id!r} needs {blocks.blocks_for(keys)} KV blocks for {keys} tokens "
            f"({len(request.tokens)} committed, the rest for drafts), but the cache has "
            f"{blocks.usable} blocks of {blocks.block_size} tokens; shorten the prompt, lower "
            "max_tokens or give the KV cache more memory"
        )

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.scheduling == "priority" else 0, request.arrival)

    def _fit(self, most: int, rows: int, room: int, made: bool = False) -> int:
        """The largest tree, at most tree `most`, that lets `rows` rows fit `room` tokens.

        The smallest one where none does; then the rows take turns.

        Args:
            made: the draft exists, so it can be cut only to a tree that it begins with.
        """
        largest = self.trees[most]
        smaller = [i for i in self._by_size if self.trees[i].nodes < largest.nodes]
        if made:
            smaller = [i for i in smaller if self.trees[i].begins(largest)]
        for i in (most, *smaller):
            if rows * self.trees[i].nodes <= room:
                return i
        return self._by_size[-1]


def _new_prompt_rows(entry: Entry, got: SlotResult) -> SlotResult:
    """Only rows that speak of prompt tokens and were not delivered before a preemption."""
    rows, request = got.prompt_logprobs, entry.request
    if rows is None:
        return got
    stop = min(entry.start + len(rows), request.prompt_length - 1)
    fresh = rows[max(0, request.prompt_rows - entry.start) : max(0, stop - entry.start)]
    request.prompt_rows = max(request.prompt_rows, stop)
    return replace(got, prompt_logprobs=fresh or None)


def _check_limits(
    seqs: int, tokens: int, length: int, trees: tuple[Tree, ...], scheduling: str
) -> None:
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_model_len": length}
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if scheduling not in POLICIES:
        raise ValueError(f"scheduling must be one of {', '.join(POLICIES)}, got {scheduling!r}")
    if not trees:
        raise ValueError("trees must hold at least one tree; Tree((-1,)) is plain decoding")
    smallest = min(tree.nodes for tree in trees)
    if smallest > tokens:
        raise ValueError(
            f"max_num_batched_tokens={tokens} is less than the {smallest} nodes of the smallest "
            "tree; raise it or give a smaller tree"
        )
