"""Whole runs of `foretell train` on tiny models with a tokenizer: synthetic prompts, distillation, going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pretend_hub import text_model

from foretell.spec.checkpoint.source import open_checkpoint
from foretell.training.data import read_answers
from foretell.training.draft import DistilSettings
from foretell.training.loop import LoopSettings
from foretell.training.medusa import MedusaSettings
from foretell.training.plan import AnswerSettings, Plan
from foretell.training.run import run


def synthetic_plan(model: Path, out: Path) -> Plan:
    return Plan(
        kind="medusa",
        out=out,
        model=str(model),
        synthetic=12,
        device="cpu",
        dtype="float32",
        length=384,
        checked=2,
        check_tokens=8,
        predict=False,
        loop=LoopSettings(steps=3, rows=1, warmup=1),
        answer=AnswerSettings(max_tokens=24, requests=4, kv_bytes=1 << 24),
        medusa=MedusaSettings(heads=2),
    )


def test_the_target_writes_the_prompts_too_and_a_run_that_was_cut_goes_on_to_the_same_head(
    tmp_path: Path,
) -> None:
    model = text_model(tmp_path / "target", layers=2)
    report = run(synthetic_plan(model, tmp_path / "whole"))
    work = tmp_path / "whole" / "training"
    header, *prompts = (work / "prompts.jsonl").read_text("utf-8").splitlines()
    assert len(prompts) == 12
    answers = {example.id: example for example in read_answers(work / "answers.jsonl")}
    asked = {p["id"]: p["prompt"] for p in map(json.loads, prompts)}
    usable = {name for name, text in asked.items() if len(text.split()) > 2}
    assert set(answers) == usable
    assert len(usable) > 4
    assert report["texts"] == len(usable) - 1  # one is kept for the checks
    for example in answers.values():  # <|user|>text<|end|><|assistant|>answer
        ((start, end),) = example.spans
        assert 0 < start < end <= start + 24

    # The same, but killed in the middle of a prompt and, later, in the middle of an answer.
    cut = tmp_path / "cut" / "training"
    cut.mkdir(parents=True)
    kept = [header, *prompts[:5]]
    (cut / "prompts.jsonl").write_text("\n".join(kept) + "\n" + prompts[5][:9], "utf-8")
    lines = (work / "answers.jsonl").read_text("utf-8").splitlines()
    (cut / "answers.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:20], "utf-8")
    again = run(synthetic_plan(model, tmp_path / "cut"))
    assert {p["id"]: p["prompt"] for p in read_prompts(cut)} == asked
    assert (cut / "prompts.jsonl").read_text("utf-8").startswith("\n".join(kept))
    assert {e.id: e for e in read_answers(cut / "answers.jsonl")} == answers
    assert again["assistant_tokens"] == report["assistant_tokens"]
    one, other = (open_checkpoint(tmp_path / name) for name in ("whole", "cut"))
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.shapes)


def read_prompts(work: Path) -> list[dict[str, str]]:
    lines = (work / "prompts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines[1:]]


def test_prompts_of_another_target_are_refused_and_kept(tmp_path: Path) -> None:
    model = text_model(tmp_path / "target")
    work = tmp_path / "run" / "training"
    work.mkdir(parents=True)
    text = '{"template": "other", "vocab_size": 259}\n{"id": "synthetic-0", "prompt": "a b c"}\n'
    (work / "prompts.jsonl").write_text(text)
    with pytest.raises(ValueError, match="another template or vocabulary"):
        run(synthetic_plan(model, tmp_path / "run"))
    assert (work / "prompts.jsonl").read_text() == text


@pytest.mark.parametrize("reverse", [0.0, 1.0])
def test_a_distilled_draft_has_more_accepted_on_prompts_it_never_saw(
    reverse: float, tmp_path: Path
) -> None:
    model = text_model(tmp_path / "target", layers=3)
    data = tmp_path / "prompts.jsonl"
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    prompts = [f"{a} {b} {c}" for a in words for b in words[:4] for c in words[:3]]
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps({"prompt": f"{a} and {a}"}) + "\n" for a in words))
    plan = Plan(
        kind="draft",
        out=tmp_path / "draft",
        model=str(model),
        data=(data,),
        checked_with=(held,),
        checked=8,
        device="cpu",
        dtype="float32",
        length=192,
        tokens=3,
        check_tokens=24,
        predict=False,
        loop=LoopSettings(steps=120, rows=2, warmup=10, learning_rate=4e-3),
        answer=AnswerSettings(max_tokens=48, requests=32, kv_bytes=1 << 24),
        distil=DistilSettings(layers=1, reverse=reverse),
    )
    report = run(plan)
    before, after = report["checks"][0], report["checks"][-1]
    assert (before["step"], after["step"]) == (0, 120)
    print(before, after)
    assert after["all"]["mean"] > before["all"]["mean"] + 0.3
    assert report["best_acceptance"] == after["all"]["mean"]
    assert open_checkpoint(tmp_path / "draft").config["num_hidden_layers"] == 1
