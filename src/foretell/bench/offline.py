"""Offline benchmarks: throughput, latency at one request, and the sweep over batch, drafter, k and tree.

Plain decoding and every variant run on the same prompts with the same seeds, in turns, in one process. A speed-up is
the median over repeats of the ratio of two neighbours in time, against plain decoding of this build.

Invariant: the texts of all sides are compared; a row says whether they were the same, token for token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from foretell.bench.prompts import BenchPrompt
from foretell.bench.runs import (
    Acceptance,
    Opener,
    Run,
    Side,
    Tell,
    alternate,
    in_groups,
    joined,
    speed,
    streamed,
    times,
)
from foretell.bench.stats import Distribution, Spread
from foretell.bench.variants import Variant, plain_variant
from foretell.sampling_params import SamplingParams

WARM_UP_TOKENS = 32  # on a CPU, where nothing is captured
SLICES, EVENTS = 60, 8  # of a course over time: points at most, and pieces a point at least


@dataclass(frozen=True, slots=True)
class Plan:
    """What an offline benchmark does.

    Args:
        batch: requests at once; None = all prompts at once.
        repeats: how often every side runs.
        warm_up_tokens: of each answer while warming up; None = whole answers, which captures every graph.
        raw: continue prompts as text, without a chat template.
        one_engine: plain decoding runs on the drafting engine. It then pays for what drafts need (the drafter reads
            prompts, features are kept), which flatters the drafts a little; for models that do not fit twice.
    """

    prompts: Sequence[BenchPrompt]
    params: SamplingParams
    batch: int | None = None
    repeats: int = 3
    warm_up_tokens: int | None = WARM_UP_TOKENS
    raw: bool = False
    one_engine: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """What one side did.

    Args:
        requests: at once.
        speedup: against plain decoding, neighbours in time compared; None for plain itself.
        same_text: token for token as plain; None for plain itself.
        ttft_ms, tpot_ms, itl_ms: over requests, over requests and over pieces of all repeats.
        tokens_per_step: of one request, steps without drafts counted.
        lengths: tokens of (prompt, answer) of the last repeat.
    """

    label: str
    drafter: str
    k: int | None
    tree: str
    adaptive: bool
    requests: int
    prompts: int
    prompt_tokens: int
    output_tokens: int
    seconds: Spread
    tokens_per_s: Spread
    total_tokens_per_s: Spread
    requests_per_s: Spread
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution | None
    acceptance: Acceptance | None
    tokens_per_step: float
    speedup: Spread | None
    same_text: bool | None
    lengths: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Course:
    """Tokens per second over the time of one run."""

    label: str
    seconds: tuple[float, ...]
    tokens_per_s: tuple[float, ...]


def throughput(
    open_llm: Opener, variant: Variant, plan: Plan, tell: Tell
) -> tuple[list[Row], list[Course]]:
    """Plain against one variant, with the course of one more run of each that is not in the figures."""
    with opened(open_llm, variant, plan) as sides:
        rows = measure(sides, plan, plan.batch or len(plan.prompts), tell)
        courses = []
        for side in sides:
            tell(f"{side.label}, over time")
            courses.append(course(side.label, streamed(side, plan.prompts)))
    return rows, courses


def latency(open_llm: Opener, variant: Variant, plan: Plan, tell: Tell) -> list[Row]:
    """Plain against one variant, one request after the other, every piece followed."""
    plan = replace(plan, batch=1)

    def one_by_one(side: Side) -> Run:
        return joined([streamed(side, [prompt]) for prompt in plan.prompts])

    with opened(open_llm, variant, plan) as sides:
        warm_up(sides, plan, 1, tell)
        done = alternate(sides, plan.repeats, one_by_one, tell)
        return rows_of(sides, done, 1)


def sweep(
    open_llm: Opener, variants: Sequence[Variant], batches: Sequence[int], plan: Plan, tell: Tell
) -> list[Row]:
    """Every variant with every batch, each beside its own runs of plain decoding.

    A batch is a group of prompts that starts together and runs to its end; a large one repeats the prompts if there are
    too few. One plain engine stays open, and one variant's at a time beside it.
    """
    rows: list[Row] = []
    plain = None if plan.one_engine else open_llm(plain_variant())
    try:
        for variant in variants:
            tell(f"loading {variant.label}")
            with open_llm(variant) as llm:
                base = Side(
                    plain_variant(), plain or llm, plan.params, plan.one_engine is False, plan.raw
                )
                sides = (base, Side(variant, llm, plan.params, raw=plan.raw))
                for batch in batches:
                    rows += measure(sides, enough(plan, batch), batch, tell)
    finally:
        if plain is not None:
            plain.close()
    return rows


def enough(plan: Plan, batch: int) -> Plan:
    """The plan with whole batches of prompts: at least one, and no part of one."""
    count = max(len(plan.prompts) // batch, 1) * batch
    prompts = [plan.prompts[i % len(plan.prompts)] for i in range(count)]
    return replace(plan, prompts=prompts, batch=batch)


def measure(sides: Sequence[Side], plan: Plan, batch: int, tell: Tell) -> list[Row]:
    """Warm up, run in turns, and make rows; the first side is what the others are compared with."""
    warm_up(sides, plan, batch, tell)
    done = alternate(
        sides, plan.repeats, lambda side: joined(in_groups(side, plan.prompts, batch)), tell
    )
    return rows_of(sides, done, batch)


def warm_up(sides: Sequence[Side], plan: Plan, batch: int, tell: Tell) -> None:
    """One batch on every side, outside of every clock."""
    for side in sides:
        tell(f"{side.label}, warming up")
        short = side
        if plan.warm_up_tokens is not None:
            tokens = min(plan.params.max_tokens or plan.warm_up_tokens, plan.warm_up_tokens)
            least = min(plan.params.min_tokens, tokens)
            short = replace(side, params=replace(plan.params, max_tokens=tokens, min_tokens=least))
        in_groups(short, plan.prompts[:batch], batch)


@contextmanager
def opened(open_llm: Opener, variant: Variant, plan: Plan) -> Iterator[list[Side]]:
    """Plain and the variant; plain alone if that is the variant."""
    if variant.plain:
        with open_llm(variant) as llm:
            yield [Side(variant, llm, plan.params, raw=plan.raw)]
        return
    if plan.one_engine:
        with open_llm(variant) as llm:
            base = Side(plain_variant(), llm, plan.params, speculate=False, raw=plan.raw)
            yield [base, Side(variant, llm, plan.params, raw=plan.raw)]
        return
    with open_llm(plain_variant()) as plain, open_llm(variant) as llm:
        base = Side(plain_variant(), plain, plan.params, raw=plan.raw)
        yield [base, Side(variant, llm, plan.params, raw=plan.raw)]


def rows_of(sides: Sequence[Side], done: dict[str, list[Run]], batch: int) -> list[Row]:
    """One row a side."""
    base = done[sides[0].label]
    return [_row(side.variant, done[side.label], base, batch) for side in sides]


def _row(variant: Variant, runs: Sequence[Run], base: Sequence[Run], batch: int) -> Row:
    last = runs[-1]
    answers = [answer for run in runs for answer in run.answers]
    gaps = [gap for run in runs for gap in run.gaps]
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(runs, base, strict=True)]
    whole = joined(runs)
    return Row(
        label=variant.label,
        drafter=variant.drafter,
        k=variant.k,
        tree=variant.tree,
        adaptive=variant.adaptive,
        requests=batch,
        prompts=len(last.answers),
        prompt_tokens=last.prompt_tokens,
        output_tokens=last.tokens,
        seconds=Spread.of([run.seconds for run in runs]),
        tokens_per_s=speed(runs),
        total_tokens_per_s=Spread.of([(r.tokens + r.prompt_tokens) / r.seconds for r in runs]),
        requests_per_s=Spread.of([len(r.answers) / r.seconds for r in runs]),
        ttft_ms=times([a.first for a in answers]),
        tpot_ms=times([t for a in answers if (t := a.per_token) is not None]),
        itl_ms=times(gaps) if gaps else None,
        acceptance=Acceptance.of(whole.counted),
        tokens_per_step=whole.tokens_per_step,
        speedup=None if variant.plain else Spread.of(ratios),
        same_text=None if variant.plain else last.texts == base[-1].texts,
        lengths=tuple((a.prompt_tokens, len(a.token_ids)) for a in last.answers),
    )


def course(label: str, run: Run) -> Course:
    """Tokens per second in equal slices of the run's time."""
    if not run.events:
        return Course(label, (), ())
    slices = min(max(len({at for at, _ in run.events}) // EVENTS, 4), SLICES)
    width = max(run.seconds / slices, 1e-9)
    counts = [0] * slices
    for at, tokens in run.events:
        counts[min(int(at / width), slices - 1)] += tokens
    centres = tuple((i + 0.5) * width for i in range(slices))
    return Course(label, centres, tuple(count / width for count in counts))
