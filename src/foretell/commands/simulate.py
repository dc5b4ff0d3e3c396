"""`foretell bench simulate`: loads and fleets beyond this machine, from step costs that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from typer import Option

from foretell.bench.costs import Costs, read_costs
from foretell.bench.fleet import Fleet, accepting_of, capacity, needed, under
from foretell.bench.machine import Machine, describe
from foretell.bench.record import Record, load
from foretell.bench.serving import Limits
from foretell.bench.simulate import Accepting, Router, Shape, Traffic, constant_acceptance
from foretell.commands.bench_options import OutputOptions, finish, numbers, rates

TRAFFIC, ENGINE = "Traffic", "Replicas"


def _traffic(*names: str, help: str) -> Any:
    return Option(*names, help=help, rich_help_panel=TRAFFIC)


def _engine(*names: str, help: str) -> Any:
    return Option(*names, help=help, rich_help_panel=ENGINE)


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """What arrives, and what users accept."""

    rate: Annotated[
        str, _traffic("--rate", help="Requests a second on the whole fleet; several with commas.")
    ] = "1,2,4,8"
    requests: Annotated[int, _traffic("--requests", help="Simulated for each load.")] = 1000
    lengths: Annotated[
        str,
        _traffic("--lengths", help="prompt:output tokens, several with commas, or a result file."),
    ] = "256:256"
    accepted: Annotated[
        str | None,
        _traffic("--accepted", help="Mean accepted length of the largest tree, or a result file."),
    ] = None
    seed: Annotated[int, _traffic("--seed", help="Same seed, same traffic.")] = 0
    ttft_limit: Annotated[float | None, _traffic("--ttft-limit", help="ms, for 99 of 100.")] = None
    tpot_limit: Annotated[float | None, _traffic("--tpot-limit", help="ms, for 99 of 100.")] = None
    e2el_limit: Annotated[float | None, _traffic("--e2el-limit", help="ms, for 99 of 100.")] = None

    @property
    def limits(self) -> Limits:
        """What users accept."""
        return Limits(self.ttft_limit, self.tpot_limit, self.e2el_limit)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The engines."""

    replicas: Annotated[
        str, _engine("--replicas", help="Engines behind one router; several with commas.")
    ] = "1"
    gpus: Annotated[int, _engine("--gpus-per-replica", help="That the costs were measured on.")] = 1
    router: Annotated[str, _engine("--router", help="least, turn or random.")] = "least"
    tree: Annotated[
        int | None,
        _engine("--tree", help="Of the costs' trees, by number; 0 is plain. [default: the best]"),
    ] = None
    max_num_seqs: Annotated[int, _engine("--max-num-seqs", help="As of the engine.")] = 64
    max_num_batched_tokens: Annotated[
        int, _engine("--max-num-batched-tokens", help="As of the engine.")
    ] = 2048
    max_model_len: Annotated[int, _engine("--max-model-len", help="As of the engine.")] = 8192
    kv_tokens: Annotated[
        int, _engine("--kv-tokens", help="Tokens that the KV cache of a replica holds.")
    ] = 262144

    def shape(self, costs: Costs) -> Shape:
        """One replica; raises ValueError."""
        trees = len(costs.steps.trees)
        if self.tree is not None and not 0 <= self.tree < trees:
            raise ValueError(f"--tree {self.tree}: the costs know trees 0 to {trees - 1}")
        return Shape(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            blocks=self.kv_tokens // 16 + 1,
            tree=self.tree,
        )


def simulate(
    traffic: TrafficOptions,
    fleet: FleetOptions,
    output: OutputOptions,
    costs: Annotated[str, Option("--costs", help="A record of `foretell bench steps`.")],
) -> None:
    """Predict throughput and latency of loads and fleets from measured step costs; nothing is run."""
    output.check()
    known = load(Path(costs))
    measured = read_costs(known)
    loads, sizes = rates(traffic.rate, "--rate"), numbers(fleet.replicas, "--replicas")
    lengths = _lengths(traffic.lengths)
    asked = Fleet(
        fleet.shape(measured),
        measured,
        _accepting(traffic.accepted, measured),
        fleet.gpus,
        _router(fleet.router),
    )
    rows = [
        under(asked, Traffic(lengths, rate, traffic.requests, traffic.seed), size, traffic.limits)
        for size in sizes
        for rate in loads
    ]
    extra: dict[str, Any] = {}
    if traffic.limits.any:
        most = capacity(
            asked, Traffic(lengths, 1.0, traffic.requests, traffic.seed), traffic.limits
        )
        extra["capacity_per_replica"] = most
        extra["gpus_needed"] = {
            f"{rate:g}": needed(most, rate, fleet.gpus) for rate in loads if not math.isinf(rate)
        }
    settings = {
        "model": known.settings.get("model"),
        "costs": costs,
        "costs_source": measured.source,
        "traffic": traffic,
        "fleet": fleet,
        "accepted": asked.accepting.rates,
    }
    record = Record.made("simulate", _machine(known), settings, rows, known.warnings, extra)
    finish(record, output)


def _machine(costs: Record) -> Machine:
    """This machine computed, but the figures speak of the one that was measured."""
    own = describe()
    return Machine(
        commit=own.commit,
        device=str(costs.machine.get("device")),
        accelerator=str(costs.machine.get("accelerator")),
        cpu=own.cpu,
        cores=own.cores,
        threads=own.threads,
        python=own.python,
        torch=own.torch,
        foretell=own.foretell,
        system=own.system,
    )


def _router(name: str) -> Router:
    if name not in get_args(Router):
        raise ValueError(f"--router must be one of {', '.join(get_args(Router))}, got {name!r}")
    return cast("Router", name)


def _lengths(text: str) -> list[tuple[int, int]]:
    """Pairs as text, or those of a result file's first row that has them."""
    path = Path(text)
    if path.is_file():
        rows: Sequence[Any] = load(path).rows
        found = next((row["lengths"] for row in rows if row.get("lengths")), None)
        if found is None:
            raise ValueError(f"{path} has no lengths; give a record of bench throughput or sweep")
        return [(int(p), int(o)) for p, o in found]
    try:
        pairs = [tuple(map(int, part.split(":"))) for part in text.split(",")]
        return [(prompt, output) for prompt, output in pairs]
    except ValueError:
        raise ValueError(
            f"--lengths {text!r} is neither a file nor pairs like 256:128,1024:64"
        ) from None


def _accepting(text: str | None, costs: Costs) -> Accepting:
    """A mean length of the largest tree, or what a result file saw; None = nothing is accepted."""
    if text is None:
        return Accepting(())
    path = Path(text)
    if path.is_file():
        row = next((row for row in reversed(load(path).rows) if row.get("acceptance")), None)
        if row is None:
            raise ValueError(f"{path} has no acceptance in it; nothing was drafted there")
        return accepting_of(row)
    try:
        length = float(text)
    except ValueError:
        raise ValueError(f"--accepted {text!r} is neither a file nor a number") from None
    return constant_acceptance(length, max(costs.steps.trees, key=lambda tree: tree.nodes))
