"""Outbox: a step's news on its way to the host. Copies start at once; the host waits only when it must.

On a GPU the copies go to pinned memory behind the step, and `ready` asks an event; on a CPU the news is there already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.ops.reference.verify import BROKEN, FULL, STOPPED
from foretell.runner.plan import DraftTree, LogprobRow, SlotResult, StepResult
from foretell.runner.step import LogprobRows, Outcome

_REASONS = {STOPPED: "stop", FULL: "length", BROKEN: "error"}


@dataclass(frozen=True, slots=True)
class Parcel:
    """Host copies of one outcome."""

    slots: tuple[int, ...]
    numbers: Tensor  # [B, 4 + D + 1] int64: count, reason, drafted, accepted, then the tokens
    logprobs: LogprobRows | None  # [B, D + 1] rows
    wanted: tuple[int, ...]  # how many top log-probabilities each slot asked for, -1 = none
    reports: tuple[bool, ...]  # which slots report their drafts
    trees: Tensor | None  # [B, 2 N + D + 1] int64: tokens, parents, path; None if no slot reports
    probs: Tensor | None  # [B, 2, N] float32, of traced steps


@dataclass(frozen=True, slots=True)
class PromptParcel:
    """Host copies of a chunk's prompt log-probabilities: row j speaks of the prompt token after row j."""

    slot: int
    logprobs: LogprobRows  # [R] rows


class Ticket:
    """The news of one launched step."""

    def __init__(
        self,
        step: int,
        parcels: list[Parcel],
        prompts: list[PromptParcel],
        event: torch.cuda.Event | None,
    ):
        self._step = step
        self._parcels = parcels
        self._prompts = prompts
        self._event = event

    def ready(self) -> bool:
        """True when `result` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """The step's results; waits for the device if it must."""
        if self._event is not None:
            self._event.synchronize()
        prompts = {p.slot: _rows(p.logprobs) for p in self._prompts}
        results = []
        for parcel in self._parcels:
            results.extend(_open(parcel, prompts))
        results.extend(SlotResult(slot=s, tokens=(), prompt_logprobs=p) for s, p in prompts.items())
        return StepResult(step=self._step, slots=tuple(results))


def pack(
    slots: tuple[int, ...], outcome: Outcome, wanted: tuple[int, ...], reports: tuple[bool, ...]
) -> Parcel:
    """Start the copies of an outcome."""
    trees = None
    if any(reports):
        parents = outcome.parents.expand_as(outcome.nodes)
        trees = _to_host(torch.cat((outcome.nodes, parents, outcome.path), dim=1))
    head = torch.stack((outcome.count, outcome.reason, outcome.drafted, outcome.accepted), dim=1)
    return Parcel(
        slots=slots,
        numbers=_to_host(torch.cat((head, outcome.tokens), dim=1)),
        logprobs=None if outcome.logprobs is None else outcome.logprobs.each(_to_host),
        wanted=wanted,
        reports=reports,
        trees=trees,
        probs=None if outcome.probs is None else _to_host(outcome.probs),
    )


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _open(parcel: Parcel, prompts: dict[int, tuple[LogprobRow, ...]]) -> list[SlotResult]:
    results = []
    for row, (slot, numbers) in enumerate(zip(parcel.slots, parcel.numbers.tolist(), strict=True)):
        count, reason, drafted, accepted, *tokens = numbers
        emitted = tuple(tokens[:count])
        results.append(
            SlotResult(
                slot=slot,
                tokens=emitted,
                finish=_REASONS.get(reason),
                stop_token=emitted[-1] if reason == STOPPED else None,
                drafted=drafted,
                accepted=accepted,
                logprobs=_logprobs(parcel, row, count),
                prompt_logprobs=prompts.pop(slot, None),
                tree=_tree(parcel, row, accepted),
            )
        )
    return results


def _logprobs(parcel: Parcel, row: int, count: int) -> tuple[LogprobRow, ...] | None:
    wanted = parcel.wanted[row]
    if wanted < 0 or parcel.logprobs is None:
        return None
    values, ids = parcel.logprobs.values, parcel.logprobs.ids
    return _rows(
        LogprobRows(
            values=values[row, :count, : 1 + wanted],
            ids=ids[row, :count, : 1 + wanted],
            ranks=parcel.logprobs.ranks[row, :count],
        )
    )


def _tree(parcel: Parcel, row: int, accepted: int) -> DraftTree | None:
    if parcel.trees is None or not parcel.reports[row]:
        return None
    numbers = parcel.trees[row].tolist()
    depth = parcel.numbers.shape[1] - 4  # D + 1
    nodes = (len(numbers) - depth) // 2
    target, drawn = ((), ()) if parcel.probs is None else parcel.probs[row].tolist()
    return DraftTree(
        target_probs=tuple(target),
        draft_probs=tuple(drawn) if drawn and drawn[0] >= 0 else (),
        tokens=tuple(numbers[:nodes]),
        parents=tuple(numbers[nodes : 2 * nodes]),
        accepted=tuple(numbers[2 * nodes + 1 : 2 * nodes + 1 + accepted]),
    )


def _rows(rows: LogprobRows) -> tuple[LogprobRow, ...]:
    """Host rows of device rows ([R])."""
    opened = []
    lists = (rows.values.tolist(), rows.ids.tolist(), rows.ranks.tolist())
    for values, ids, rank in zip(*lists, strict=True):
        top = dict(zip(ids[1:], values[1:], strict=True))
        opened.append(LogprobRow(token=ids[0], logprob=values[0], rank=rank, top=top))
    return tuple(opened)
