"""Engine: the loop. plan(k), launch(k), collect what is ready, draft(k).

The host runs a step behind the device where the device is asynchronous (collect(k - 1) happens while k runs) and not at
all behind where it is not: the same four lines, since a ready ticket is collected at once. Not a place for decisions:
who runs is the scheduler's, what happens is the runner's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foretell.engine.request import Request
from foretell.engine.scheduler import Scheduler
from foretell.engine.stopwatch import Stopwatch
from foretell.metrics import State, StepReport
from foretell.runner.outbox import Ticket
from foretell.runner.plan import DraftTree, LogprobRow, Plan, SlotResult
from foretell.runner.runner import Runner
from foretell.sampling_params import SamplingParams
from foretell.spec.compat import CompatReport
from foretell.spec.grammar import Grammars
from foretell.spec.resolved import Resolved

log = logging.getLogger("foretell")


class Watcher(Protocol):
    """Told what happened, for metrics."""

    def added(self, request: Request) -> None:
        """A request was queued."""
        ...

    def admitted(self, request: Request) -> None:
        """A request left the queue; after a preemption, once more."""
        ...

    def fell_back(self, request: Request) -> None:
        """The drafter failed for a request; it goes on without drafts."""
        ...

    def emitted(self, request: Request, result: SlotResult) -> None:
        """A step brought something for a request; `request.finish` says whether it is over."""
        ...

    def stepped(self, report: StepReport) -> None:
        """A step that only decoded is over."""
        ...


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one request since the last call of `step`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobRow, ...] | None = None  # one per token
    prompt_logprobs: tuple[LogprobRow, ...] | None = None  # per prompt token from the second on
    finish_reason: str | None = None  # "stop", "length", "error" or None
    stop_reason: int | None = None  # the stop token id, where it is not the model's own end token
    num_cached_tokens: int = 0
    error: str | None = None
    drafted: int = 0
    accepted: int = 0
    tree: DraftTree | None = None  # what was verified, for requests that report their drafts


class Engine:
    """Runs requests to their end.

    Args:
        runner, scheduler: the device's side and the host's.
        eos_token_ids: the model's own end tokens.
        vocab_size: width of the target's logits.
        max_stop_ids: how many stop ids a request may have, the model's own included.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        max_stop_ids: int,
        watcher: Watcher | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size
        self.watcher = watcher
        self.tolerant = False  # a drafter that fails ends the drafts of a request, not the engine
        self.resolved = Resolved()  # what drafts
        self.compat: CompatReport | None = (
            None  # how drafter and target were proved to belong together
        )
        self._max_stop_ids = max_stop_ids
        self._pending: deque[Ticket] = deque()
        self._owed: tuple[Plan, frozenset[int]] | None = (
            None  # drafting left to do, and for whom not
        )
        self._stopwatch = Stopwatch()
        self._failure: BaseException | None = None  # what ended a step half-way

    @property
    def max_model_len(self) -> int:
        """The context limit, prompt and output together."""
        return self.scheduler.max_model_len

    @property
    def num_blocks(self) -> int:
        """KV blocks that requests can own."""
        return self.scheduler.blocks.usable

    @property
    def drafts(self) -> bool:
        """There is a drafter."""
        return any(tree.nodes > 1 for tree in self.scheduler.trees)

    @property
    def grammars(self) -> Grammars | None:
        """Compiles structured outputs; None without a tokenizer."""
        return self.runner.grammars

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        priority: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """Queue a request.

        Args:
            seed: the noise key; with the prompt and the parameters it determines the text.
            priority: lower runs earlier, under priority scheduling.
            bad_words: token sequences that must not appear in the output.

        Raises:
            ValueError: a token id is outside the vocabulary, the prompt is empty or over the limit, the id is in use,
                or a parameter does not fit the model. Nothing is queued then.
        """
        wrong = next((t for t in prompt_token_ids if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"prompt_token_ids: token id {wrong} is out of range; the model's vocabulary has {self.vocab_size} ids"
            )
        params.check_vocabulary(self.vocab_size)
        if params.structured_outputs is not None:
            if self.grammars is None:
                raise ValueError("structured_outputs needs a tokenizer, and this engine has none")
            self.grammars.compile(params.structured_outputs)
        request = Request(
            id=request_id,
            prompt=tuple(prompt_token_ids),
            params=params,
            seed=seed,
            priority=priority,
            stop_ids=self._stop_ids(params),
            bad_words=tuple(tuple(word) for word in bad_words),
        )
        _check_leaves_a_token(request)
        self.scheduler.add(request)
        if self.watcher is not None:
            self.watcher.added(request)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self.eos_token_ids
        ids = tuple(dict.fromkeys((*own, *(params.stop_token_ids or ()))))
        if len(ids) > self._max_stop_ids:
            raise ValueError(
                f"stop_token_ids: {len(ids)} stop ids with the model's own, at most {self._max_stop_ids} are "
                "supported; use stop strings for the rest"
            )
        return ids

    def abort(self, request_id: str) -> None:
        """End a request; nothing more is heard of it. Unknown or finished ids are no error."""
        self.scheduler.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget the KV of all finished text."""
        self.scheduler.reset_prefix_cache()

    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is in flight."""
        return self.scheduler.unfinished

    def state(self) -> State:
        """What it holds right now."""
        queues = self.scheduler
        return State(len(queues.running), len(queues.waiting), queues.blocks.usage)

    def step(self) -> list[Delta]:
        """Advance every running request by one step and return what is new.

        Raises:
            RuntimeError: an earlier step failed, so host and device no longer agree on what was computed.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"the engine stopped because a step failed ({self._failure!r}); make a new one"
            ) from self._failure
        try:
            return self._step()
        except BaseException as error:
            self._failure = error
            raise

    def _step(self) -> list[Delta]:
        self.draft_owed()
        self._stopwatch.begin()
        plan = self.scheduler.plan()
        deltas = [self._failed(request) for request in self.scheduler.take_failed()]
        if plan is not None and plan.new and self.watcher is not None:
            for request in self.scheduler.in_slots({new.slot for new in plan.new}):
                self.watcher.admitted(request)
        ended: set[int] = set()
        if plan is not None:
            self._pending.append(self.runner.launch(plan))
        while self._pending and (
            plan is None or len(self._pending) > 1 or self._pending[0].ready()
        ):
            deltas += self._collect(self._pending.popleft(), ended)
            self._time(at_once=plan is not None and not self._pending)
        if plan is not None:
            # Known to be over: only where this very plan was collected, since `ended` speaks of the last ticket opened.
            self._owed = (plan, frozenset() if self._pending else frozenset(ended))
            if (
                self._pending
            ):  # the device is at work and must not wait for what the caller does with the news
                self.draft_owed()
        return deltas

    def draft_owed(self) -> None:
        """Draft for the step that was launched last, if that was not done; `step` begins with it.

        Where the host waits for the device, this comes in the call after it: the step's tokens are on their way first.
        """
        owed, self._owed = self._owed, None
        if owed is None:
            return
        plan, over = owed
        running = {request.slot for request in self.scheduler.running}
        gone = {slot for slot in plan.emitting if slot not in running}
        with self._stopwatch.drafting():
            drafted = self._draft(plan, over | gone)
        if drafted is False:
            self.scheduler.nothing_drafted()

    def _time(self, at_once: bool) -> None:
        """Say how long the step took that was just collected."""
        lap = self._stopwatch.lap(at_once, behind=bool(self._pending))
        report = None if lap is None else self.scheduler.timed(lap.seconds, lap.draft)
        if report is not None and self.watcher is not None:
            self.watcher.stepped(report)

    def _draft(self, plan: Plan, over: frozenset[int]) -> bool | None:
        try:
            return self.runner.draft(plan, over)
        except Exception:
            if not self.tolerant:
                raise
            log.exception("the drafter failed; looking for the requests it fails for")
            return self._draft_one_by_one(plan, over)

    def _draft_one_by_one(self, plan: Plan, over: frozenset[int]) -> bool | None:
        """Draft for each slot alone: those that the drafter fails for go on without drafts from here on."""
        slots = set(plan.emitting) - over
        answers, failed = set[bool | None](), set[int]()
        for slot in sorted(slots - plan.undrafted):
            try:
                answers.add(self.runner.draft(plan, over | (slots - {slot})))
            except Exception as error:
                log.warning("no more drafts for the request in slot %d: %r", slot, error)
                failed.add(slot)
        self.runner.drop_drafts(failed)
        for request in self.scheduler.stop_drafting(failed):
            if self.watcher is not None:
                self.watcher.fell_back(request)
        return None if None in answers else True in answers

    def _collect(self, ticket: Ticket, ended: set[int]) -> list[Delta]:
        deltas = []
        ended.clear()
        result = ticket.result()
        ended.update(slot.slot for slot in result.slots if slot.finish is not None)
        for request, slot in self.scheduler.collect(result):
            if self.watcher is not None:
                self.watcher.emitted(request, slot)
            if slot.finish == "error":
                self.runner.note_error()
            deltas.append(self._delta(request, slot))
        return deltas

    def _delta(self, request: Request, slot: SlotResult) -> Delta:
        stopped_by = slot.stop_token if slot.stop_token not in self.eos_token_ids else None
        return Delta(
            request_id=request.id,
            token_ids=slot.tokens,
            logprobs=slot.logprobs,
            prompt_logprobs=slot.prompt_logprobs,
            finish_reason=slot.finish,
            stop_reason=stopped_by,
            num_cached_tokens=request.counts.cached,
            error=request.error,
            drafted=slot.drafted,
            accepted=slot.accepted,
            tree=slot.tree if request.params.report_drafts else None,
        )

    def _failed(self, request: Request) -> Delta:
        return Delta(request_id=request.id, finish_reason="error", error=request.error)


def _check_leaves_a_token(request: Request) -> None:
    """Refuse parameters that forbid every allowed token from the start."""
    params = request.params
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids) - {word[0] for word in request.bad_words if len(word) == 1}
    if params.min_tokens:
        left -= set(request.stop_ids)
    if not left:
        raise ValueError(
            f"allowed_token_ids={list(params.allowed_token_ids)[:8]}: bad_words and min_tokens={params.min_tokens} "
            "(no end token so early) leave none of them; allow another token"
        )
