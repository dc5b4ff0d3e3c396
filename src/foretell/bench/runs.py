"""One run: prompts through an LLM, timed from the first request to the last token, and what was counted meanwhile.

`together` hands all prompts over at once and reads the clock twice; `streamed` follows every step, for latencies and
for the course of time. Prefix caches are emptied before the clock starts, so that repeats measure the same work.

Invariant: nothing is measured in a run that a user would not pay for; loading and warming up lie outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Protocol

from foretell.bench.prompts import BenchPrompt
from foretell.bench.stats import Distribution, Spread
from foretell.bench.variants import Variant
from foretell.llm import LLM
from foretell.metrics import Metrics
from foretell.outputs import RequestOutput
from foretell.sampling_params import RequestOutputKind, SamplingParams

Tell = Callable[[str], None]


class Opener(Protocol):
    """Makes the engine of a variant."""

    def __call__(self, variant: Variant) -> LLM: ...


@dataclass(frozen=True, slots=True)
class Side:
    """One thing that is compared.

    Args:
        speculate: False runs a drafting engine plainly.
        raw: prompts are continued as text, without a chat template.
    """

    variant: Variant
    llm: LLM
    params: SamplingParams
    speculate: bool = True
    raw: bool = False

    @property
    def label(self) -> str:
        """For people."""
        return self.variant.label


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its user saw it; seconds from when it was handed over."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    first: float
    latency: float

    @property
    def per_token(self) -> float | None:
        """TPOT: seconds per token after the first; None for an answer of one token."""
        count = len(self.token_ids)
        return (self.latency - self.first) / (count - 1) if count > 1 else None


@dataclass(frozen=True, slots=True)
class Counted:
    """What the engine counted during a run: the fields of `metrics.Metrics` of the same names."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_verified_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0

    @classmethod
    def between(cls, before: Metrics, after: Metrics) -> Counted:
        """What was added."""
        added = after.since(before)
        return cls(**{f.name: getattr(added, f.name) for f in fields(cls)})

    def plus(self, other: Counted) -> Counted:
        """Of both together."""
        places = zip_longest(
            self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0
        )
        sums = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name != "num_accepted_tokens_per_pos"
        }
        return Counted(**sums, num_accepted_tokens_per_pos=tuple(a + b for a, b in places))


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over some prompts.

    Args:
        events: (seconds since the start, tokens) of every piece that came; () if the run was not streamed.
        gaps: seconds between two pieces of the same answer (ITL).
    """

    answers: tuple[Answer, ...]
    seconds: float
    counted: Counted
    events: tuple[tuple[float, int], ...] = ()
    gaps: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(a.token_ids) for a in self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(a.prompt_tokens for a in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Output throughput."""
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of one request. A step without drafts emits one token: steps are drafts and tokens that no draft emitted."""
        counted = self.counted
        steps = counted.num_drafts + counted.generation_tokens - counted.num_verified_tokens
        return counted.generation_tokens / steps if steps else 1.0

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """What was said, token for token."""
        return tuple(a.token_ids for a in self.answers)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What speculation did, in vLLM's words; see docs/metrics.md.

    Args:
        per_position: share of the drafts whose first, second, ... token was accepted.
        conditional: the same among the drafts whose tokens before it were accepted.
    """

    drafts: int
    drafted: int
    accepted: int
    length: float
    rate: float
    per_position: tuple[float, ...]
    conditional: tuple[float, ...]

    @classmethod
    def of(cls, counted: Counted) -> Acceptance | None:
        """None where nothing was drafted."""
        drafts = counted.num_drafts
        if not drafts:
            return None
        per_position = tuple(count / drafts for count in counted.num_accepted_tokens_per_pos)
        before = (1.0, *per_position)
        return cls(
            drafts=drafts,
            drafted=counted.num_draft_tokens,
            accepted=counted.num_accepted_tokens,
            length=counted.num_verified_tokens / drafts,
            rate=counted.num_accepted_tokens / counted.num_draft_tokens,
            per_position=per_position,
            conditional=tuple(
                p / b if b else 0.0 for p, b in zip(per_position, before, strict=False)
            ),
        )


def together(side: Side, prompts: Sequence[BenchPrompt]) -> Run:
    """All prompts at once."""
    side.llm.reset_prefix_cache()
    before = side.llm.get_metrics()
    params = replace(side.params, speculate=side.speculate and side.params.speculate)
    started = time.perf_counter()
    outputs = _ask(side, prompts, params)
    seconds = time.perf_counter() - started
    counted = Counted.between(before, side.llm.get_metrics())
    return Run(tuple(_answer(output) for output in outputs), seconds, counted)


