"""`foretell train`: a drafter of one's own, from prompts or from nothing, in one command that can be run again.

It turns options into a Plan and shows what goes on; all else is in foretell/training. Run again with the same --out it
goes on where it was.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Argument, Option

if TYPE_CHECKING:
    from foretell.training.answers import Tally
    from foretell.training.loop import Report
    from foretell.training.plan import Plan
    from foretell.training.run import Hooks

SYNTHETIC = "synthetic"
DATA, TRAIN, CHECK = "Text", "Training", "Checks in the engine"


class DrafterKind(StrEnum):
    """What can be trained."""

    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    MEDUSA = "medusa"
    DRAFT = "draft"


class Broken(StrEnum):
    """What to do with a broken line."""

    STOP = "stop"
    SKIP = "skip"


def _of(panel: str, *names: str, help: str) -> Any:
    return Option(*names, help=help, rich_help_panel=panel)


def train(
    kind: Annotated[DrafterKind, Argument(help="What to train.")],
    data: Annotated[
        list[str],
        _of(DATA, "--data", help="JSONL of prompts (repeatable), or synthetic: the target asks."),
    ],
    out: Annotated[Path, Option("--out", help="Folder of the drafter; an earlier run goes on.")],
    model: Annotated[str | None, Option("--model", "-m", help="The target.")] = None,
    prompts: Annotated[int, _of(DATA, "--prompts", help="Synthetic prompts to write.")] = 1000,
    limit: Annotated[int | None, _of(DATA, "--limit", help="Most texts to train on.")] = None,
    on_broken: Annotated[Broken, _of(DATA, "--on-broken", help="Lines.")] = Broken.STOP,
    answer_tokens: Annotated[int, _of(DATA, "--answer-tokens", help="Longest answer.")] = 256,
    temperature: Annotated[float, _of(DATA, "--temperature", help="Of answers; 0 = greedy.")] = 0.0,
    answer_requests: Annotated[int, _of(DATA, "--answer-requests", help="At the same time.")] = 64,
    length: Annotated[int, _of(DATA, "--length", help="Tokens of a packed row.")] = 1024,
    capture_dir: Annotated[
        Path | None, _of(DATA, "--capture-dir", help="Keep features here; else recompute.")
    ] = None,
    capture_gb: Annotated[float, _of(DATA, "--capture-gb", help="At most so many.")] = 8.0,
    keep_gb: Annotated[float, _of(DATA, "--keep-gb", help="Keep features on the device.")] = 0.0,
    steps: Annotated[int | None, _of(TRAIN, "--steps", help="Of the optimiser.")] = None,
    minutes: Annotated[float | None, _of(TRAIN, "--minutes", help="Instead of steps.")] = None,
    rows: Annotated[int, _of(TRAIN, "--rows", help="Packed rows in a batch.")] = 8,
    accumulate: Annotated[int, _of(TRAIN, "--accumulate", help="Batches in a step.")] = 1,
    learning_rate: Annotated[float, _of(TRAIN, "--learning-rate", help="Highest.")] = 5e-4,
    warmup: Annotated[int, _of(TRAIN, "--warmup", help="Steps to reach it.")] = 50,
    seed: Annotated[int, _of(TRAIN, "--seed", help="Of weights and order.")] = 0,
    unroll: Annotated[int, _of(TRAIN, "--unroll", help="Steps an EAGLE head is unrolled.")] = 7,
    hard: Annotated[
        float, _of(TRAIN, "--hard", help="Share of the target's likeliest token in EAGLE's loss.")
    ] = 0.0,
    draft_vocab_size: Annotated[
        int, _of(TRAIN, "--draft-vocab-size", help="Of an EAGLE-3 head; 0 = the target's.")
    ] = 8192,
    intermediate: Annotated[
        int | None, _of(TRAIN, "--intermediate-size", help="Of an EAGLE head's MLP.")
    ] = None,
    heads: Annotated[int, _of(TRAIN, "--heads", help="Medusa heads.")] = 4,
    head_layers: Annotated[int, _of(TRAIN, "--head-layers", help="Blocks in each.")] = 1,
    own_output: Annotated[
        bool, _of(TRAIN, "--own-output", help="Each Medusa head has an output layer of its own.")
    ] = False,
    draft_model: Annotated[
        str | None, _of(TRAIN, "--draft-model", help="The model to distil into.")
    ] = None,
    draft_layers: Annotated[
        int, _of(TRAIN, "--draft-layers", help="Or so many of the target's own layers.")
    ] = 4,
    reverse: Annotated[
        float, _of(TRAIN, "--reverse-kl", help="Share of reverse KL in distillation.")
    ] = 0.0,
    initial: Annotated[
        Path | None, _of(TRAIN, "--initial", help="Begin with this drafter's weights.")
    ] = None,
    check_data: Annotated[
        list[Path] | None,
        _of(CHECK, "--check-data", help="Prompts never trained on (repeatable); else some kept."),
    ] = None,
    check_prompts: Annotated[int, _of(CHECK, "--check-prompts", help="How many; 0 = none.")] = 16,
    check_tokens: Annotated[int, _of(CHECK, "--check-tokens", help="Of each answer.")] = 128,
    check_every: Annotated[int | None, _of(CHECK, "--check-every", help="Steps.")] = None,
    tokens: Annotated[int, _of(CHECK, "--num-speculative-tokens", help="Drafted a step.")] = 5,
    device: Annotated[str, Option("--device", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, Option("--dtype", help="Of the target.")] = "auto",
    as_json: Annotated[bool, Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Train a drafter on what its target says; the checkpoint that the engine accepts most of is kept."""
    from foretell.training.draft import DistilSettings
    from foretell.training.eagle import EagleSettings
    from foretell.training.loop import LoopSettings
    from foretell.training.medusa import MedusaSettings
    from foretell.training.plan import AnswerSettings, Plan
    from foretell.training.run import run

    synthetic = SYNTHETIC in data
    if steps is None and minutes is None:
        steps = 2000
    plan = Plan(
        kind=kind.value,
        out=out,
        model=model,
        data=tuple(Path(path) for path in data if path != SYNTHETIC),
        synthetic=prompts if synthetic else 0,
        checked_with=tuple(check_data or ()),
        checked=check_prompts,
        on_broken=on_broken.value,
        device=device,
        dtype=dtype,
        length=length,
        limit=limit,
        draft_vocab_size=draft_vocab_size,
        intermediate=intermediate,
        memory=int(keep_gb * 2**30),
        capture_dir=capture_dir,
        capture_bytes=int(capture_gb * 2**30),
        tokens=tokens,
        check_tokens=check_tokens,
        initial=initial,
        loop=LoopSettings(
            steps=steps,
            minutes=minutes,
            rows=rows,
            accumulate=accumulate,
            learning_rate=learning_rate,
            warmup=warmup,
            check_every=check_every,
            seed=seed,
        ),
        answer=AnswerSettings(answer_tokens, temperature, answer_requests),
        eagle=EagleSettings(unroll, hard=hard, feature_loss=1.0 if kind == "eagle" else 0.0),
        medusa=MedusaSettings(heads, head_layers, own_output),
        distil=DistilSettings(draft_model, draft_layers, reverse),
    )
    with shown(plan) as hooks:
        report = run(plan, hooks)
    if os.environ.get("RANK", "0") != "0":
        return  # one process of torchrun; the first one tells
    if as_json:
        print(json.dumps(report))
    else:
        summarise(Console(highlight=False), plan, report)


