"""`foretell doctor`: runs the pair on prompts and says why it is as fast as it is, and what to change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from foretell.options import EngineOptions, SamplingOptions

if TYPE_CHECKING:
    from foretell.bench.prompts import BenchPrompt
    from foretell.doctor.evidence import Evidence
    from foretell.doctor.gather import Probe
    from foretell.llm import LLM

SOMETHING_WRONG = 4


def doctor(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        str, Option("--prompts", help="mixed, a category of it, or a JSONL file of your own.")
    ] = "mixed",
    count: Annotated[int, Option("--count", min=1, help="Prompts that are run.")] = 8,
    batch: Annotated[int, Option("--batch", min=1, help="Requests at once.")] = 1,
    raw: Annotated[bool, Option("--raw", help="Past the chat template, as text.")] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print JSON, and only JSON, on stdout.")
    ] = False,
) -> None:
    """Predicted against measured speed-up, where the time goes, what is wrong and what to do about it.

    Exit code 0: nothing is wrong. 4: something is; the first finding is the most valuable.
    """
    from foretell.doctor.findings import Rank, diagnose
    from foretell.doctor.report import as_dict, show

    notes = Console(stderr=True, highlight=False)
    with notes.status("loading") as status:
        evidence = examine(engine, sampling, prompts, count, batch, raw, status.update)
    findings = diagnose(evidence)
    if as_json:
        print(json.dumps(as_dict(evidence, findings)))
    else:
        show(Console(highlight=False), evidence, findings)
    sys.stdout.flush()
    if any(finding.rank is not Rank.HINT for finding in findings):
        raise typer.Exit(SOMETHING_WRONG)


def examine(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: str,
    count: int,
    batch: int,
    raw: bool,
    tell: Any,
) -> Evidence:
    """Load, run, measure; a failed load is evidence, too."""
    from foretell.bench.prompts import load_prompts
    from foretell.doctor.evidence import Evidence
    from foretell.llm import LLM

    chosen, params = load_prompts(prompts, count), sampling.params()
    try:
        llm = LLM(**engine.arguments())
    except (ValueError, RuntimeError, MemoryError) as error:
        return Evidence(method=engine.method, load_error=" ".join(str(error).split()))
    with llm:
        return of_llm(llm, chosen, params, batch, raw, tell)


def of_llm(
    llm: LLM, prompts: list[BenchPrompt], params: Any, batch: int, raw: bool, tell: Any
) -> Evidence:
    """The evidence of an open LLM."""
    from dataclasses import replace

    from foretell.bench.machine import Watch
    from foretell.doctor.evidence import Evidence
    from foretell.doctor.gather import machine_now, measure

    parts = llm.parts()
    engine = parts.driver.engine
    report, test = engine.compat, None
    if report is not None and report.self_test is not None and report.self_test.drafts:
        test = report.self_test
    templated, probes = _probes(parts.tokenizer, parts.chat_template, prompts, raw)
    target = engine.runner.device.target
    about = Evidence(
        method=engine.resolved.method,
        checkpoint=None
        if engine.resolved.checkpoint is None
        else Path(engine.resolved.checkpoint).name,
        acceptance=engine.resolved.acceptance,
        control=None if test is None else test.control,
        tested=None if test is None else test.accepted_length,
        causes=() if report is None else report.causes,
        template=templated,
        narrow=target.dtype.itemsize < 4,
    )
    watch = Watch()
    found = measure(engine, probes, params, batch, about, tell)
    return replace(found, machine=machine_now(watch.stop().cores))


def _probes(
    tokenizer: Any, template: str | None, prompts: list[BenchPrompt], raw: bool
) -> tuple[bool, list[Probe]]:
    """(whether a chat template that the model has was used, the prompts as tokens)."""
    from foretell.doctor.gather import Probe
    from foretell.prompts import ChatOptions, encode, encode_chat, read_prompts

    own = template is not None or bool(tokenizer.chat_template)
    probes = []
    for prompt in prompts:
        if own and not raw:
            made = encode_chat(prompt.messages, tokenizer, ChatOptions(template), prompt.id)
        else:
            made = encode(read_prompts(prompt.text)[0], tokenizer, prompt.id)
        probes.append(Probe(prompt.category, tuple(made.token_ids)))
    return not (own and raw), probes
