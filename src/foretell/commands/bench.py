"""`foretell bench`: throughput, latency, sweep, acceptance, serve, compare and report.

The commands turn options into plans, and records into tables, files and one line of JSON. What is measured, and how, is
foretell.bench's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperGroup

from foretell.bench import acceptance as by_kind
from foretell.bench import compare as comparing
from foretell.bench import offline
from foretell.bench.costs import read_costs
from foretell.bench.fleet import Fleet, with_predictions
from foretell.bench.record import load
from foretell.bench.report import save_report
from foretell.bench.runs import Side
from foretell.bench.simulate import Accepting, Shape
from foretell.bench.steps import step_costs
from foretell.bench.terminal import console, table
from foretell.bench.variants import given_variant, grid
from foretell.commands.bench_options import (
    WORK,
    OutputOptions,
    PromptOptions,
    RunOptions,
    asked_variant,
    bench,
    command,
    finish,
    numbers,
    offline_plan,
    on_gpu,
    opener,
    sampling_warnings,
    settings_of,
)
from foretell.commands.bench_serve import serve
from foretell.commands.simulate import simulate
from foretell.options import NGRAM_TOKENS, EngineOptions, SamplingOptions


class _Group(TyperGroup):
    """`bench --simulate` is `bench simulate`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = ["simulate" if arg == "--simulate" else arg for arg in args[:1]]
        return super().parse_args(ctx, [*first, *args[1:]])


app = typer.Typer(
    cls=_Group,
    help="Measure: plain decoding against drafts, servers under load, what steps cost, and what that means.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Batch = Annotated[
    int | None,
    Option(
        "--batch", help="Requests at once. [default: all]", rich_help_panel=WORK, show_default=False
    ),
]


@command(app)
def throughput(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: PromptOptions,
    runs: RunOptions,
    output: OutputOptions,
    batch: Batch = None,
) -> None:
    """Output tokens per second of many prompts at once, plain and with drafts, in turns."""
    output.check()
    plan = offline_plan(engine, sampling, prompts, runs, batch)
    variant = asked_variant(engine)
    with bench(engine, sampling_warnings(sampling)) as under_way:
        rows, courses = offline.throughput(
            opener(engine, runs.one_engine), variant, plan, under_way.tell
        )
        settings = {
            **settings_of(engine, sampling, prompts, plan.prompts),
            "drafts": variant.label,
            "speculative_config": variant.speculative,
            "repeats": plan.repeats,
            "one_engine": plan.one_engine,
        }
        record = under_way.record("throughput", settings, rows, {"courses": courses})
    finish(record, output)


@command(app)
def latency(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: PromptOptions,
    runs: RunOptions,
    output: OutputOptions,
) -> None:
    """One request after the other: time to the first token, per token, and between pieces."""
    output.check()
    plan = offline_plan(engine, sampling, prompts, runs, 1)
    variant = asked_variant(engine)
    with bench(engine, sampling_warnings(sampling)) as under_way:
        rows = offline.latency(opener(engine, runs.one_engine), variant, plan, under_way.tell)
        settings = {
            **settings_of(engine, sampling, prompts, plan.prompts),
            "drafts": variant.label,
            "speculative_config": variant.speculative,
            "repeats": plan.repeats,
            "one_engine": plan.one_engine,
        }
        record = under_way.record("latency", settings, rows)
    finish(record, output)


