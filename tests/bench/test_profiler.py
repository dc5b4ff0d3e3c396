"""The table of a profile: phases add up to the steps, overlapping kernels are not counted twice, gaps are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lab import make_lab

from foretell.bench.profiler import Profile, profile, read_trace
from foretell.commands.profile import table
from foretell.sampling_params import SamplingParams
from foretell.spec.ngram import NgramDrafter
from foretell.spec.tree import chain


def times(found: Profile) -> dict[str, float]:
    return {part.name: round(part.ms, 6) for part in found.phases}


def kernel(name: str, ts: float, dur: float, launch: int) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": launch}}


def test_a_kernel_takes_the_time_since_the_end_of_the_one_before() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "user_annotation", "name": "draft", "ts": 50.0, "dur": 20.0},
        {"cat": "cuda_runtime", "name": "launch", "ts": 10.0, "args": {"correlation": 1}},
        {"cat": "cuda_runtime", "name": "launch", "ts": 60.0, "args": {"correlation": 2}},
        kernel("product", 1000, 4000, 1),
        kernel("norm", 1500, 4500, 1),  # started early, waited until the product ended
        kernel("_decide_kernel", 7000, 1000, 1),  # 1 ms after the norm
        kernel("product", 8000, 2000, 2),
    ]
    found = read_trace(events, steps=1)
    assert times(found) == {"target": 5.0, "draft": 2.0, "verify": 1.0, "gaps": 1.0}
    assert found.ms_per_step == pytest.approx(9.0)
    assert {part.name: part.ms for part in found.kernels}["product"] == pytest.approx(6.0)


def test_on_a_cpu_the_phases_add_up_to_the_step(tmp_path: Path) -> None:
    lab = make_lab(NgramDrafter(1, 3), chain(4))
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    found = profile(lab.engine, [[5, 6, 7, 5, 6, 7, 5, 6]], params, 4, tmp_path / "trace.json", 2)
    assert found.steps == 4
    assert sum(part.ms for part in found.phases) == pytest.approx(found.ms_per_step)
    assert {"target", "verify", "draft", "host"} == set(times(found))
    assert (tmp_path / "trace.json").stat().st_size > 0
    assert not lab.engine.has_work()
    assert table(found).startswith(f"{found.ms_per_step:.3f} ms a step, 4 steps\n")
