"""`foretell tune`: measures drafters, draft lengths and trees on your prompts and load, and writes the fastest down."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from typer import Option

from foretell.bench.tune import Tuned, settings, tune
from foretell.bench.variants import grid
from foretell.commands.bench_options import (
    WORK,
    OutputOptions,
    PromptOptions,
    RunOptions,
    asked_variant,
    bench,
    finish,
    numbers,
    offline_plan,
    opener,
    sampling_warnings,
    settings_of,
)
from foretell.configfile import write_config
from foretell.options import EngineOptions, SamplingOptions


def command(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: PromptOptions,
    runs: RunOptions,
    output: OutputOptions,
    write: Annotated[
        str,
        Option(
            "--write",
            "-w",
            help="The config file to write, for --config.",
            rich_help_panel="Output",
        ),
    ] = "foretell.yaml",
    batch: Annotated[int, Option("--batch", help="Requests at once.", rich_help_panel=WORK)] = 1,
    ks: Annotated[
        str, Option("--ks", help="Draft lengths to try.", rich_help_panel=WORK)
    ] = "2,4,7",
    trees: Annotated[
        list[str] | None,
        Option(
            "--tree", help="chain, a name, or paths as JSON (repeatable).", rich_help_panel=WORK
        ),
    ] = None,
    drafters: Annotated[
        list[str] | None,
        Option(
            "--drafter", help="ngram, suffix or a checkpoint (repeatable).", rich_help_panel=WORK
        ),
    ] = None,
) -> None:
    """Find the fastest drafter, draft length and tree for your prompts and load, and write a config of it."""
    output.check()
    plan = offline_plan(engine, sampling, prompts, runs, batch)
    asked = asked_variant(engine)
    shared = {
        k: v
        for k, v in (asked.speculative or {}).items()
        if k not in ("method", "model", "tree", "num_speculative_tokens", "adaptive")
    }
    lengths = numbers(ks, "--ks")
    variants = grid(drafters or [asked.drafter], lengths, trees or ["chain"], shared, adaptive=True)
    with bench(engine, sampling_warnings(sampling)) as under_way:
        tuned = tune(opener(engine, one_engine=False), variants, plan, under_way.tell)
        described = {
            **settings_of(engine, sampling, prompts, plan.prompts),
            "batch": batch,
            "candidates": [variant.label for variant in variants],
            "repeats": plan.repeats,
            "config": write,
        }
        extra = {"verdict": tuned.verdict, "best": tuned.best.speculative, "fastest": tuned.fastest}
        record = under_way.record("tune", described, tuned.rows, extra)
    arguments = settings(tuned, engine.without_drafts().arguments())
    write_config(Path(write), arguments, _head(tuned, batch, prompts.prompts, record.warnings))
    finish(record, output)


def _head(tuned: Tuned, batch: int, prompts: str, warnings: object) -> str:
    now = datetime.now(UTC).date().isoformat()
    lines = [
        f"Written by foretell tune, {now}: {batch} at once, prompts {prompts}.",
        tuned.verdict,
    ]
    lines += [f"Warning: {warning}" for warning in warnings] if isinstance(warnings, list) else []
    return "\n".join(lines)
