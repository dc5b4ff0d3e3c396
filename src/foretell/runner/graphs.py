"""StepGraphs: a decode step and its drafter's part as CUDA graphs, one per (bucket, tree, mode), captured on first use.

A bucket is a number of rows; a batch is padded to it with the dummy row of the slots, which is never live and writes
only to the null block. The captured functions are those of step.py, unchanged. On a CPU nothing is captured and the
same functions are called; so they are where a mode reads tensors that may be replaced (bias, bad words).

Invariant: what a replay reads and writes was allocated before its capture: slots, KV, weights and the graph's own pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretell.runner.step import Device, Outcome, decode_step, draft_step
from foretell.spec.nodes import Shape
from foretell.spec.processors import Mode

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(slots=True)
class Captured:
    """One captured decode step, and the drafting steps that may follow it."""

    rows: Tensor  # [bucket] int64, written before each replay
    graph: torch.cuda.CUDAGraph
    outcome: Outcome  # of all rows of the bucket; overwritten by the next replay
    drafts: dict[int, torch.cuda.CUDAGraph]  # by the tree that is drafted


class StepGraphs:
    """Captures and replays.

    Args:
        device: what steps work on.
        shapes: the trees that plans refer to by index.
        enabled: False runs everything eagerly (`enforce_eager`, or a CPU).
    """

    def __init__(self, device: Device, shapes: Sequence[Shape], enabled: bool) -> None:
        self.device = device
        self.shapes = shapes
        self.enabled = enabled
        sizes = device.slots.sizes
        self.keys = sizes.blocks * device.kv.block_size
        self.dummy = sizes.slots
        self.captures = 0
        self.replays = 0
        self._known: dict[tuple[int, int, Mode], Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    def covers(self, rows: int, mode: Mode) -> bool:
        """Whether a step of so many rows in this mode is replayed."""
        return self.enabled and rows <= BUCKETS[-1] and not (mode.bias or mode.bad_words)

    def decode(self, rows: Tensor, tree: int, mode: Mode) -> tuple[Captured, Outcome]:
        """Replay a decode step of `rows` ([B] int64 slots); the outcome is of those rows and lives until the next."""
        count = rows.shape[0]
        captured = self._captured(count, tree, mode)
        captured.rows[:count].copy_(rows)
        captured.rows[count:].fill_(self.dummy)
        captured.graph.replay()
        self.replays += 1
        return captured, _first_rows(captured.outcome, count)

    def draft(self, captured: Captured, next_tree: int, mode: Mode) -> None:
        """Replay the drafter's part of the step that was just replayed."""
        graph = captured.drafts.get(next_tree)
        if graph is None:
            shape = self.shapes[next_tree]
            graph = self._capture(lambda: self._draft_once(captured, shape, mode), captured.rows)
            captured.drafts[next_tree] = graph
        graph.replay()
        self.replays += 1

    def _captured(self, count: int, tree: int, mode: Mode) -> Captured:
        bucket = next(b for b in BUCKETS if b >= count)
        key = (bucket, tree, mode)
        if key not in self._known:
            slots = self.device.slots
            rows = torch.full((bucket,), self.dummy, dtype=torch.int64, device=slots.device)
            outcomes: list[Outcome] = []

            def once() -> None:
                outcomes.append(decode_step(self.device, rows, self.shapes[tree], mode, self.keys))

            graph = self._capture(once, rows)
            self._known[key] = Captured(rows=rows, graph=graph, outcome=outcomes[-1], drafts={})
        return self._known[key]

    def _draft_once(self, captured: Captured, shape: Shape, mode: Mode) -> None:
        draft_step(self.device, captured.rows, captured.outcome, shape, mode, self.keys)

    def _capture(self, once: Callable[[], None], rows: Tensor) -> torch.cuda.CUDAGraph:
        """Run `once` on dummy rows to warm up, then capture it; live rows are not touched by either."""
        live_rows = rows.clone()
        rows.fill_(self.dummy)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            once()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            once()
        rows.copy_(live_rows)
        self.captures += 1
        return graph


def _first_rows(outcome: Outcome, count: int) -> Outcome:
    """Views of the first rows of an outcome."""
    return replace(
        outcome,
        tokens=outcome.tokens[:count],
        count=outcome.count[:count],
        reason=outcome.reason[:count],
        drafted=outcome.drafted[:count],
        accepted=outcome.accepted[:count],
        start=outcome.start[:count],
        features=None if outcome.features is None else outcome.features[:count],
        logprobs=None if outcome.logprobs is None else outcome.logprobs.each(lambda t: t[:count]),
        nodes=outcome.nodes[:count],
        parents=outcome.parents[:count],
        path=outcome.path[:count],
        probs=None if outcome.probs is None else outcome.probs[:count],
    )