@contextmanager
def shown(plan: Plan) -> Iterator[Hooks]:
    """Bars on a terminal, a line now and then elsewhere; everything to stderr."""
    from foretell.training.run import Hooks

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def say(text: str) -> None:
            bar.update(task, description=text)
            if not console.is_terminal:
                print(text, file=sys.stderr, flush=True)

        def answering(tally: Tally) -> None:
            left = (tally.total - tally.done) * _seconds_each(tally)
            text = f"answers: {tally.tokens_per_s:.0f} tokens/s, {left:.0f} s left"
            bar.update(task, description=text, completed=tally.done, total=tally.total)

        def training(report: Report) -> None:
            agreement = " ".join(f"{share:.2f}" for share in report.agreement)
            text = (
                f"step {report.step}: loss {report.losses[0]:.3f}, agreement {agreement}, "
                f"{report.tokens_per_s:.0f} tokens/s, {report.seconds_left:.0f} s left"
            )
            say(text)
            bar.update(task, completed=report.progress, total=1.0)

        def checked(step: int, found: dict[str, Any]) -> None:
            if "all" in found:
                bar.console.print(f"step {step}: acceptance length {found['all']['mean']:.3f}")

        yield Hooks(say, answering, training, checked)


def _seconds_each(tally: Tally) -> float:
    """Seconds an answer takes in this run."""
    return (time.monotonic() - tally.started) / max(1, tally.here)


def summarise(console: Console, plan: Plan, report: dict[str, Any]) -> None:
    """What was reached, by position, and what it is worth here."""
    table = Table(title=f"{report['kind']} for {report['model']}", title_justify="left")
    for column in ("step", "asked", "acceptance length", "accepted at position 1, 2, ..."):
        table.add_column(column)
    for check in report["checks"]:
        for name, found in check.items():
            if isinstance(found, dict):
                shares = " ".join(f"{share:.2f}" for share in found["by_position"])
                table.add_row(str(check["step"]), name, f"{found['mean']:.3f}", shares)
    console.print(table)
    predicted = report.get("predicted")
    if predicted:
        console.print(
            f"predicted here, one request: {predicted['speedup']:.2f} times plain decoding (a plain step takes "
            f"{predicted['plain_step_ms']:.1f} ms, one with drafts {predicted['drafting_step_ms']:.1f} ms)"
        )
    console.print(f"the best is in {plan.out}: foretell generate --speculate-model {plan.out}")
