"""Metrics: what the engine counted, and the recorder that counts. Knows no tensors.

The words are vLLM's. A draft is one verification of one request with at least one drafted token. Everything is counted
after stopping was handled: a token behind an end token or a limit was never emitted, so it is neither generated nor
accepted. Tokens behind a stop *string* were emitted by the engine and are trimmed by whoever makes text of them.

Invariant: no counter ever falls, and the accepted tokens of a step are at most its emitted and its drafted tokens.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Literal, Protocol

from foretell.sampling_params import SamplingParams

log = logging.getLogger("foretell")

MANY_DRAFTS = 100  # after so many without one accepted token, something is wrong
NOTHING_ACCEPTED = (
    "the first %d drafts had not one token accepted: speculation costs time and gains nothing. The usual causes are a "
    "drafter of another target, wrong target layers, a wrong rope base, or another prompt template than it was trained "
    "on; LLM.compat says what the start found"
)

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Timing:
    """How often something was timed and how long it took in all, in seconds."""

    count: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Seconds per event; 0 before the first."""
        return self.seconds / self.count if self.count else 0.0

    def plus(self, seconds: float) -> Timing:
        """With one more event."""
        return Timing(self.count + 1, self.seconds + seconds)

    def since(self, earlier: Timing) -> Timing:
        """What was added after `earlier`."""
        return Timing(self.count - earlier.count, self.seconds - earlier.seconds)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How a quantity was spread: `counts[i]` values were at most `bounds[i]` and above the bound before.

    Args:
        counts: one more than `bounds`; the last counts what is above all.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Of the values; 0 without any."""
        return self.total / self.count if self.count else 0.0

    def since(self, earlier: Histogram) -> Histogram:
        """What was added after `earlier`."""
        counts = tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.total - earlier.total)


def _empty(*bounds: float) -> Histogram:
    return Histogram(bounds, (0,) * (len(bounds) + 1))


_LONG = (10.0, 20.0, 40.0, 80.0)
_FIRST = _empty(
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(*_LONG, 160.0, 640.0, 2560.0),
)
_NEXT = _empty(
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, *_LONG)
)
_WHOLE = _empty(
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTHS = _empty(*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)))
_FEW = _empty(1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class Histograms:
    """Spreads over requests (seconds or tokens); `inter_token_latency` is over outputs, the first one left out.

    Args:
        queue_time: from arrival to the first admission.
        prefill_time, decode_time: from there to the first token, and from there to the end.
        inference_time: from the first admission to the end.
        time_per_output_token: decode_time over the tokens after the first.
    """

    time_to_first_token: Histogram = _FIRST
    inter_token_latency: Histogram = _NEXT
    time_per_output_token: Histogram = _NEXT
    e2e_latency: Histogram = _WHOLE
    queue_time: Histogram = _WHOLE
    prefill_time: Histogram = _WHOLE
    decode_time: Histogram = _WHOLE
    inference_time: Histogram = _WHOLE
    prompt_tokens: Histogram = _LENGTHS
    generation_tokens: Histogram = _LENGTHS
    max_tokens: Histogram = _LENGTHS
    n: Histogram = _FEW

    def since(self, earlier: Histograms) -> Histograms:
        """What was added after `earlier`."""
        pairs = {
            f.name: (getattr(self, f.name), getattr(earlier, f.name)) for f in fields(Histograms)
        }
        return Histograms(**{name: now.since(before) for name, (now, before) in pairs.items()})


@dataclass(frozen=True, slots=True)
class State:
    """What the engine holds right now; no counter.

    Args:
        kv_cache_usage: share of the KV blocks that requests own, between 0 and 1.
    """

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Requests by the reason they ended for."""

    stop: int = 0
    length: int = 0
    abort: int = 0
    error: int = 0

    @property
    def total(self) -> int:
        """All requests that ended."""
        return self.stop + self.length + self.abort + self.error

    def since(self, earlier: Finished) -> Finished:
        """What was added after `earlier`."""
        return Finished(
            *(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Finished))
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What became of one decode step, and what the controller had expected (0 where it expected nothing).

    Args:
        rows: requests that decoded.
        depth, nodes: of the tree that was verified.
        emitted: tokens of all rows.
        trial: the tree was not thought the best, but worth knowing.
    """

    rows: int
    depth: int
    nodes: int
    emitted: int
    seconds: float = 0.0
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    trial: bool = False


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps that did nothing else, as far as they were timed.

    Args:
        by_depth: how many verified a tree of depth 0 (plain), 1, 2, ...
        emitted, seconds: tokens and time of all.
        foreseen, expected_tokens, expected_seconds, foreseen_tokens, foreseen_seconds: of the steps that the controller
            had expectations of: how many, what it expected, and what came.
        trials: steps that tried a tree which was not thought the best.
        switches: changes of the tree that was verified.
    """

    by_depth: tuple[int, ...] = ()
    emitted: int = 0
    seconds: float = 0.0
    foreseen: int = 0
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    foreseen_tokens: int = 0
    foreseen_seconds: float = 0.0
    trials: int = 0
    switches: int = 0

    def plus(self, report: StepReport, switched: bool) -> Steps:
        """With one more step."""
        depths = [*self.by_depth, *[0] * (report.depth + 1 - len(self.by_depth))]
        depths[report.depth] += 1
        foreseen = report.expected_seconds > 0
        return Steps(
            by_depth=tuple(depths),
            emitted=self.emitted + report.emitted,
            seconds=self.seconds + report.seconds,
            foreseen=self.foreseen + foreseen,
            expected_tokens=self.expected_tokens + foreseen * report.expected_tokens,
            expected_seconds=self.expected_seconds + foreseen * report.expected_seconds,
            foreseen_tokens=self.foreseen_tokens + foreseen * report.emitted,
            foreseen_seconds=self.foreseen_seconds + foreseen * report.seconds,
            trials=self.trials + report.trial,
            switches=self.switches + switched,
        )

    def since(self, earlier: Steps) -> Steps:
        """What was added after `earlier`."""
        pairs = {f.name: (getattr(self, f.name), getattr(earlier, f.name)) for f in fields(Steps)}
        return Steps(**{name: _difference(now, before) for name, (now, before) in pairs.items()})


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot of the counters; all count from the start of the engine.

    Args:
        num_drafts: verifications with at least one drafted token.
        num_draft_tokens: drafted tokens verified (every node of a tree but its root).
        num_accepted_tokens: drafted tokens that were emitted.
        num_accepted_tokens_per_pos: drafts that had their first, second, ... token accepted (by depth in a tree).
        num_verified_tokens: tokens emitted by drafts, the target's own token included.
        generation_tokens: tokens emitted by the engine, drafted or not.
        prompt_tokens, cached_prompt_tokens: tokens of admitted prompts, and how many of them the prefix cache held.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up in the prefix cache, and found.
        corrupted_requests: requests that ended because their logits were not numbers.
        drafter_fallbacks: requests that went on without drafts because the drafter failed for them.
        time_to_first_token, latency: from arrival to the first token, and to the end, of requests.
        histograms: the same and more, as spreads.
        steps: decode steps, what the controller chose and expected, and what came.
        state: of the engine at the time of the snapshot.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_verified_tokens: int = 0
    generation_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    corrupted_requests: int = 0
    finished: Finished = field(default_factory=Finished)
    time_to_first_token: Timing = field(default_factory=Timing)
    latency: Timing = field(default_factory=Timing)
    drafter_fallbacks: int = 0
    histograms: Histograms = field(default_factory=Histograms)
    steps: Steps = field(default_factory=Steps)
    state: State = field(default_factory=State)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens emitted per draft, the target's own token included; 1.0 when nothing was drafted.

        Equals vLLM's 1 + accepted / drafts, except that a draft cut short by an end or a limit counts what it emitted.
        """
        return self.num_verified_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens per drafted token, in [0, 1]; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """Share of drafts whose first, second, ... token was accepted."""
        return tuple(count / self.num_drafts for count in self.num_accepted_tokens_per_pos)

    def since(self, earlier: Metrics) -> Metrics:
        """What was counted after the snapshot `earlier` of the same engine."""
        pairs = {f.name: (getattr(self, f.name), getattr(earlier, f.name)) for f in fields(Metrics)}
        return Metrics(**{name: _difference(now, before) for name, (now, before) in pairs.items()})


def _difference(now: Any, before: Any) -> Any:
    if isinstance(now, tuple):
        return tuple(a - b for a, b in zip_longest(now, before, fillvalue=0))
    if isinstance(now, State):
        return now
    counted = isinstance(now, Timing | Finished | Histograms | Steps)
    return now.since(before) if counted else now - before


class Counts(Protocol):
    """What we read of the engine's own counts of a request."""

    @property
    def cached(self) -> int: ...
    @property
    def preemptions(self) -> int: ...


