"""`foretell plan`: what an engine would take of a device's memory, and what fits, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from foretell.options import EngineOptions

LENGTHS = (512, 2048, 8192, 32768, 131072)
DOES_NOT_FIT = 3


def plan(
    engine: EngineOptions,
    gpu_memory: Annotated[
        str | None,
        Option("--gpu-memory", help="Of a GPU, such as 24GiB; left out, this machine's device."),
    ] = None,
    cpu_memory: Annotated[
        str | None, Option("--cpu-memory", help="Of a host, such as 16GiB, to run on its CPU.")
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print JSON, and only JSON, on stdout.")
    ] = False,
) -> None:
    """Bytes for weights, drafter, KV, workspace, logits and graphs; how many requests of which length fit.

    Works from config.json, a GGUF header or a hub model's config alone. Exit code 3: it does not fit.
    """
    from foretell.planning import Device, plan_memory, read_bytes
    from foretell.runner.memory_plan import explain, table

    device = None
    if gpu_memory is not None:
        device = Device(gpu=True, total=read_bytes(gpu_memory))
    elif cpu_memory is not None:
        device = Device(gpu=False, total=read_bytes(cpu_memory))
    made = plan_memory(engine_config(engine), device)
    if as_json:
        print(json.dumps(table(made, LENGTHS)))
    else:
        show(Console(highlight=False), made)
        if not made.works:
            print(explain(made))
    if not made.works:
        raise typer.Exit(DOES_NOT_FIT)


def engine_config(engine: EngineOptions) -> Any:
    """The EngineConfig that LLM would make of these options."""
    from foretell.config import EngineConfig
    from foretell.speculation import resolve_speculation

    given = engine.arguments()
    speculation = resolve_speculation(
        given.pop("speculate_model", None),
        given.pop("num_speculative_tokens", None),
        given.pop("speculative_config", None),
    )
    known = {field.name for field in fields(EngineConfig)}
    return EngineConfig(
        **{name: value for name, value in given.items() if name in known},
        drafter=speculation.drafter,
        acceptance=speculation.acceptance,
        tree=speculation.tree,
    )


def show(console: Console, made: Any) -> None:
    """Two tables: who takes what, and what fits."""
    parts = Table(title="Memory", title_justify="left")
    parts.add_column("part")
    parts.add_column("MiB", justify="right")
    parts.add_column("share", justify="right")
    parts.add_column("what", overflow="fold")
    for part in made.parts:
        share = part.bytes / made.budget if made.budget else 0.0
        parts.add_row(part.name, f"{part.bytes / (1 << 20):,.1f}", f"{share:.1%}", part.what)
    total = f"of {made.budget / (1 << 20):,.0f} MiB that may be used ({made.utilization:g} of all)"
    parts.add_row(
        "all", f"{made.used / (1 << 20):,.1f}", f"{made.used / max(made.budget, 1):.1%}", total
    )
    console.print(parts)
    if not made.works:
        return
    longest = made.division.longest
    fits = Table(title=f"Requests at once (longest: {longest:,} tokens)", title_justify="left")
    fits.add_column("tokens, prompt and answer", justify="right")
    fits.add_column("requests", justify="right")
    for length in (*(n for n in LENGTHS if n < longest), longest):
        fits.add_row(f"{length:,}", f"{made.requests(length):,}")
    console.print(fits)
