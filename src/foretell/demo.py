"""The demonstration: the same prompts with and without drafts, one after the other in one process.

It compares our engine with itself; a benchmark with repeats and spread is bench/'s work. Two engines
are made, so that plain decoding pays for nothing that drafts need. Times run from the request to its
last token, the prompt's work included; a warm-up on another prompt comes before the clock.

Invariant: both engines get the same prompts, parameters and seeds, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from foretell.llm import LLM
from foretell.metrics import Metrics
from foretell.sampling_params import SamplingParams

WARM_UP = "Count from one to twenty in words."
SHOWN_CHARACTERS = 700  # of each text in the side-by-side view

_CODE = """
def read_table(path, separator=","):
    rows = []
    with open(path) as file:
        header = file.readline().strip().split(separator)
        for line in file:
            values = line.strip().split(separator)
            if len(values) != len(header):
                raise ValueError(f"{path}: expected {len(header)} values, got {len(values)}")
            rows.append(dict(zip(header, values)))
    return rows
""".strip()
_TEXT = (
    "The lighthouse stood on the last rock before the open sea. Every evening the keeper climbed "
    "its one hundred and twelve steps, trimmed the lamp and wrote the weather into a thick book. "
    "On clear nights the light could be seen for twenty miles. In fog he rang the bell instead, "
    "once every thirty seconds, until the morning came."
)


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt of the demonstration."""

    kind: str  # what a person would call this work
    message: str


TASKS = (
    Task("copy a text", f"Repeat the following text word for word.\n\n{_TEXT}"),
    Task(
        "edit code",
        f"Rename the variable `rows` to `records` and give the whole function again.\n\n{_CODE}",
    ),
    Task("free chat", "Why is the sky blue? Answer in a short paragraph."),
    Task("free chat", "Write a short story about a fox who learns to swim."),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One answer of one engine."""

    text: str
    token_ids: tuple[int, ...]
    seconds: float
    counted: Metrics  # by this answer alone

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answer by the time from the request to the last one."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """One task, plain and with drafts."""

    task: Task
    plain: Run
    speculative: Run

    @property
    def same_text(self) -> bool:
        """Token for token."""
        return self.plain.token_ids == self.speculative.token_ids


def compare(
    plain: LLM,
    speculative: LLM,
    tasks: Sequence[Task],
    params: SamplingParams,
    tell: Callable[[str], None],
) -> list[Pair]:
    """Run every task on both engines, turn by turn, so that a slow spell of the machine hits both."""
    for name, llm in (("plain", plain), ("speculative", speculative)):
        tell(f"warming up, {name}")
        run(llm, WARM_UP, params)
    pairs = []
    for task in tasks:
        tell(f"{task.kind}, plain")
        without = run(plain, task.message, params)
        tell(f"{task.kind}, with drafts")
        pairs.append(Pair(task, without, run(speculative, task.message, params)))
    return pairs


def run(llm: LLM, message: str, params: SamplingParams) -> Run:
    """One timed answer."""
    before = llm.get_metrics()
    started = time.perf_counter()
    output = llm.chat([{"role": "user", "content": message}], params, use_tqdm=False)[0].outputs[0]
    seconds = time.perf_counter() - started
    counted = llm.get_metrics().since(before)
    return Run(output.text, tuple(output.token_ids), seconds, counted)


def acceptance_length(runs: Sequence[Run]) -> float:
    """Tokens emitted per verification that had drafts, the target's own included; 1 without any."""
    drafts = sum(r.counted.num_drafts for r in runs)
    return sum(r.counted.num_verified_tokens for r in runs) / drafts if drafts else 1.0


def speed(runs: Sequence[Run]) -> float:
    """Tokens per second over all runs together."""
    return sum(len(r.token_ids) for r in runs) / sum(r.seconds for r in runs)


def record(model: str, method: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """The demonstration as one JSON object."""
    plain, speculative = [p.plain for p in pairs], [p.speculative for p in pairs]
    return {
        "model": model,
        "method": method,
        "plain_tokens_per_s": round(speed(plain), 2),
        "speculative_tokens_per_s": round(speed(speculative), 2),
        "speedup": round(speed(speculative) / speed(plain), 3),
        "acceptance_length": round(acceptance_length(speculative), 3),
        "same_text": all(p.same_text for p in pairs),
        "tasks": [
            {
                "kind": p.task.kind,
                "tokens": len(p.plain.token_ids),
                "plain_tokens_per_s": round(p.plain.tokens_per_s, 2),
                "speculative_tokens_per_s": round(p.speculative.tokens_per_s, 2),
                "speedup": round(p.speculative.tokens_per_s / p.plain.tokens_per_s, 3),
                "acceptance_length": round(acceptance_length([p.speculative]), 3),
                "same_text": p.same_text,
            }
            for p in pairs
        ],
    }


def show(console: Console, result: dict[str, Any], pairs: Sequence[Pair]) -> None:
    """The table of a `record`, then every pair of texts side by side."""
    title = f"{result['model']}, drafts by {result['method']}"
    table = Table(title=title, title_justify="left")
    table.add_column("prompt", no_wrap=True)
    for column in ("tokens", "plain tok/s", "drafts tok/s", "speed-up", "tokens per draft"):
        table.add_column(column, justify="right")
    table.add_column("same text")
    for row in [*result["tasks"], {"kind": "all", "tokens": _tokens(pairs), **result}]:
        table.add_row(
            row["kind"],
            str(row["tokens"]),
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['speculative_tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['acceptance_length']:.2f}",
            "yes" if row["same_text"] else "NO",
            end_section=row is result["tasks"][-1],
        )
    console.print(table)
    texts = Table("plain", "with drafts", title="The texts", title_justify="left", show_lines=True)
    for pair in pairs:
        texts.add_row(_shown(pair.plain.text), _shown(pair.speculative.text))
    console.print(texts)


def _tokens(pairs: Sequence[Pair]) -> int:
    return sum(len(p.plain.token_ids) for p in pairs)


def _shown(text: str) -> Text:
    """A text as it is (no markup is read in it), cut to what fits on a screen."""
    cut = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
    return Text(cut)