class Request(Protocol):
    """What we read of an engine's request."""

    @property
    def id(self) -> str: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def counts(self) -> Counts: ...


class Result(Protocol):
    """What we read of the result of one step for one request."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def finish(self) -> str | None: ...
    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...


@dataclass(slots=True)
class _Live:
    """What is known of a request that has not ended."""

    arrival: float
    params: SamplingParams
    started: float | None = None  # first admission
    first: float | None = None  # first token
    last: float = 0.0  # last output
    generated: int = 0
    prompt: int = 0
    admitted: bool = False
    preemptions: int = 0


class _Spreads:
    """Histograms that grow."""

    def __init__(self) -> None:
        empty = Histograms()
        self._bounds = {f.name: getattr(empty, f.name).bounds for f in fields(Histograms)}
        self._counts = {name: [0] * (len(b) + 1) for name, b in self._bounds.items()}
        self._totals = dict.fromkeys(self._bounds, 0.0)

    def add(self, name: str, value: float) -> None:
        self._counts[name][bisect_left(self._bounds[name], value)] += 1
        self._totals[name] += value

    def snapshot(self) -> Histograms:
        return Histograms(
            **{
                name: Histogram(bounds, tuple(self._counts[name]), self._totals[name])
                for name, bounds in self._bounds.items()
            }
        )


class Recorder:
    """The counters while they run; one thread at a time.

    The engine calls `added` and `emitted` as its Watcher. Whoever takes the engine's deltas calls `ended` once per
    request, since only there is it known whether a stop string, the caller or the engine ended it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._drafts = self._drafted = self._accepted = self._verified = 0
        self._accepted_per_pos: list[int] = []
        self._generated = self._prompt = self._cached = 0
        self._queries = self._hits = 0
        self._preemptions = self._corrupted = 0
        self._finished = Finished()
        self._first_token = self._latency = Timing()
        self._fallbacks = 0
        self._steps, self._depth = Steps(), -1
        self._spreads = _Spreads()

    def snapshot(self) -> Metrics:
        """The counters as they stand."""
        return Metrics(
            num_drafts=self._drafts,
            num_draft_tokens=self._drafted,
            num_accepted_tokens=self._accepted,
            num_accepted_tokens_per_pos=tuple(self._accepted_per_pos),
            num_verified_tokens=self._verified,
            generation_tokens=self._generated,
            prompt_tokens=self._prompt,
            cached_prompt_tokens=self._cached,
            preemptions=self._preemptions,
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
            corrupted_requests=self._corrupted,
            finished=self._finished,
            time_to_first_token=self._first_token,
            latency=self._latency,
            drafter_fallbacks=self._fallbacks,
            histograms=self._spreads.snapshot(),
            steps=self._steps,
        )

    def added(self, request: Request) -> None:
        """A request was queued."""
        self._live[request.id] = _Live(self._clock(), request.params, prompt=request.prompt_length)

    def admitted(self, request: Request) -> None:
        """A request left the queue."""
        live = self._live.get(request.id)
        if live is not None and live.started is None:
            live.started = self._clock()
            self._spreads.add("queue_time", live.started - live.arrival)

    def fell_back(self, request: Request) -> None:
        """The drafter failed for a request; it goes on without drafts."""
        self._fallbacks += 1

    def stepped(self, report: StepReport) -> None:
        """A decode step is over."""
        switched = self._depth not in (-1, report.depth)
        self._steps, self._depth = self._steps.plus(report, switched), report.depth

    def emitted(self, request: Request, result: Result) -> None:
        """A step brought something for a request; nothing counts after its end was reported."""
        live = self._live.get(request.id)
        if live is None:
            return
        if not live.admitted:
            live.admitted = True
            self._admit(request)
        if result.tokens:
            self._heard(live, len(result.tokens))
        self._preemptions += request.counts.preemptions - live.preemptions
        live.preemptions = request.counts.preemptions
        self._generated += len(result.tokens)
        self._corrupted += result.finish == "error"
        self._verify(len(result.tokens), result.drafted, result.accepted)

    def ended(self, request_id: str, reason: FinishReason) -> None:
        """A request is over. Unknown ids are no error."""
        live = self._live.pop(request_id, None)
        if live is not None:
            before = self._finished
            self._finished = replace(before, **{reason: getattr(before, reason) + 1})
            self._latency = self._latency.plus(self._clock() - live.arrival)
            self._over(live)

    def _heard(self, live: _Live, tokens: int) -> None:
        now = self._clock()
        if live.first is None:
            live.first = now
            self._first_token = self._first_token.plus(now - live.arrival)
            self._spreads.add("time_to_first_token", now - live.arrival)
        else:
            self._spreads.add("inter_token_latency", now - live.last)
        live.last = now
        live.generated += tokens

    def _over(self, live: _Live) -> None:
        """Spreads of a request that has ended; one that never ran has no times but its length and latency."""
        now, add = self._clock(), self._spreads.add
        add("e2e_latency", now - live.arrival)
        add("prompt_tokens", live.prompt)
        add("generation_tokens", live.generated)
        add("n", live.params.n)
        if live.params.max_tokens is not None:
            add("max_tokens", live.params.max_tokens)
        if live.started is None:
            return
        add("inference_time", now - live.started)
        if live.first is not None:
            add("prefill_time", live.first - live.started)
            add("decode_time", live.last - live.first)
            if live.generated > 1:
                add("time_per_output_token", (live.last - live.first) / (live.generated - 1))

    def _admit(self, request: Request) -> None:
        length, cached = request.prompt_length, request.counts.cached
        self._prompt += length
        self._cached += cached
        if (
            request.params.prompt_logprobs is None
        ):  # else every row is computed and nothing is looked up
            self._queries += length
            self._hits += cached

    def _verify(self, emitted: int, drafted: int, accepted: int) -> None:
        if not drafted or not emitted:  # a row without a result verified nothing for anybody
            return
        assert 0 <= accepted <= min(emitted, drafted), (emitted, drafted, accepted)
        self._drafts += 1
        self._drafted += drafted
        self._accepted += accepted
        self._verified += emitted
        self._accepted_per_pos.extend([0] * (accepted - len(self._accepted_per_pos)))
        for place in range(accepted):
            self._accepted_per_pos[place] += 1
        if self._drafts == MANY_DRAFTS and not self._accepted:
            log.warning(NOTHING_ACCEPTED, MANY_DRAFTS)
