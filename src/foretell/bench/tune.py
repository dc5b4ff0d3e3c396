"""Tuning: which drafter, draft length and tree are fastest for a load, by successive halving on real runs.

Round by round every candidate left runs on twice the prompts, beside plain decoding on the same engine and prompts, and
the better half goes on (successive halving: Jamieson and Talwalkar 2016, arXiv 1502.07943). The last round has all
prompts and an engine of its own for plain decoding. Group by group the two sides take turns, so a slow minute of the
machine hits both.

Invariant: a verdict says how sure it is: an interval of the speed-up, and in how many resamples of the prompts the
winner was the fastest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from foretell.bench.offline import Plan, warm_up
from foretell.bench.prompts import in_turn
from foretell.bench.runs import Opener, Side, Tell, together
from foretell.bench.stats import Interval, bootstrap
from foretell.bench.variants import Variant, plain_variant, with_memory

FINALISTS = 3
RESAMPLES = 2000
LEVEL = 0.95
SURE = 0.9  # share of resamples; below it the verdict names the next best


@dataclass(frozen=True, slots=True)
class Pair:
    """One group of prompts, plain and drafted.

    Args:
        tokens, plain_tokens: emitted; the same unless the texts differ.
    """

    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float


@dataclass(frozen=True, slots=True)
class Trial:
    """What one candidate did in one round."""

    variant: Variant
    pairs: tuple[Pair, ...]

    @property
    def speedup(self) -> float:
        """Against plain, all groups together."""
        return speedup(self.pairs)

    @property
    def tokens_per_s(self) -> float:
        """Of the candidate itself."""
        return sum(p.tokens for p in self.pairs) / sum(p.seconds for p in self.pairs)


@dataclass(frozen=True, slots=True)
class TuneRow:
    """One candidate in one round, for the record."""

    label: str
    drafter: str
    k: int | None
    tree: str
    adaptive: bool
    round: int
    prompts: int
    tokens_per_s: float
    speedup: Interval
    kept: bool


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome.

    Args:
        best: the fastest; plain if no candidate is faster than that.
        gain: its speed-up with its interval; None for plain.
        faster: share of resamples in which it beats plain.
        fastest: share of resamples in which it beats plain and all other finalists.
        second: the finalist behind it, for people; "" if there was none.
    """

    best: Variant
    gain: Interval | None
    faster: float
    fastest: float
    rows: tuple[TuneRow, ...]
    second: str = ""

    @property
    def verdict(self) -> str:
        """For people."""
        if self.gain is None:
            return "No candidate is faster than plain decoding here, so no drafts."
        gain = self.gain
        unsure = self.fastest < SURE and self.second
        more = (
            f" Not sure: close behind is {self.second}; more prompts would tell." if unsure else ""
        )
        return (
            f"{self.best.label}: {gain.value:.2f}x plain, {100 * gain.level:.0f} % between {gain.low:.2f} and "
            f"{gain.high:.2f}; faster than plain in {100 * self.faster:.0f} % of resamples of the prompts, the fastest "
            f"of all in {100 * self.fastest:.0f} %.{more}"
        )


def tune(open_llm: Opener, variants: Sequence[Variant], plan: Plan, tell: Tell) -> Tuned:
    """Find the fastest of the variants.

    Args:
        plan: its prompts are all there are; its batch is the load; its repeats are those of the last round.

    Raises:
        ValueError: there is no candidate.
    """
    if not variants:
        raise ValueError("there is nothing to choose from: give drafters and draft lengths")
    plan = replace(plan, prompts=in_turn(plan.prompts))
    batch = plan.batch or len(plan.prompts)
    rows: list[TuneRow] = []
    left = list(variants)
    sizes = rounds(len(left), len(plan.prompts), batch)
    for number, size in enumerate(sizes, start=1):
        last = number == len(sizes)
        short = replace(plan, prompts=plan.prompts[:size], one_engine=not last)
        told = f"round {number} of {len(sizes)}"
        trials = [_run(open_llm, v, short, plan.repeats if last else 1, tell, told) for v in left]
        trials.sort(key=lambda trial: -trial.speedup)
        keep = 1 if last else max(math.ceil(len(trials) / 2), min(FINALISTS, len(trials)))
        kept = {t.variant.label for t in trials[:keep] if not last or t.speedup > 1}
        rows += [_row(t, number, size, t.variant.label in kept) for t in trials]
        left = [t.variant for t in trials[:keep]]
    return _decide(trials, rows)