def in_groups(side: Side, prompts: Sequence[BenchPrompt], size: int) -> list[Run]:
    """Groups of `size` prompts, one after the other, each to its end."""
    return [together(side, prompts[i : i + size]) for i in range(0, len(prompts), size)]


def streamed(side: Side, prompts: Sequence[BenchPrompt]) -> Run:
    """All prompts at once, with the time of every piece."""
    side.llm.reset_prefix_cache()
    before = side.llm.get_metrics()
    params = replace(
        side.params,
        speculate=side.speculate and side.params.speculate,
        output_kind=RequestOutputKind.DELTA,
    )
    stream = (
        side.llm.stream([p.text for p in prompts], params)
        if side.raw
        else side.llm.stream_chat([p.messages for p in prompts], params)
    )
    started = time.perf_counter()
    pieces: list[tuple[float, RequestOutput]] = []
    with closing(stream):
        for output in stream:
            pieces.append((time.perf_counter() - started, output))
    seconds = time.perf_counter() - started
    return _followed(pieces, seconds, Counted.between(before, side.llm.get_metrics()))


def joined(runs: Sequence[Run]) -> Run:
    """Runs that followed each other, as one."""
    total = Run((), 0.0, Counted())
    answers: list[Answer] = []
    events: list[tuple[float, int]] = []
    gaps: list[float] = []
    for run in runs:
        events += [(total.seconds + at, tokens) for at, tokens in run.events]
        answers += run.answers
        gaps += run.gaps
        seconds, counted = total.seconds + run.seconds, total.counted.plus(run.counted)
        total = Run((), seconds, counted)
    return replace(total, answers=tuple(answers), events=tuple(events), gaps=tuple(gaps))


def alternate(
    sides: Sequence[Side], repeats: int, run: Callable[[Side], Run], tell: Tell
) -> dict[str, list[Run]]:
    """Every side in turn, every other round backwards, so that a drift of the machine hits all alike."""
    done: dict[str, list[Run]] = {side.label: [] for side in sides}
    for turn in range(repeats):
        for side in sides if turn % 2 == 0 else tuple(reversed(sides)):
            tell(f"{side.label}, repeat {turn + 1} of {repeats}")
            done[side.label].append(run(side))
    return done


def speed(runs: Sequence[Run]) -> Spread:
    """Tokens per second of repeats."""
    return Spread.of([run.tokens_per_s for run in runs])


def times(values: Sequence[float]) -> Distribution:
    """Seconds as milliseconds."""
    return Distribution.of([1e3 * value for value in values])


def _ask(side: Side, prompts: Sequence[BenchPrompt], params: SamplingParams) -> list[RequestOutput]:
    if side.raw:
        return side.llm.generate([p.text for p in prompts], params, use_tqdm=False)
    return side.llm.chat([p.messages for p in prompts], params, use_tqdm=False)


def _answer(output: RequestOutput) -> Answer:
    metrics = output.metrics
    return Answer(
        token_ids=tuple(output.outputs[0].token_ids),
        prompt_tokens=len(output.prompt_token_ids),
        first=metrics.time_to_first_token or 0.0,
        latency=metrics.latency or 0.0,
    )


def _followed(
    pieces: Sequence[tuple[float, RequestOutput]], seconds: float, counted: Counted
) -> Run:
    """From the pieces of a stream to answers, in the order of the requests."""
    tokens: dict[str, list[int]] = {}
    came: dict[str, list[float]] = {}
    prompt: dict[str, int] = {}
    for at, output in pieces:
        fresh = output.outputs[0].token_ids
        tokens.setdefault(output.request_id, []).extend(fresh)
        prompt[output.request_id] = len(output.prompt_token_ids)
        if fresh:
            came.setdefault(output.request_id, []).append(at)
    order = sorted(tokens, key=int)
    answers = tuple(
        Answer(tuple(tokens[i]), prompt[i], came[i][0], came[i][-1]) for i in order if i in came
    )
    gaps = tuple(
        b - a for i in order for a, b in zip(came.get(i, ()), came.get(i, ())[1:], strict=False)
    )
    events = tuple((at, len(output.outputs[0].token_ids)) for at, output in pieces)
    return Run(answers, seconds, counted, events, gaps)
