"""Options that benchmark commands share, and what they do with a record: show it, save it, draw it.

Invariant: the last line on stdout is the record as one line of JSON; with --json it is the only one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from foretell.bench.machine import Watch, describe, look
from foretell.bench.offline import WARM_UP_TOKENS, Plan
from foretell.bench.plots import need_matplotlib, plots
from foretell.bench.prompts import BUILT_IN, BenchPrompt, categories, load_prompts
from foretell.bench.record import Record
from foretell.bench.report import save_report
from foretell.bench.runs import Opener, Tell
from foretell.bench.terminal import console, show
from foretell.bench.variants import Variant, given_variant
from foretell.llm import LLM
from foretell.options import EngineOptions, SamplingOptions, flatten

WORK, OUTPUT = "Work", "Output"


def _work(*names: str, help: str) -> Any:
    return Option(*names, help=help, rich_help_panel=WORK)


def _output(*names: str, help: str) -> Any:
    return Option(*names, help=help, rich_help_panel=OUTPUT)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Which prompts."""

    prompts: Annotated[
        str,
        _work("--prompts", help="A built-in set (mixed, chat, code, ...) or a JSONL file."),
    ] = BUILT_IN
    num_prompts: Annotated[
        int | None, _work("--num-prompts", help="At most that many, over all categories in turn.")
    ] = None
    raw: Annotated[
        bool, _work("--raw", help="Continue prompts as plain text, without a chat template.")
    ] = False

    def load(self) -> list[BenchPrompt]:
        """The prompts; raises ValueError."""
        return load_prompts(self.prompts, self.num_prompts)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How often, and how."""

    repeats: Annotated[int, _work("--repeats", help="How often every side runs, in turns.")] = 3
    warm_up_tokens: Annotated[
        int | None,
        _work(
            "--warm-up-tokens", help="Tokens an answer while warming up. [default: all on a GPU]"
        ),
    ] = None
    one_engine: Annotated[
        bool,
        _work(
            "--one-engine", help="Plain runs on the drafting engine: for models too large twice."
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where the record goes."""

    out: Annotated[str | None, _output("--out", "-o", help="Write the record to this file.")] = None
    plots: Annotated[str | None, _output("--plots", help="Draw PNG and SVG into this folder.")] = (
        None
    )
    report: Annotated[str | None, _output("--report", help="Write an HTML page to this file.")] = (
        None
    )
    as_json: Annotated[bool, _output("--json", help="Print only the line of JSON.")] = False

    def check(self) -> None:
        """Refuse what cannot be written before anything is measured."""
        if self.plots is not None or self.report is not None:
            need_matplotlib()


def command(app: typer.Typer, name: str | None = None) -> Callable[..., Callable[..., None]]:
    """Register a command whose errors are one line each and whose option groups are flat."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def guarded(*args: Any, **values: Any) -> None:
            from foretell.cli import errors_as_lines  # here, since cli.py imports the commands

            with errors_as_lines():
                function(*args, **values)

        app.command(name)(flatten(guarded))
        return function

    return register


def finish(record: Record, output: OutputOptions) -> None:
    """Show, save, draw; the JSON line comes last."""
    if not output.as_json:
        show(console(), record)
    if output.out is not None:
        record.save(Path(output.out))
    if output.plots is not None:
        for plot in plots(record):
            for kind in ("png", "svg"):
                plot.save(Path(output.plots), kind)
    if output.report is not None:
        save_report([record], Path(output.report))
    print(record.line(), flush=True)


@dataclass(slots=True)
class Bench:
    """A benchmark under way: it watches the machine and collects warnings.

    Args:
        watch: None where nothing is timed on this machine.
    """

    engine: EngineOptions | None
    warnings: list[str]
    watch: Watch | None
    tell: Tell

    def record(
        self,
        kind: str,
        settings: Mapping[str, Any],
        rows: Sequence[object],
        extra: Mapping[str, Any] | None = None,
    ) -> Record:
        """The record, with what was seen of other processes in the meantime."""
        busy = None if self.watch is None else self.watch.stop()
        if busy is not None and busy.voids:
            self.warnings.append(busy.warning("during"))
        machine = describe(None if self.engine is None else accelerator(self.engine))
        return Record.made(kind, machine, settings, rows, self.warnings, extra)


@contextmanager
def bench(
    engine: EngineOptions | None, warnings: Sequence[str] = (), timed: bool = True
) -> Iterator[Bench]:
    """Look at the machine before, and show what is going on meanwhile.

    Args:
        timed: False = the figures do not depend on how busy this machine is.
    """
    from foretell.cli import notes_on_stderr, progress  # here, since cli.py imports the commands

    said = list(warnings)
    if timed and (before := look()).voids:
        said.append(before.warning("before"))
    for warning in said:
        print(f"foretell: warning: {warning}", file=sys.stderr)
    with progress() as tell, notes_on_stderr():
        yield Bench(engine, said, Watch() if timed else None, tell)


def accelerator(engine: EngineOptions) -> str:
    """ "cuda" or "cpu"."""
    import torch

    device = str(engine.arguments().get("device") or "auto")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.partition(":")[0]


def on_gpu(engine: EngineOptions) -> bool:
    """It runs on a GPU, where the host plans a step ahead."""
    return accelerator(engine) == "cuda"


def asked_variant(engine: EngineOptions) -> Variant:
    """The drafter that the options ask for, else the default model's own head, else n-gram, which needs no weights."""
    arguments = engine.with_drafts().arguments()
    config = dict(arguments.get("speculative_config") or {})
    model, count = arguments.get("speculate_model"), arguments.get("num_speculative_tokens")
    if model in ("ngram", "[ngram]"):
        config.setdefault("method", "ngram")
    elif model is not None:
        config.setdefault("model", model)
    if count is not None:
        config.setdefault("num_speculative_tokens", count)
    chosen = config.get("adaptive")
    if chosen is None:  # as the engine decides it
        chosen = config.get("acceptance", "match") == "match"
    return given_variant(config, bool(chosen))


