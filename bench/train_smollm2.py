"""Makes the heads that come with foretell from nothing: SmolLM2-135M-Instruct's answers, an EAGLE-3 head, Medusa heads.

    python bench/train_smollm2.py all --model smollm2-135m.gguf --prompts data/prompts --out runs/smollm2

Stages can be run alone (answers, eagle3, medusa, accept); each goes on where it was cut short. Answers are greedy.
Prompts of train_*.jsonl are trained on, the other files are evaluation and never are. One H200 takes about ten
minutes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import torch

from foretell.model.hub import resolve
from foretell.model.load import load_model
from foretell.runner.load import resolve_device
from foretell.training.check import Checker
from foretell.training.data import Asked, read_answers, read_asked
from foretell.training.eagle import EagleSettings
from foretell.training.loop import LoopSettings, Report
from foretell.training.medusa import MedusaSettings
from foretell.training.plan import AnswerSettings, Plan
from foretell.training.run import Hooks, answer, questions_of, run

EVALUATION = ("mt_bench", "humaneval", "gsm8k_test", "spec_bench")
CHECKED = ("mt_bench_101", "koala", "ifeval")  # for choosing a checkpoint; not among the four
WORDINGS = (
    "Answer in detail.",
    "Think step by step.",
    "Give a short answer.",
    "Explain it to a beginner.",
    "Give an example.",
    "Answer with a list.",
    "Write a full paragraph.",
    "First say what the task is, then solve it.",
)
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f}] {text}", flush=True)


def hooks() -> Hooks:
    last = [0.0]

    def answering(tally: object) -> None:
        if time.monotonic() - last[0] > 10:
            last[0] = time.monotonic()
            say(f"{tally.done}/{tally.total} answers, {tally.tokens_per_s:.0f} tokens/s")  # type: ignore[attr-defined]

    def training(report: Report) -> None:
        agreement = " ".join(f"{share:.3f}" for share in report.agreement)
        say(
            f"step {report.step} {report.progress:.1%} loss {report.losses[0]:.3f} agree {agreement} "
            f"lr {report.learning_rate:.1e} {report.tokens_per_s:.0f} tokens/s, {report.seconds_left:.0f} s left"
        )

    return Hooks(say, answering, training, lambda step, found: say(f"checked {step}: {found}"))


def answers(a: argparse.Namespace) -> list[Path]:
    """Answer in several processes: one alone is bound by its host thread."""
    parts = [a.out / f"answers-{a.round}-{i}" for i in range(a.workers)]
    if a.worker is not None:
        answer_part(a, a.worker, parts[a.worker])
        return parts
    command = [sys.executable, *sys.argv]
    command[command.index(a.stage)] = "answers"
    running = [subprocess.Popen([*command, "--worker", str(i)]) for i in range(a.workers)]
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(f"answering failed: exit codes {codes}")
    return parts


def answer_part(a: argparse.Namespace, which: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    own = out / "answers.jsonl"
    others = [p for p in a.out.glob("answers-*/answers.jsonl") if p != own]
    known = {e.id for path in others for e in read_answers(path, on_broken="skip")}
    asked = [
        one
        for one in questions(a)
        if zlib.crc32(one.id.encode()) % a.workers == which and one.id not in known
    ]
    plan = Plan(
        kind="eagle3",
        out=out,
        model=a.model,
        device=a.device,
        length=a.length - a.answer_tokens,
        answer=AnswerSettings(
            max_tokens=a.answer_tokens,
            requests=a.requests,
            minutes=a.answer_minutes,
            kv_bytes=a.kv_gb << 30,
        ),
    )
    answer(plan, asked[: a.limit], own, hooks())


def questions(a: argparse.Namespace) -> list[Asked]:
    """All prompts of train_*.jsonl, then each again with one of WORDINGS behind it; each half in a mixed order.

    A run that is cut short has some of every file, and the same prompt worded otherwise gets another answer.
    """
    files = sorted(a.prompts.glob("train_*.jsonl"))
    plain = [one for path in files for one in read_asked(path)]
    random.Random(0).shuffle(plain)
    again = []
    for place, one in enumerate(plain):
        words = WORDINGS[place % len(WORDINGS)]
        text = f"{one.messages[0]['content']}\n\n{words}"
        again.append(Asked(f"{one.id}-again", ({"role": "user", "content": text},)))
    random.Random(1).shuffle(again)
    return plain + again


def plan_of(a: argparse.Namespace, kind: str, minutes: float) -> Plan:
    parts = sorted(a.out.glob("answers-*/answers.jsonl"))
    return Plan(
        kind=kind,  # type: ignore[arg-type]
        out=a.out / kind,
        model=a.model,
        answers=tuple(parts),
        on_broken="skip",
        checked_with=tuple(a.prompts / f"{name}.jsonl" for name in CHECKED),
        checked=a.checked,
        device=a.device,
        length=a.length,
        draft_vocab_size=a.draft_vocab_size,
        intermediate=a.intermediate,
        memory=a.memory_gb << 30,
        check_tokens=a.new_tokens,
        predict=False,
        loop=LoopSettings(
            minutes=minutes,
            rows=a.rows,
            learning_rate=a.learning_rate,
            warmup=100,
            check_every=a.check_every,
            report_every=a.report_every,
        ),
        eagle=EagleSettings(steps=a.steps, hard=a.hard),
        medusa=MedusaSettings(heads=4, layers=a.medusa_layers),
        initial=a.initial,
    )


def train_eagle3(a: argparse.Namespace) -> None:
    say(json.dumps(run(plan_of(a, "eagle3", a.eagle_minutes), hooks())["checks"]))


def train_medusa(a: argparse.Namespace) -> None:
    plan = plan_of(a, "medusa", a.medusa_minutes)
    plan = replace(
        plan, loop=replace(plan.loop, learning_rate=1e-3, check_every=None), initial=None
    )
    say(json.dumps(run(plan, hooks())["checks"]))


def accept(a: argparse.Namespace) -> dict[str, object]:
    """Acceptance of the heads on the four evaluation sets."""
    source = resolve(a.model)
    target = load_model(source, device=resolve_device(a.device))
    files = [a.prompts / f"{name}.jsonl" for name in EVALUATION]
    asked = questions_of(files, source, len(files) * a.questions)
    found: dict[str, object] = {}
    for name, folder, tokens, tree in (
        ("eagle3 chain 5", "eagle3", 5, None),
        ("eagle3 chain 7", "eagle3", 7, None),
        ("eagle3 tree 26", "eagle3", 5, "eagle"),
        ("eagle3 grown 60", "eagle3", 5, {"top_k": 10, "depth": 6, "nodes": 60}),
        ("medusa tree 63", "medusa", 4, "mc_sim_7b_63"),
    ):
        head = (a.heads or a.out) / folder
        if not (head / "config.json").exists() or (a.drafts and name not in a.drafts):
            continue
        checker = Checker(target, asked, a.new_tokens, tokens, tree)  # type: ignore[arg-type]
        counts = checker.acceptance(head)
        found[name] = {category: c.record() for category, c in counts.items()}
        say(f"{name}: " + ", ".join(f"{k} {c.mean:.3f}" for k, c in counts.items()))
    (a.out / "acceptance.json").write_text(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("all", "answers", "eagle3", "medusa", "accept"))
    parser.add_argument("--model", default=None)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", type=Path, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--worker", type=int, default=None)
    parser.add_argument("--round", default="0", help="name of this round of answers")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--kv-gb", type=int, default=9)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--answer-minutes", type=float, default=None)
    parser.add_argument("--eagle-minutes", type=float, default=5.0)
    parser.add_argument("--medusa-minutes", type=float, default=1.0)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, default=None)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--medusa-layers", type=int, default=2)
    parser.add_argument("--medusa-rate", type=float, default=2e-3)
    parser.add_argument("--hard", type=float, default=0.5)
    parser.add_argument("--memory-gb", type=int, default=60)
    parser.add_argument("--checked", type=int, default=60)
    parser.add_argument("--check-every", type=int, default=None)
    parser.add_argument("--report-every", type=int, default=50)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--drafts", nargs="*", default=(), help="only these, by name")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--initial", type=Path, default=None)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    stages = {"answers": answers, "eagle3": train_eagle3, "medusa": train_medusa, "accept": accept}
    names = tuple(stages) if a.stage == "all" else (a.stage,)
    result: object = None
    for name in names:
        say(f"stage {name}")
        result = stages[name](a)  # type: ignore[operator]
    print(json.dumps({"stage": a.stage, "result": result if names[-1] == "accept" else None}))


if __name__ == "__main__":
    main()
