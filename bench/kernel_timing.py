"""Timing by graph replays, and the table that benchmarks of kernels write; used by `kernels.py` beside it.

A call is captured many times over rotating inputs and replayed: launch gaps are those of a model's step, and the
second-level cache helps no more than it would between layers. Not a place for shapes or kernels.
"""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

COLD_BYTES = 192 << 20  # inputs that rotate are at least so large together
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
Call = Callable[[], object]


@dataclass(slots=True)
class Row:
    """One measurement."""

    name: str
    shape: str
    us: float
    floor_us: float
    error: float | None  # relative, of the result that was timed; None: not checked here
    note: str = ""


@dataclass(slots=True)
class Bench:
    """Collects rows and prints them as they come."""

    bandwidth: float  # bytes a second
    deadline: float
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Print, and keep for the file."""
        print(line, flush=True)
        self.lines.append(line)

    def add(
        self,
        name: str,
        shape: str,
        calls: Sequence[Call],
        nbytes: float,
        error: float | None = None,
        note: str = "",
    ) -> float:
        """Time the calls (one is enough if it is cold by its size) and report; microseconds."""
        us = microseconds(calls)
        row = Row(name, shape, us, nbytes / self.bandwidth * 1e6, error, note)
        self.rows.append(row)
        wrong = error is not None and not error < 0.02
        if wrong:
            self.failures.append(f"{name} {shape}: error {error}")
        shown = "" if error is None else f"{error:8.1e}{' WRONG' if wrong else ''}"
        self.say(
            f"{name:18s} {shape:34s} {us:9.1f} us  floor {row.floor_us:8.1f}  {row.floor_us / us:5.0%}  {shown} {note}"
        )
        return us

    def try_case(self, what: str, case: Call) -> None:
        """Run a case; a failure is reported and does not stop the others."""
        if time.monotonic() > self.deadline:
            self.failures.append(f"{what}: no time left")
            return
        try:
            case()
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            self.failures.append(f"{what}: {type(error).__name__} {first}")
            self.say(f"FAILED {what}: {type(error).__name__} {str(error)[:400]}")
            self.lines.append(traceback.format_exc())


def microseconds(calls: Sequence[Call]) -> float:
    """Median time of one call, from graph replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 16 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    per_replay = rounds * len(calls)
    estimate = _elapsed_ms(graph, 2) / 2
    replays = max(1, min(50, math.ceil(6.0 / max(estimate, 1e-3))))
    samples = [_elapsed_ms(graph, replays) / replays / per_replay for _ in range(5)]
    return statistics.median(samples) * 1e3


def _elapsed_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def relative(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected||; infinite where the output is not finite."""
    if not torch.isfinite(out).all():
        return math.inf
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(8):  # not captured: in a graph a copy is another node, and slower
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Standard normal numbers on the device."""
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def copies(nbytes: float, most: int = 48) -> int:
    """How many input sets make the rotation cold."""
    return max(1, min(most, math.ceil(COLD_BYTES / nbytes)))
