"""One training run from end to end: answers, packed text, a drafter, the loop, checks in the engine, a report.

It only joins the parts; each of them can be used alone. A run lives in one folder: the best drafter in the folder
itself, ready to be loaded, and what the run needs to go on in `training/` below it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretell.config import EngineConfig
from foretell.engine.build import build_engine
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.hub import ModelSource, resolve
from foretell.model.load import load_config, load_model
from foretell.model.tokenizer import load_tokenizer
from foretell.runner.load import resolve_device
from foretell.sampling_params import SamplingParams
from foretell.training.answers import Tell, answer_file, written_by_target
from foretell.training.check import Checker, Question
from foretell.training.data import (
    Asked,
    Example,
    Header,
    pack,
    prompt_ids,
    read_answers,
    read_asked,
    template_of,
)
from foretell.training.dense import FUSED, table_for_training
from foretell.training.drafters import make_recipe
from foretell.training.loop import Loop, Processes, Report, State
from foretell.training.plan import Plan

HELD_OUT = 16  # prompts kept from training where none are given to check with


@dataclass(slots=True)
class Hooks:
    """Who is told what goes on."""

    say: Callable[[str], None] = lambda text: None
    answering: Tell = lambda tally: None
    training: Callable[[Report], None] = lambda report: None
    checked: Callable[[int, dict[str, Any]], None] = lambda step, found: None


def run(plan: Plan, hooks: Hooks | None = None) -> dict[str, Any]:
    """Train a drafter; returns the report, which is also in `training/report.json` (the first process writes it).

    Raises:
        ValueError: the data, the target, or a run found in the folder does not fit; nothing is lost.
        OSError: the disk is full; the same plan goes on from there once there is room.
    """
    device = resolve_device(plan.device)
    processes = Processes.join(device)
    hooks = Hooks() if hooks is None or processes.rank else hooks  # the first one speaks for all
    if device.type == "cuda" and processes.world > 1:
        device = torch.device("cuda", processes.rank % torch.cuda.device_count())
    if plan.capture_dir is not None and processes.world > 1:  # each sees other rows
        own = plan.capture_dir / f"process-{processes.rank}"
        plan = replace(plan, capture_dir=own, capture_bytes=plan.capture_bytes // processes.world)
    source = resolve(plan.model)
    plan.work.mkdir(parents=True, exist_ok=True)
    examples = texts(plan, source, hooks, processes)
    torch.manual_seed(plan.loop.seed)
    hooks.say("loading the target")
    ops = table_for_training(device)
    if device.type == "cuda":
        hooks.say(f"attention is {'fused' if ops is FUSED else 'plain'}")
    dense = load_model(source, dtype=plan.dtype, device=device, ops=ops)
    training, questions = _split(plan, examples, source)
    packed = pack(training, plan.length)
    hooks.say(
        f"{len(training)} texts in {packed.tokens.shape[0]} rows of {plan.length}, "
        f"{int(packed.assistant.sum())} tokens of the assistant's"
    )
    recipe, facts = make_recipe(plan, source, dense, training, packed)
    hooks.say(json.dumps(facts))
    checker = _checker(plan, source, dense, device, questions, processes)
    trial = plan.work / "last"

    def check(state: State) -> float:
        recipe.save(trial)
        if checker is None:
            return float(state.step)
        found = {name: a.record() for name, a in checker.acceptance(trial).items()}
        state.history.append({"step": state.step, "seconds": round(state.seconds, 1), **found})
        hooks.checked(state.step, found)
        return float(found["all"]["mean"]) if "all" in found else 1.0

    def keep() -> None:
        for file in trial.iterdir():
            shutil.copy2(file, plan.out / file.name)

    # Where there is a drafter before any training, the report says what training gave.
    begun = bool(questions) and (plan.kind == "draft" or plan.initial is not None)
    settings = replace(plan.loop, check_first=plan.loop.check_first or begun)
    loop = Loop(
        recipe, packed, settings, plan.work, stamp_of(plan, dense.config, facts), device,
        processes, check, hooks.training, keep,
    )  # fmt: skip
    state = loop.run()
    report = {
        "kind": plan.kind,
        "model": source.name,
        "steps": state.step,
        "seconds": round(state.seconds, 1),
        "texts": len(training),
        "assistant_tokens": int(packed.assistant.sum()),
        "best_acceptance": state.best if checker else None,
        **facts,
        "checks": state.history,
    }
    if not processes.rank:
        if checker is not None and plan.predict:
            report["predicted"] = predict(checker, plan.out, state.best)
        (plan.work / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    processes.leave()
    return report


def predict(checker: Checker, folder: Path, acceptance: float) -> dict[str, float]:
    """What acceptance is worth on this machine at one request, from what steps cost on it."""
    plain, drafting = checker.step_costs(folder)
    return {
        "plain_step_ms": round(1e3 * plain, 3),
        "drafting_step_ms": round(1e3 * drafting, 3),
        "speedup": round(acceptance * plain / drafting, 3),
    }


def texts(plan: Plan, source: ModelSource, hooks: Hooks, processes: Processes) -> list[Example]:
    """The answered texts of a plan, after answering what is missing."""
    tokenizer = load_tokenizer(source)
    if plan.answers:
        size = load_config(source).vocab_size
        header = Header(template_of(tokenizer), size)
        found = [e for path in plan.answers for e in read_answers(path, header, plan.on_broken)]
        return found[: plan.limit]
    path = plan.work / "answers.jsonl"
    asked = [a for file in plan.data for a in read_asked(file, plan.on_broken)]
    _unique(asked)
    if not processes.rank:
        answer(plan, asked, path, hooks)
    if processes.world > 1:
        torch.distributed.barrier()
    return list(read_answers(path))[: plan.limit]


def answer(plan: Plan, asked: list[Asked], path: Path, hooks: Hooks) -> None:
    """Let the target answer, in an engine that lives only as long."""
    settings = plan.answer
    which, of = settings.shard
    config = EngineConfig(
        model=plan.model,
        device=plan.device,
        dtype=plan.dtype,  # type: ignore[arg-type]  # checked there
        max_num_seqs=settings.requests,
        max_num_batched_tokens=max(2048, 32 * settings.requests),
        max_model_len=plan.length + settings.max_tokens,
        kv_cache_memory_bytes=settings.kv_bytes,
    )
    hooks.say("loading the target for its answers")
    engine, made = build_engine(config)
    tokenizer: Any = made
    if plan.synthetic:
        own = path.with_name("prompts.jsonl")
        asked = asked + written_by_target(
            own, plan.synthetic, engine, tokenizer, 2 * settings.requests, plan.loop.seed
        )
    params = SamplingParams(
        temperature=settings.temperature, max_tokens=settings.max_tokens, detokenize=False
    )
    deadline = None if settings.minutes is None else time.monotonic() + 60 * settings.minutes
    mine = asked[which::of]
    tally = answer_file(
        path, mine, engine, tokenizer, params, 2 * settings.requests, hooks.answering, deadline
    )
    hooks.say(
        f"{tally.done} of {tally.total} answered, {tally.tokens} tokens, {tally.tokens_per_s:.0f} tokens/s"
    )


def _unique(asked: Sequence[Asked]) -> None:
    seen: set[str] = set()
    for one in asked:
        if one.id in seen:
            raise ValueError(f"two prompts have the id {one.id!r}; give each its own")
        seen.add(one.id)


def _split(
    plan: Plan, examples: Sequence[Example], source: ModelSource
) -> tuple[list[Example], list[Question]]:
    """Texts to train on, and questions for the checks."""
    if plan.checked == 0:
        return list(examples), []
    if plan.checked_with:
        return list(examples), questions_of(plan.checked_with, source, plan.checked)
    kept = max(1, min(HELD_OUT, plan.checked, len(examples) // 10))
    if len(examples) < 2:
        raise ValueError(
            f"{len(examples)} texts are too few to keep one for the checks; give more prompts"
        )
    # Answers lie in the order they ended in, which an interruption changes.
    examples = sorted(examples, key=lambda example: example.id)
    every = len(examples) // kept
    held = set(range(0, kept * every, every))
    questions = [
        Question("held out", examples[i].tokens[: examples[i].spans[0][0]])
        for i in sorted(held)
        if examples[i].spans
    ]
    return [e for i, e in enumerate(examples) if i not in held], questions


def questions_of(paths: Sequence[Path], source: ModelSource, count: int) -> list[Question]:
    """The same number of prompts from each file, spread over it."""
    tokenizer = load_tokenizer(source)
    found = []
    each = max(1, count // len(paths))
    for path in paths:
        asked = read_asked(path)
        stride = max(1, len(asked) // each)
        found += [Question(path.stem, prompt_ids(a, tokenizer)) for a in asked[::stride][:each]]
    return found


def _checker(
    plan: Plan,
    source: ModelSource,
    dense: Decoder,
    device: torch.device,
    questions: Sequence[Question],
    processes: Processes,
) -> Checker | None:
    if not questions or processes.rank:
        return None
    dtype = str(dense.dtype).removeprefix("torch.")
    target = load_model(source, dtype=dtype, device=device)
    tree = "mc_sim_7b_63" if plan.kind == "medusa" and plan.medusa.heads >= 4 else None
    tokens = min(plan.tokens, plan.medusa.heads) if plan.kind == "medusa" else plan.tokens
    return Checker(target, questions, plan.check_tokens, tokens, tree)


def stamp_of(plan: Plan, config: ModelConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run must agree on."""
    loop = plan.loop
    return {
        "kind": plan.kind,
        "hidden_size": config.hidden_size,
        "target_layers": config.layers,
        "vocab_size": config.vocab_size,
        "length": plan.length,
        "seed": loop.seed,
        "rows": loop.rows,
        "accumulate": loop.accumulate,
        "learning_rate": loop.learning_rate,
        **{k: v for k, v in facts.items() if k != "covered"},
    }
