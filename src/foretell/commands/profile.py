"""`foretell profile`: some steps under torch's profiler, as a table of phases and a trace file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from foretell.options import EngineOptions, SamplingOptions

if TYPE_CHECKING:
    from foretell.bench.profiler import Profile

KERNELS = 16  # lines of the table of kernels


def profile(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        str, Option("--prompts", help="mixed, a category of it, or a JSONL file of your own.")
    ] = "mixed",
    batch: Annotated[int, Option("--batch", min=1, help="Requests at once.")] = 1,
    steps: Annotated[int, Option("--steps", min=1, help="Steps that are profiled.")] = 20,
    out: Annotated[
        str, Option("--out", "-o", help="The trace, for chrome://tracing or Perfetto.")
    ] = "foretell-profile.json",
    as_json: Annotated[
        bool, Option("--json", help="Print JSON, and only JSON, on stdout.")
    ] = False,
) -> None:
    """Where a step's time goes: target, sampling, verification, drafter, copies and gaps."""
    from dataclasses import replace

    from foretell.bench import profiler
    from foretell.bench.prompts import load_prompts
    from foretell.llm import LLM
    from foretell.prompts import encode, read_prompts

    warm = 8
    params = sampling.params()
    wanted = (warm + steps) * 64  # however many tokens a step accepts
    params = replace(params, max_tokens=wanted, ignore_eos=True)
    chosen = load_prompts(prompts, batch)
    texts = [chosen[i % len(chosen)] for i in range(batch)]
    with LLM(**engine.arguments()) as llm:
        parts = llm.parts()
        ids = [
            encode(read_prompts(prompt.text)[0], parts.tokenizer, prompt.id).token_ids
            for prompt in texts
        ]
        found = profiler.profile(parts.driver.engine, ids, params, steps, Path(out), warm)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    sys.stdout.write(table(found))
    print(f"trace: {out} (open it in chrome://tracing or ui.perfetto.dev)", file=sys.stderr)


def table(found: Profile) -> str:
    """The profile as text."""
    lines = [f"{found.ms_per_step:.3f} ms a step, {found.steps} steps", ""]
    lines += [f"{'phase':10s} {'ms/step':>9s} {'share':>6s} {'calls':>7s}"]
    for part in found.phases:
        share = part.ms / found.ms_per_step
        lines.append(f"{part.name:10s} {part.ms:9.3f} {share:6.1%} {part.count:7.1f}")
    if found.kernels:
        lines += ["", f"{'kernel':60s} {'ms/step':>9s} {'calls':>7s}"]
        for part in found.kernels[:KERNELS]:
            lines.append(f"{part.name[:60]:60s} {part.ms:9.3f} {part.count:7.1f}")
    return "\n".join(lines) + "\n"
