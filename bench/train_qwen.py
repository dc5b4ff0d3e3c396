"""Qwen2.5-Coder-1.5B from nothing: its own answers, an EAGLE-3 head, its acceptance, its speed beside other drafters.

    python bench/train_qwen.py all --model qwen2.5-coder-1.5b.gguf --draft qwen2.5-coder-0.5b.gguf \\
        --prompts data/prompts --out runs/qwen

Meant for at most 25 minutes on one H200: 9 of answers, 11 of training, the rest for measuring. Stages are those of
train_smollm2.py, whose answering it shares, and `speed`: one request at a time, the same prompts for every drafter. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from foretell import LLM, SamplingParams
from foretell.model.hub import resolve
from foretell.model.load import load_model
from foretell.runner.load import resolve_device
from foretell.training.check import Checker
from foretell.training.eagle import EagleSettings
from foretell.training.loop import LoopSettings
from foretell.training.plan import Plan
from foretell.training.run import questions_of, run
from train_smollm2 import CHECKED, EVALUATION, answers, hooks, say


def eagle3(a: argparse.Namespace) -> object:
    plan = Plan(
        kind="eagle3",
        out=a.out / "eagle3",
        model=a.model,
        answers=tuple(sorted(a.out.glob("answers-*/answers.jsonl"))),
        on_broken="skip",
        checked_with=tuple(a.prompts / f"{name}.jsonl" for name in CHECKED),
        checked=30,
        device=a.device,
        length=a.length,
        draft_vocab_size=a.draft_vocab_size,
        memory=a.memory_gb << 30,
        predict=False,
        loop=LoopSettings(
            minutes=a.minutes, rows=a.rows, learning_rate=a.learning_rate, warmup=100
        ),
        eagle=EagleSettings(steps=a.steps, hard=0.5),
    )
    return run(plan, hooks())["checks"]


def accept(a: argparse.Namespace) -> object:
    source = resolve(a.model)
    target = load_model(source, device=resolve_device(a.device))
    files = [a.prompts / f"{name}.jsonl" for name in EVALUATION]
    asked = questions_of(files, source, len(files) * a.questions)
    found: dict[str, object] = {}
    for name, tree in (("chain 5", None), ("tree 26", "eagle")):
        counts = Checker(target, asked, 128, 5, tree).acceptance(a.out / "eagle3")
        found[name] = {category: c.record() for category, c in counts.items()}
        say(f"{name}: " + ", ".join(f"{k} {c.mean:.3f}" for k, c in counts.items()))
    return found


def speed(a: argparse.Namespace) -> object:
    """Tokens per second of one request at a time: plain, n-gram, the smaller model, the head."""
    source = resolve(a.model)
    files = [a.prompts / f"{name}.jsonl" for name in EVALUATION]
    asked = [list(q.prompt) for q in questions_of(files, source, len(files) * 2)]
    params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
    drafters: dict[str, dict[str, object]] = {
        "plain": {},
        "n-gram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
        "draft model": {"speculate_model": a.draft, "num_speculative_tokens": 5},
        "eagle3": {"speculate_model": str(a.out / "eagle3"), "num_speculative_tokens": 5},
    }
    if a.draft is None:
        del drafters["draft model"]
    rows: dict[str, object] = {}
    for name, more in drafters.items():
        with LLM(
            a.model, device=a.device, max_num_seqs=1, max_model_len=2048, seed=0, **more
        ) as llm:  # type: ignore[arg-type]
            llm.generate(asked[0], params, use_tqdm=False)
            rates = []
            for _ in range(3):
                started, tokens = time.perf_counter(), 0
                for prompt in asked:
                    output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
                    tokens += len(output.token_ids)
                rates.append(tokens / (time.perf_counter() - started))
            rows[name] = {
                "tokens_per_s": round(statistics.median(rates), 1),
                "spread": [round(min(rates), 1), round(max(rates), 1)],
                "acceptance_length": round(llm.get_metrics().mean_acceptance_length, 3),
            }
        say(f"{name}: {rows[name]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("all", "answers", "eagle3", "accept", "speed"))
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-1.5B-Instruct")
    parser.add_argument("--draft", default=None, help="a smaller model of the family")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--worker", type=int, default=None)
    parser.add_argument("--round", default="0")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--kv-gb", type=int, default=14)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--answer-minutes", type=float, default=8.5)
    parser.add_argument("--minutes", type=float, default=11.0)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--draft-vocab-size", type=int, default=16384)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--memory-gb", type=int, default=80)
    parser.add_argument("--questions", type=int, default=20)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    stages = {"answers": answers, "eagle3": eagle3, "accept": accept, "speed": speed}
    names = tuple(stages) if a.stage == "all" else (a.stage,)
    found: dict[str, object] = {}
    for name in names:
        say(f"stage {name}")
        result = stages[name](a)
        if name != "answers":
            found[name] = result
            (a.out / f"{name}.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