def rounds(candidates: int, prompts: int, batch: int) -> list[int]:
    """How many prompts each round has: half as many the round before, in whole batches, all of them in the last.

    Example: rounds(8, 32, 4) == [8, 16, 32]: eight candidates, then four, then three.
    """
    count = 1
    while candidates > FINALISTS:
        candidates = max(math.ceil(candidates / 2), FINALISTS)
        count += 1
    sizes = [prompts / 2 ** (count - 1 - i) for i in range(count)]
    return [min(prompts, max(batch, math.ceil(size / batch) * batch)) for size in sizes]


def speedup(pairs: Sequence[Pair]) -> float:
    """Ratio of the tokens per second of all groups together."""
    drafted = sum(p.tokens for p in pairs) / sum(p.seconds for p in pairs)
    plain = sum(p.plain_tokens for p in pairs) / sum(p.plain_seconds for p in pairs)
    return drafted / plain


def winners(trials: Sequence[Trial], seed: int = 0) -> tuple[float, float]:
    """(share of resamples in which the first beats plain, in which it beats plain and all others).

    The same groups are drawn for all candidates, which ran on the same prompts: what is common to them cancels.
    """
    draw = random.Random(seed)
    groups = min(len(trial.pairs) for trial in trials)
    faster = fastest = 0
    for _ in range(RESAMPLES):
        drawn = draw.choices(range(groups), k=groups)
        seen = [speedup([trial.pairs[i] for i in drawn]) for trial in trials]
        faster += seen[0] > 1
        fastest += seen[0] > 1 and seen[0] >= max(seen)
    return faster / RESAMPLES, fastest / RESAMPLES


def settings(tuned: Tuned, arguments: dict[str, Any]) -> dict[str, Any]:
    """LLM's arguments with what was found.

    Args:
        arguments: those of the plain engine.
    """
    if tuned.best.plain:
        return arguments
    return {**arguments, "speculative_config": with_memory(tuned.best.speculative or {})}


def _run(
    open_llm: Opener, variant: Variant, plan: Plan, repeats: int, tell: Tell, told: str
) -> Trial:
    """One candidate beside plain decoding, group by group."""
    batch = plan.batch or len(plan.prompts)
    tell(f"{told}: loading {variant.label}")
    with ExitStack() as stack:
        base = None if plan.one_engine else stack.enter_context(open_llm(plain_variant()))
        llm = stack.enter_context(open_llm(variant))
        plain = Side(plain_variant(), base or llm, plan.params, speculate=False, raw=plan.raw)
        drafted = Side(variant, llm, plan.params, raw=plan.raw)
        warm_up((plain, drafted), plan, batch, lambda doing: tell(f"{told}: {doing}"))
        pairs = []
        for turn in range(repeats):
            for start in range(0, len(plan.prompts), batch):
                tell(f"{told}: {variant.label}, prompt {start + 1} of {len(plan.prompts)}")
                group = plan.prompts[start : start + batch]
                forward = (turn + start // batch) % 2 == 0
                order = (plain, drafted) if forward else (drafted, plain)
                runs = {side.label: together(side, group) for side in order}
                one, other = runs[drafted.label], runs[plain.label]
                pairs.append(Pair(one.tokens, one.seconds, other.tokens, other.seconds))
    return Trial(variant, tuple(pairs))


def _row(trial: Trial, number: int, prompts: int, kept: bool) -> TuneRow:
    variant = trial.variant
    return TuneRow(
        label=variant.label,
        drafter=variant.drafter,
        k=variant.k,
        tree=variant.tree,
        adaptive=variant.adaptive,
        round=number,
        prompts=prompts,
        tokens_per_s=trial.tokens_per_s,
        speedup=bootstrap(trial.pairs, speedup, resamples=RESAMPLES, level=LEVEL),
        kept=kept,
    )


def _decide(trials: Sequence[Trial], rows: Sequence[TuneRow]) -> Tuned:
    best = trials[0]
    faster, fastest = winners(trials)
    if best.speedup <= 1:
        return Tuned(plain_variant(), None, 1 - faster, 1 - faster, tuple(rows))
    gain = bootstrap(best.pairs, speedup, resamples=RESAMPLES, level=LEVEL)
    second = f"{trials[1].variant.label} at {trials[1].speedup:.2f}x" if len(trials) > 1 else ""
    return Tuned(best.variant, gain, faster, fastest, tuple(rows), second)
