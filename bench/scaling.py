"""How far one measured GPU goes: step costs from a recorded run, checked against a run left out, and fleets simulated.

    python bench/scaling.py [--result bench/results/FILE.json] [--out bench/results/FILE.json]

The recorded runs (bench/gpu.py) are whole batches, prompts and all. Costs are fitted so that the simulated batch takes
as long as the real one. How much of it is prompts was not recorded in older files; there it is bounded from above: what
a further request costs, less the time to read its KV at the measured copy bandwidth. Loads with the recorded lengths
do not depend on that split.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretell.bench.costs import Costs, PromptCosts
from foretell.bench.fleet import Fleet, batch_seconds, capacity, needed, under
from foretell.bench.machine import describe
from foretell.bench.record import Record
from foretell.bench.serving import Limits
from foretell.bench.simulate import Accepting, Shape, Traffic, constant_acceptance
from foretell.spec.costs import StepCosts
from foretell.spec.tree import chain

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "2026-12-01-h200-llama-3.1-8b.json"
OUT = HERE / "results" / "2026-12-01-h200-llama-3.1-8b-simulated.json"
PROMPT, OUTPUT = 256, 256  # tokens of bench/gpu.py
MEAN = 4.0  # accepted length that it forces: three of five in every step
FORCED = Accepting((1.0, 1.0, 1.0, 0.0))
KV_BYTES = 2 * 32 * 8 * 128 * 2  # of a token of Llama-3.1-8B in bf16
SHAPE = Shape(
    max_num_seqs=128,
    max_num_batched_tokens=8192,
    max_model_len=PROMPT + OUTPUT + 64,
    blocks=(40 << 30) // (16 * KV_BYTES),
)
LIMITS = {
    "chat: first token in 0.5 s, 40 tokens/s": Limits(ttft_ms=500, tpot_ms=25),
    "fast: first token in 0.5 s, 125 tokens/s": Limits(ttft_ms=500, tpot_ms=8),
}
LOADS = (100, 1_000, 10_000, 100_000)  # requests a second
SPARE = 0.15  # of a fleet that may be down, draining or loading


@dataclass(frozen=True, slots=True)
class Cell:
    """One recorded batch."""

    k: int
    requests: int
    seconds: float
    prefill: float | None  # seconds of the same prompts alone, where that was recorded


def cells_of(result: Mapping[str, Any]) -> list[Cell]:
    """The rows of a result of bench/gpu.py."""
    return [
        Cell(r["k"], r["requests"], statistics.median(r["seconds"]), r.get("prefill_s"))
        for r in result["rows"]
        if "error" not in r
    ]


def prompt_costs(cells: Sequence[Cell], bandwidth: float) -> PromptCosts:
    """Measured prefills where there are some, else the upper bound."""
    plain = sorted((c for c in cells if c.k == 0), key=lambda c: c.requests)
    known = [(c.requests * PROMPT, c.prefill) for c in plain if c.prefill is not None]
    if known:
        most = max(known)
        return PromptCosts(0.0, most[1] / most[0], tuple((float(x), y) for x, y in known))
    few, many = plain[0], plain[-1]
    request = (many.seconds - few.seconds) / (many.requests - few.requests)
    read = OUTPUT * (PROMPT + OUTPUT / 2) * KV_BYTES / bandwidth
    return PromptCosts(0.0, max(request - read, 0.0) / PROMPT)


def fitted(cells: Sequence[Cell], prompts: PromptCosts, k: int, source: str) -> Costs:
    """Step costs with which every simulated batch takes as long as the recorded one."""
    steps = StepCosts((chain(0), chain(k)))
    for cell in cells:
        seconds = cell.seconds / (OUTPUT / (MEAN if cell.k else 1))
        for _ in range(6):
            own = StepCosts(steps.trees)
            for rows in range(1, cell.requests + 1):
                own.add(rows, int(cell.k > 0), seconds)
                own.add(rows, 0, seconds)
            ran = simulated(Costs(own, prompts), cell)
            paid = prompts.seconds(cell.requests * PROMPT)
            seconds *= (cell.seconds - paid) / (ran - paid)
        steps.add(cell.requests, int(cell.k > 0), seconds)
    return Costs(steps, prompts, source)


def simulated(costs: Costs, cell: Cell) -> float:
    """Seconds that the simulation gives a recorded batch."""
    tree = int(cell.k > 0)
    fleet = Fleet(replace(SHAPE, tree=tree), costs, FORCED if tree else Accepting(()))
    return batch_seconds(fleet, [(PROMPT, OUTPUT)] * cell.requests)


def checks(cells: Sequence[Cell], prompts: PromptCosts, k: int) -> list[dict[str, Any]]:
    """Every batch between two others, predicted from costs that were fitted without it."""
    sizes = sorted({cell.requests for cell in cells})
    found = []
    for cell in cells:
        if cell.requests in (sizes[0], sizes[-1]):
            continue
        rest = [c for c in cells if c.requests != cell.requests]
        seconds = simulated(fitted(rest, prompts, k, ""), cell)
        tokens = cell.requests * OUTPUT
        found.append(
            {
                "k": cell.k,
                "requests": cell.requests,
                "measured": tokens / cell.seconds,
                "predicted": tokens / seconds,
                "error": cell.seconds / seconds - 1,
            }
        )
    return found


def capacities(costs: Costs, requests: int) -> list[dict[str, Any]]:
    """Requests a second of one GPU, and GPUs for loads, plain and by accepted length."""
    largest = costs.steps.trees[-1]
    ways: list[tuple[str, int | None, Accepting]] = [("plain", 0, Accepting(()))]
    ways += [
        (
            f"EAGLE-3 k={largest.depth}, accepted length {length:g}",
            None,
            constant_acceptance(length, largest),
        )
        for length in (2.0, 3.0, 4.0)
    ]
    found = []
    for name, limits in LIMITS.items():
        for label, tree, accepting in ways:
            fleet = Fleet(replace(SHAPE, tree=tree), costs, accepting)
            most = capacity(fleet, Traffic([(PROMPT, OUTPUT)], 1.0, requests), limits)
            gpus = {str(load): needed(most, load, spare=SPARE) if most else None for load in LOADS}
            found.append({"limits": name, "label": label, "per_gpu": most, "gpus": gpus})
            print(json.dumps(found[-1]), flush=True)
    return found


def rows_of(costs: Costs, requests: int) -> list[Any]:
    """A curve of load on one GPU and on eight, drafts with an accepted length of 3."""
    accepting = constant_acceptance(3.0, costs.steps.trees[-1])
    fleet = Fleet(SHAPE, costs, accepting)
    return [
        under(
            fleet,
            Traffic([(PROMPT, OUTPUT)], rate * replicas, requests * replicas),
            replicas,
            LIMITS["chat: first token in 0.5 s, 40 tokens/s"],
        )
        for replicas in (1, 8)
        for rate in (5.0, 15.0, 25.0, 35.0, 45.0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text("utf-8"))
    cells = cells_of(result)
    k = max(cell.k for cell in cells)
    prompts = prompt_costs(cells, result["copy_bandwidth"])
    source = f"{result['shape']} on {result['device']}, bench/results/{arguments.result.name}"
    costs = fitted(cells, prompts, k, source)
    checked = checks(cells, prompts, k)
    for check in checked:
        print(json.dumps(check), flush=True)
    extra = {
        **costs.as_json(),
        "prompts_measured": bool(prompts.points),
        "checks": checked,
        "capacities": capacities(costs, arguments.requests),
        "spare": SPARE,
    }
    machine = replace(describe(), device=result["device"], accelerator="cuda", commit=None)
    settings = {
        "model": result["shape"],
        "costs_source": source,
        "lengths": f"{PROMPT} prompt tokens, {OUTPUT} output tokens",
        "shape": SHAPE,
        "requests": arguments.requests,
        "accepted_length": 3.0,
    }
    record = Record.made(
        "simulate", machine, settings, rows_of(costs, arguments.requests), extra=extra
    )
    record.save(arguments.out)
    print(record.line())


if __name__ == "__main__":
    main()
