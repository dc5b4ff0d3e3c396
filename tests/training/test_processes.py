"""Training in two processes through torchrun, over gloo: the weights of one process, cut or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cycle_training
import torch
from cycle_training import CPU, ROWS, STEPS, recipe_of, texts
from pretend_hub import text_model

from foretell.spec.checkpoint.load import identify
from foretell.spec.checkpoint.recognise import Family
from foretell.training.loop import Loop, LoopSettings

PROGRAM = Path(cycle_training.__file__)


def torchrun(*command: object) -> str:
    """Standard output of both processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def saved(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    return found


def weights_of(folder: Path, rows: int, accumulate: int) -> list[torch.Tensor]:
    """What one process makes of the same rows."""
    settings = LoopSettings(
        steps=STEPS, rows=rows, accumulate=accumulate, learning_rate=1e-2, warmup=3
    )
    Loop(recipe_of("eagle3"), texts(), settings, folder, {}, CPU).run()
    return list(saved(folder)["weights"])


def test_two_processes_train_as_one_and_a_cut_run_of_two_goes_on_bit_for_bit(
    tmp_path: Path,
) -> None:
    torchrun(PROGRAM, tmp_path / "whole", f"{tmp_path / 'cut'}:3")
    assert saved(tmp_path / "cut")["state"]["step"] == 3
    torchrun(PROGRAM, tmp_path / "cut")
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert whole["state"]["step"] == cut["state"]["step"] == STEPS
    assert all(torch.equal(a, b) for a, b in zip(whole["weights"], cut["weights"], strict=True))
    for moments in ("exp_avg", "exp_avg_sq"):
        for place, entry in whole["optimiser"]["state"].items():
            assert torch.equal(entry[moments], cut["optimiser"]["state"][place][moments])
    # One process that takes the two batches one after the other adds the same two gradients.
    alone = weights_of(tmp_path / "alone", ROWS, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole["weights"], alone, strict=True))
    # In one batch they are summed in another order.
    large = weights_of(tmp_path / "large", 2 * ROWS, 1)
    start = [p.detach() for p in recipe_of("eagle3").modules.parameters()]
    for a, b, before in zip(whole["weights"], large, start, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert not torch.equal(a, before)


def test_the_command_answers_trains_and_checks_in_two_processes(tmp_path: Path) -> None:
    model = text_model(tmp_path / "target", layers=2)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(12)))
    out, foretell = tmp_path / "head", Path(sys.executable).with_name("foretell")
    command = ["--no-python", foretell, "train", "medusa", "--model", model, "--data", data]
    command += ["--out", out, "--steps", 3, "--rows", 2, "--heads", 2, "--answer-tokens", 16]
    command += ["--length", 64, "--check-tokens", 8, "--check-prompts", 2, "--device", "cpu"]
    command += ["--dtype", "float32", "--capture-dir", tmp_path / "kept", "--answer-requests", 4]
    told = torchrun(*command, "--json")
    report = json.loads((out / "training" / "report.json").read_text())
    assert json.loads(told) == report  # said once
    assert report["steps"] == 3
    assert report["texts"] == 11
    assert report["checks"][-1]["all"]["drafts"] > 0
    assert identify(out).family is Family.MEDUSA
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "process-0",
        "process-1",
    ]