def opener(engine: EngineOptions, one_engine: bool = True) -> Opener:
    """Makes the engine of a variant with the options given.

    Args:
        one_engine: no other engine is open at the same time. Else, on a GPU, the plain one takes half of the share of
            the memory, and the other one what is left of it.
    """
    from foretell.cli import fetch

    fetch(engine.arguments().get("model"), engine.arguments().get("revision"))
    shared = accelerator(engine) == "cuda" and not one_engine

    def open_llm(variant: Variant) -> LLM:
        arguments = engine.without_drafts().arguments()
        if variant.plain and shared and "kv_cache_memory_bytes" not in arguments:
            share = float(arguments.get("gpu_memory_utilization", 0.9)) / 2
            arguments["gpu_memory_utilization"] = share
        return LLM(**arguments, speculative_config=variant.speculative)

    return open_llm


def offline_plan(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: PromptOptions,
    runs: RunOptions,
    batch: int | None,
) -> Plan:
    """What to run; raises ValueError."""
    if runs.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {runs.repeats}")
    if batch is not None and batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    warm_up = runs.warm_up_tokens
    if warm_up is None and accelerator(engine) == "cpu":
        warm_up = WARM_UP_TOKENS
    return Plan(
        prompts=prompts.load(),
        params=replace(sampling.params(), detokenize=True),
        batch=batch,
        repeats=runs.repeats,
        warm_up_tokens=warm_up,
        raw=prompts.raw,
        one_engine=runs.one_engine,
    )


def settings_of(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: PromptOptions,
    loaded: Sequence[BenchPrompt],
) -> dict[str, Any]:
    """What a record says of the work, the same for all offline benchmarks."""
    arguments = engine.without_drafts().arguments()
    return {
        "model": arguments.pop("model", None),
        "engine": arguments,
        "sampling": {k: v for k, v in asdict(sampling).items() if v is not None},
        "prompts": prompts.prompts,
        "num_prompts": len(loaded),
        "categories": categories(loaded),
        "chat_template": not prompts.raw,
        "acceptance_valid": not sampling.ignore_eos,
        "prefix_cache": "emptied before every run",
    }


def sampling_warnings(sampling: SamplingOptions) -> list[str]:
    """What the sampling does to acceptance."""
    if sampling.ignore_eos:
        return [
            "--ignore-eos: answers go on behind their end, so acceptance says nothing about real work "
            "(acceptance_valid is false); costs and speeds of steps hold"
        ]
    return []


def numbers(text: str, name: str) -> list[int]:
    """Whole numbers above 0 with commas between.

    Raises:
        ValueError: it is something else; names the option.
    """
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"{name} must be whole numbers above 0 with commas between, got {text!r}")
    return found


def rates(text: str, name: str) -> list[float]:
    """Numbers above 0 with commas between; "inf" is one.

    Raises:
        ValueError: it is something else; names the option.
    """
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or not all(rate > 0 for rate in found):
        raise ValueError(f"{name} must be numbers above 0 with commas between, got {text!r}")
    return found