@command(app)
def sweep(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: PromptOptions,
    runs: RunOptions,
    output: OutputOptions,
    batches: Annotated[
        str, Option("--batches", help="Requests at once.", rich_help_panel=WORK)
    ] = "1,8",
    ks: Annotated[
        str | None,
        Option("--ks", help="Draft tokens per step, such as 2,4,7.", rich_help_panel=WORK),
    ] = None,
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
    adaptive: Annotated[
        bool,
        Option(
            "--adaptive/--no-adaptive", help="Also let the engine choose.", rich_help_panel=WORK
        ),
    ] = True,
    costs: Annotated[
        str | None,
        Option("--costs", help="A record of bench steps: predict, too.", rich_help_panel=WORK),
    ] = None,
) -> None:
    """Every batch with every drafter, draft length and tree, each beside plain decoding."""
    output.check()
    plan = offline_plan(engine, sampling, prompts, runs, None)
    sizes = numbers(batches, "--batches")
    asked = asked_variant(engine)
    shared = {
        k: v
        for k, v in (asked.speculative or {}).items()
        if k not in ("method", "model", "tree", "num_speculative_tokens", "adaptive")
    }
    lengths = numbers(ks, "--ks") if ks else ([] if asked.k is None else [asked.k or NGRAM_TOKENS])
    variants = grid(drafters or [asked.drafter], lengths, trees or [asked.tree], shared, adaptive)
    known = None if costs is None else read_costs(load(Path(costs)))
    with bench(engine, sampling_warnings(sampling)) as under_way:
        rows = offline.sweep(opener(engine, runs.one_engine), variants, sizes, plan, under_way.tell)
        settings = {
            **settings_of(engine, sampling, prompts, plan.prompts),
            "batches": sizes,
            "drafts": [variant.label for variant in variants],
            "repeats": plan.repeats,
            "one_engine": plan.one_engine,
        }
        record = under_way.record("sweep", settings, rows)
    if known is not None:
        model = Fleet(Shape(max_num_seqs=max(sizes), behind=on_gpu(engine)), known, Accepting(()))
        record = replace(record, rows=with_predictions(record.rows, model))
    finish(record, output)


@command(app)
def acceptance(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: PromptOptions,
    output: OutputOptions,
    batch: Batch = 1,
) -> None:
    """How many drafted tokens the target accepts, by kind of prompt and by position. Not timed."""
    output.check()
    plan = offline_plan(engine, sampling, prompts, RunOptions(), batch)
    variant = asked_variant(engine)
    with bench(engine, sampling_warnings(sampling), timed=False) as under_way:
        with opener(engine)(variant) as llm:
            side = Side(variant, llm, plan.params, raw=plan.raw)
            rows = by_kind.by_category(
                side, plan.prompts, batch or len(plan.prompts), under_way.tell
            )
        settings = {
            **settings_of(engine, sampling, prompts, plan.prompts),
            "drafts": variant.label,
            "speculative_config": variant.speculative,
            "batch": batch,
        }
        record = under_way.record("acceptance", settings, rows)
    finish(record, output)


@command(app)
def steps(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: PromptOptions,
    runs: RunOptions,
    output: OutputOptions,
    batches: Annotated[
        str, Option("--batches", help="Requests at once.", rich_help_panel=WORK)
    ] = "1,2,4,8",
) -> None:
    """What a decode step costs by batch and tree, and what prompts cost: for `simulate` and `plan`."""
    output.check()
    plan = offline_plan(engine, sampling, prompts, runs, None)
    sizes = numbers(batches, "--batches")
    asked = asked_variant(engine)
    variant = given_variant(asked.speculative or {}, adaptive=True)
    with bench(engine) as under_way:
        costs, rows, doubts_ = step_costs(opener(engine), variant, sizes, plan, under_way.tell)
        under_way.warnings += doubts_
        settings = {
            **settings_of(engine, sampling, prompts, plan.prompts),
            "acceptance_valid": False,
            "drafts": variant.label,
            "speculative_config": variant.speculative,
            "batches": sizes,
            "repeats": plan.repeats,
        }
        record = under_way.record("steps", settings, rows, costs.as_json())
    finish(record, output)


command(app)(serve)
command(app)(simulate)


@command(app)
def compare(
    before: Annotated[str, Argument(help="A result file.")],
    after: Annotated[str, Argument(help="A later one of the same kind.")],
    as_json: Annotated[bool, Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Two result files side by side: what became better or worse beyond the spread of the repeats."""
    comparison = comparing.compare(load(Path(before)), load(Path(after)))
    if not as_json:
        screen = console()
        for line in comparison.differ:
            screen.print(Text(f"differs: {line}", style="yellow"))
        grid_ = comparing.grid(comparison)
        screen.print(table(grid_))
        screen.print(Text(grid_.note, style="dim"))
    print(json.dumps(comparison.as_json(), ensure_ascii=False), flush=True)


@command(app)
def report(
    files: Annotated[list[str], Argument(help="Result files.")],
    out: Annotated[str, Option("--out", "-o", help="The page to write.")] = "bench.html",
    title: Annotated[str, Option("--title", help="Its title.")] = "foretell bench",
) -> None:
    """One HTML page of result files: tables, drawings and conditions, in one file."""
    save_report([load(Path(file)) for file in files], Path(out), title)
    print(json.dumps({"report": out, "records": len(files)}), flush=True)
