"""Where the time of a step goes: an engine under torch's profiler, its kernels by phase.

Phases: the target (its products, attention and what is between them), sampling, verification (accept, commit, moves),
the drafter, copies between steps, and gaps, in which the device does nothing. On a CPU phases are Python calls:
"verify" is sampling and commit together, "host" what is left of a step.

On a GPU kernels overlap: a dependent one is started early and waits inside. So a kernel's time is not its duration but
what passes from the end of the kernel before it to its own; where it began after that end, the time between is a gap.
Not a benchmark: the profiler itself costs time, mostly the host's.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from foretell.engine.engine import Engine
from foretell.sampling_params import SamplingParams

TARGET, SAMPLE, VERIFY, DRAFT, COPIES, GAPS, HOST = (
    "target",
    "sample",
    "verify",
    "draft",
    "copies",
    "gaps",
    "host",
)
_SAMPLING = ("_part_kernel", "_filter_kernel", "_gumbel_kernel", "argmax", "ArgMax", "sort", "topk")
_VERIFYING = ("_decide_kernel", "_move_kernel", "_feature_kernel", "_accept_kernel")
_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a table.

    Args:
        name: of the phase or the kernel.
        ms: milliseconds a step.
        count: kernels or calls a step.
    """

    name: str
    ms: float
    count: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What a run of some steps was spent on."""

    steps: int
    ms_per_step: float
    phases: tuple[Part, ...]  # the longest first; they add up to `ms_per_step`
    kernels: tuple[Part, ...]  # likewise, of the device; empty on a CPU


def profile(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    steps: int,
    trace: Path | None = None,
    warm: int = 8,
) -> Profile:
    """Run prompts until they decode, then some steps under the profiler.

    Args:
        engine: idle.
        params: must allow more than `warm + steps` steps.
        trace: where the trace is written, for chrome://tracing or Perfetto.
        warm: steps before the first that counts (prompts, captures).
    """
    device = engine.runner.device.slots.device
    for i, prompt in enumerate(prompts):
        engine.add(f"profile-{i}", list(prompt), params, seed=i)
    taken = 0
    while taken < warm and engine.has_work():
        engine.step()
        taken += 1
    _name_phases(engine)
    kinds = [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    done = 0
    with torch.profiler.profile(activities=kinds) as profiler:
        while done < steps and engine.has_work():
            with record_function("step"):
                engine.step()
            done += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    for i in range(len(prompts)):
        engine.abort(f"profile-{i}")
    if done == 0:
        raise ValueError(
            f"the answers ended within {warm} steps; ask for longer ones (--max-tokens) or fewer drafts"
        )
    return read_trace(_events(profiler, trace), done)


def read_trace(events: Sequence[dict[str, Any]], steps: int) -> Profile:
    """The table of a trace's events, as the profiler writes them."""
    spans = [e for e in events if e.get("cat") == "user_annotation" and "dur" in e]
    kernels = [e for e in events if e.get("cat") in _DEVICE_KINDS]
    if kernels:
        return _of_device(kernels, events, spans, steps)
    return _of_host(spans, steps)


def _name_phases(engine: Engine) -> None:
    """Give the parts of this engine's steps their names in the trace; they keep them."""
    device = engine.runner.device
    target, runner = device.target, engine.runner
    target.forward = _named(TARGET, target.forward)  # type: ignore[method-assign]
    target.logits = _named(TARGET, target.logits)  # type: ignore[method-assign]
    runner.launch = _named(VERIFY, runner.launch)  # type: ignore[method-assign]
    runner.draft = _named(DRAFT, runner.draft)  # type: ignore[method-assign]


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def named(*args: Any) -> Any:
        with record_function(name):
            return function(*args)

    return named


def _events(profiler: torch.profiler.profile, trace: Path | None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json" if trace is None else trace
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["traceEvents"]
    return events


def _of_host(spans: list[dict[str, Any]], steps: int) -> Profile:
    """Phases by the time that a call spends in itself, not in calls that have a name of their own."""
    own: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    total = 0.0
    open_spans: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda s: (s["ts"], -s["dur"])):
        while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= span["ts"]:
            open_spans.pop()
        name, outer = _phase_of(span["name"]), open_spans[-1]["name"] if open_spans else None
        # A draft model is a decoder of its own and has no name; the target's in a draft is its head.
        if any(s["name"] == DRAFT for s in open_spans):
            name, outer = DRAFT, DRAFT
        own[name] += span["dur"]
        counts[name] += 1
        if outer is None:
            total += span["dur"]
        else:
            own[_phase_of(outer)] -= span["dur"]
        open_spans.append(span)
    return Profile(
        steps=steps,
        ms_per_step=total / 1e3 / steps,
        phases=_parts(own, counts, steps),
        kernels=(),
    )


def _phase_of(name: str) -> str:
    return HOST if name == "step" else name


def _of_device(
    kernels: list[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    spans: list[dict[str, Any]],
    steps: int,
) -> Profile:
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    drafting = [(s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] == DRAFT]
    phases: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    phase_counts: dict[str, int] = defaultdict(int)
    name_counts: dict[str, int] = defaultdict(int)
    ordered = sorted(kernels, key=lambda k: k["ts"] + k["dur"])
    end = min(k["ts"] for k in kernels)
    first = end
    for kernel in ordered:
        began, ended = kernel["ts"], kernel["ts"] + kernel["dur"]
        at = launched.get(kernel.get("args", {}).get("correlation"), -1.0)
        phase = _phase_of_kernel(kernel, any(a <= at < b for a, b in drafting))
        phases[GAPS] += max(0.0, began - end)
        took = ended - max(began, end)
        phases[phase] += took
        names[kernel["name"]] += took
        phase_counts[phase] += 1
        name_counts[kernel["name"]] += 1
        end = ended
    return Profile(
        steps=steps,
        ms_per_step=(end - first) / 1e3 / steps,
        phases=_parts(phases, phase_counts, steps),
        kernels=_parts(names, name_counts, steps),
    )


def _phase_of_kernel(kernel: dict[str, Any], drafting: bool) -> str:
    name = kernel["name"]
    if drafting:
        return DRAFT
    if kernel["cat"] != "kernel":
        return COPIES
    if any(part in name for part in _VERIFYING):
        return VERIFY
    return SAMPLE if any(part in name for part in _SAMPLING) else TARGET


def _parts(times: dict[str, float], counts: dict[str, int], steps: int) -> tuple[Part, ...]:
    """Microseconds of all steps as milliseconds of one, the longest first."""
    found = [Part(name, us / 1e3 / steps, counts[name] / steps) for name, us in times.items()]
    return tuple(sorted(found, key=lambda part: -part.ms))
