"""Acceptance by kind of prompt: how many drafted tokens the target agrees with, and at which position. Not timed.

Invariant: prompts are real text, and answers end where the model ends them; else the figures would say nothing about
what a user will see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.bench.prompts import BenchPrompt, categories
from foretell.bench.runs import Acceptance, Run, Side, Tell, in_groups, joined
from foretell.bench.stats import Interval, bootstrap

ALL = "all"


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """One category of prompts.

    Args:
        interval: of the mean acceptance length, bootstrapped over groups of prompts that ran together.
        tokens_per_step: emitted tokens per step of a request, steps without drafts counted: what a speed-up is made of.
    """

    label: str
    category: str
    prompts: int
    output_tokens: int
    acceptance: Acceptance | None
    interval: Interval | None
    tokens_per_step: float


def by_category(
    side: Side, prompts: Sequence[BenchPrompt], batch: int, tell: Tell
) -> list[CategoryRow]:
    """Every category, then all of them together.

    Args:
        batch: requests at once; with 1 the interval is over single prompts.
    """
    rows: list[CategoryRow] = []
    every: list[Run] = []
    for name in categories(prompts):
        tell(f"{side.label}, {name}")
        runs = in_groups(side, [p for p in prompts if p.category == name], batch)
        every += runs
        rows.append(_row(side.label, name, runs))
    if len(rows) > 1:
        rows.append(_row(side.label, ALL, every))
    return rows


def _row(label: str, category: str, runs: Sequence[Run]) -> CategoryRow:
    whole = joined(runs)
    drafted = [run for run in runs if run.counted.num_drafts]
    return CategoryRow(
        label=label,
        category=category,
        prompts=len(whole.answers),
        output_tokens=whole.tokens,
        acceptance=Acceptance.of(whole.counted),
        interval=bootstrap(drafted, _length) if drafted else None,
        tokens_per_step=whole.tokens_per_step,
    )


def _length(runs: Sequence[Run]) -> float:
    drafts = sum(run.counted.num_drafts for run in runs)
    return sum(run.counted.num_verified_tokens for run in runs) / drafts if drafts else 1.0
