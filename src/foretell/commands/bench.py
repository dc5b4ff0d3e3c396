"""`foretell bench`: throughput, latency, sweep, acceptance, serve, compare and report.

The commands turn options into plans, and records into tables, files and one line of JSON. What is measured, and how, is
foretell.bench's.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperGroup

from foretell.bench import acceptance as by_kind
from foretell.bench import compare as comparing
from foretell.bench import offline
from foretell.bench.client import Client, first_model
from foretell.bench.record import load
from foretell.bench.report import save_report
from foretell.bench.runs import Side
from foretell.bench.serving import Limits, Load, ServeRow, doubts, serve_load
from foretell.bench.terminal import console, table
from foretell.bench.variants import grid
from foretell.commands.bench_options import (
    WORK,
    Bench,
    OutputOptions,
    PromptOptions,
    RunOptions,
    asked_variant,
    bench,
    command,
    finish,
    numbers,
    offline_plan,
    opener,
    rates,
    sampling_warnings,
    settings_of,
)
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
    with bench(engine, sampling_warnings(sampling)) as under_way:
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
        under_way.warnings = sampling_warnings(
            sampling
        )  # nothing was timed: a busy core is no harm
        record = under_way.record("acceptance", settings, rows)
    finish(record, output)


@command(app)
def serve(
    prompts: PromptOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    url: Annotated[
        str, Option("--url", help="The server's address, without /v1.")
    ] = "http://localhost:8000",
    model: Annotated[
        str | None, Option("--model", "-m", help="Its name there. [default: the first one]")
    ] = None,
    api_key: Annotated[
        str | None, Option("--api-key", help="Sent as a bearer token.", envvar="FORETELL_API_KEY")
    ] = None,
    rate: Annotated[
        str | None, Option("--rate", help="Requests a second, Poisson; several with commas; inf.")
    ] = None,
    users: Annotated[
        str | None,
        Option("--users", help="Requests under way: a closed loop, or a cap for --rate."),
    ] = None,
    requests: Annotated[int, Option("--requests", help="How many for each load.")] = 64,
    warm_up: Annotated[int, Option("--warm-up", help="Requests before the clock starts.")] = 2,
    ttft_limit: Annotated[float | None, Option("--ttft-limit", help="ms, for goodput.")] = None,
    tpot_limit: Annotated[float | None, Option("--tpot-limit", help="ms, for goodput.")] = None,
    e2el_limit: Annotated[float | None, Option("--e2el-limit", help="ms, for goodput.")] = None,
) -> None:
    """Load on any OpenAI-compatible server: Poisson arrivals (--rate) or a closed loop (--users)."""
    output.check()
    loaded = prompts.load()
    limits = Limits(ttft_limit, tpot_limit, e2el_limit)
    loads = _loads(rate, users, requests, sampling.seed, warm_up)
    body = _body(sampling)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    with bench(None, sampling_warnings(sampling)) as under_way:
        rows, name = asyncio.run(
            _serve(url, model, headers, body, not prompts.raw, loads, limits, loaded, under_way)
        )
        settings = {
            "url": url,
            "model": name,
            "body": body,
            "prompts": prompts.prompts,
            "num_prompts": len(loaded),
            "chat_template": not prompts.raw,
            "limits_ms": limits,
            "seed": sampling.seed,
            "warm_up": warm_up,
            "acceptance_valid": not sampling.ignore_eos,
        }
        # The server may run on this very machine: its work is not a disturbance.
        under_way.warnings = [w for w in under_way.warnings if "void" not in w]
        record = under_way.record("serve", settings, rows)
    finish(record, output)
    if any(row.requests == 0 for row in rows):
        raise typer.Exit(1)


async def _serve(
    url: str,
    model: str | None,
    headers: dict[str, str],
    body: dict[str, Any],
    chat: bool,
    loads: list[Load],
    limits: Limits,
    prompts: list[Any],
    under_way: Bench,
) -> tuple[list[ServeRow], str]:
    httpx = need_httpx()
    from foretell.bench.client import TIMEOUT

    pool = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT, limits=pool
    ) as http:
        name = model or await first_model(http)
        client = Client(http, {**body, "model": name}, chat)
        rows = []
        for load_ in loads:
            under_way.tell(f"{load_.label}, {load_.requests} requests")
            row, served = await serve_load(client, prompts, load_, limits)
            under_way.warnings += doubts(row, served)
            rows.append(row)
    return rows, name


def need_httpx() -> Any:
    """httpx, or how to get it."""
    try:
        import httpx
    except ImportError:
        raise ImportError(
            "bench serve needs httpx, which is not installed; run: pip install 'foretell[bench]'"
        ) from None
    return httpx


def _loads(
    rate: str | None, users: str | None, requests: int, seed: int, warm_up: int
) -> list[Load]:
    """One load per rate, or per number of users."""
    if rate is None:
        many = numbers(users, "--users") if users else [8]
        return [Load(requests, None, count, seed, warm_up) for count in many]
    cap = None if users is None else numbers(users, "--users")
    if cap is not None and len(cap) > 1:
        raise ValueError(f"--users {users}: with --rate it is one cap, give one number")
    most = None if cap is None else cap[0]
    return [Load(requests, r, most, seed, warm_up) for r in rates(rate, "--rate")]


def _body(sampling: SamplingOptions) -> dict[str, Any]:
    """Sampling as the OpenAI API says it; the extensions of vLLM are sent only if they were asked for."""
    body: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    extensions = {
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "repetition_penalty": 1.0,
    }
    for name, off in {**extensions, "presence_penalty": 0.0, "frequency_penalty": 0.0}.items():
        if getattr(sampling, name) != off:
            body[name] = getattr(sampling, name)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


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
