"""The training loop: AdamW with warm-up and cosine, accumulation over batches and processes, exact resume.

One loop for all kinds of drafters (`Recipe`). Which rows a step takes is a function of the seed and the step, gradients
are summed in a fixed order and the optimiser's state is saved with the weights: a run that was interrupted and resumed
gives the weights that an uninterrupted one gives, bit for bit. (Not with `minutes`, where the schedule follows the
clock, and on a GPU only as far as its kernels repeat themselves.)
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foretell.training.data import Packed
from foretell.training.recipe import Loss, Recipe

LONGEST_WAIT = timedelta(days=2)  # of one process for another; torchrun sees one that died


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How long and how fast.

    Args:
        steps: of the optimiser; None = as `minutes` says.
        minutes: wall time; the schedule follows the clock then.
        rows: packed rows in a batch, for each process.
        accumulate: batches in a step.
        learning_rate: at the end of the warm-up.
        warmup: steps.
        clip: longest gradient.
        check_every: steps between two checks in the engine, each of which also saves; None = at the end only.
        report_every: steps between two reports.
        check_first: check before the first step too; what is trained is kept only if it is better than that.
    """

    steps: int | None = None
    minutes: float | None = None
    rows: int = 8
    accumulate: int = 1
    learning_rate: float = 5e-4
    warmup: int = 50
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    check_every: int | None = None
    report_every: int = 20
    check_first: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give either steps or minutes of training, and not both")
        for name in ("rows", "accumulate", "report_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Report:
    """How it goes, since the last report."""

    step: int
    progress: float  # 0 to 1
    tokens_per_s: float  # of text, whatever the loss covers
    seconds_left: float
    losses: tuple[float, ...]  # mean cross-entropy of each step ahead
    agreement: tuple[float, ...]  # share of rows whose likeliest token is the target's
    learning_rate: float


@dataclass(slots=True)
class State:
    """What a run is resumed from, besides weights and moments."""

    step: int = 0
    seconds: float = 0.0
    best: float = -math.inf
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Processes:
    """Where this process stands among those of torchrun."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, device: torch.device) -> Processes:
        """Join the group that torchrun's variables name; alone without them."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        # The first process answers and checks alone while the others wait: for hours, if there is much to answer.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=LONGEST_WAIT)
        return cls(dist.get_rank(), world)

    def leave(self) -> None:
        """Leave the group, once all have come so far."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()


class Loop:
    """Trains a recipe on packed rows.

    Args:
        data: all rows, on the CPU.
        stamp: what the run is of (target, shape, settings); resuming compares it.
        check: the mean acceptance of the weights as they are, in the engine; called on the first process.
        tell: hears reports, on the first process.
        keep: called when a check was the best so far, on the first process.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Packed,
        settings: LoopSettings,
        folder: Path,
        stamp: dict[str, Any],
        device: torch.device,
        processes: Processes | None = None,
        check: Callable[[State], float] | None = None,
        tell: Callable[[Report], None] = lambda report: None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        self.recipe, self.data, self.settings, self.folder = recipe, data, settings, folder
        self.stamp, self.device, self.processes = stamp, device, processes or Processes()
        self.check, self.tell, self.keep = check, tell, keep
        self.state = State()
        self.parameters = [p for p in recipe.modules.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=device.type == "cuda",
        )
        self._counts = data.assistant.sum(-1)  # [rows]
        self._order: tuple[int, Tensor] | None = None

    @property
    def path(self) -> Path:
        """Where the state is saved."""
        return self.folder / "state.pt"

    def run(self, stop_after: int | None = None) -> State:
        """Train to the end, from where the saved state stands.

        Args:
            stop_after: save and return after so many steps in this call.
        """
        self.resume()
        started, before = time.monotonic(), self.state.seconds
        meter, until = _Meter(self), None if stop_after is None else self.state.step + stop_after
        if self.settings.check_first and not self.state.step:
            self._check()
        while not self._finished():
            losses = self._step()
            self.state.step += 1
            self.state.seconds = before + time.monotonic() - started
            meter.add(losses)
            if self.state.step % self.settings.report_every == 0:
                self._report(meter)
            if until is not None and self.state.step >= until:
                self.save()
                return self.state
            every = self.settings.check_every
            if every is not None and self.state.step % every == 0 and not self._finished():
                self._check()
        self._report(meter)
        self._check()
        return self.state

    def resume(self) -> None:
        """Take up the saved state, if there is one.

        Raises:
            ValueError: it is of another target, shape or setting.
        """
        if not self.path.exists():
            return
        saved = torch.load(self.path, map_location=self.device, weights_only=True)
        for key, value in self.stamp.items():
            if saved["stamp"].get(key) != value:
                raise ValueError(
                    f"{self.folder} holds a run with {key}={saved['stamp'].get(key)!r}, this one has {value!r}; give "
                    "another --out, or the settings it was started with"
                )
        with torch.no_grad():
            for parameter, value in zip(self.parameters, saved["weights"], strict=True):
                parameter.copy_(value)
        self.optimiser.load_state_dict(saved["optimiser"])
        self.state = State(**saved["state"])

    def save(self) -> None:
        """Save weights, moments and how far it is; the first process does it for all."""
        if self.processes.rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = self.state
        content = {
            "stamp": self.stamp,
            "weights": [p.detach() for p in self.parameters],
            "optimiser": self.optimiser.state_dict(),
            "state": {
                "step": state.step,
                "seconds": state.seconds,
                "best": state.best,
                "history": state.history,
            },
        }
        scratch = self.path.with_suffix(".new")
        try:
            torch.save(content, scratch)
        except (OSError, RuntimeError) as error:  # torch wraps a full disk in a RuntimeError
            scratch.unlink(missing_ok=True)
            raise OSError(
                f"{self.path}: the state could not be saved ({error}); the one before is kept"
            ) from error
        os.replace(scratch, self.path)

    def _finished(self) -> bool:
        return self._progress() >= 1.0

    def _progress(self) -> float:
        if self.settings.steps is not None:
            return self.state.step / max(1, self.settings.steps)
        assert self.settings.minutes is not None
        return self._agreed(self.state.seconds) / (60 * self.settings.minutes)

    def _agreed(self, seconds: float) -> float:
        """The first process's clock, for all."""
        if self.processes.world == 1:
            return seconds
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.broadcast(value, 0)
        return float(value)

    def _rate(self) -> float:
        settings = self.settings
        rising = min(1.0, (self.state.step + 1) / max(1, settings.warmup))
        return settings.learning_rate * rising * 0.5 * (1 + math.cos(math.pi * self._progress()))

    def _step(self) -> list[Loss]:
        """One step of the optimiser."""
        settings, processes = self.settings, self.processes
        size = settings.rows * processes.world
        every = settings.accumulate * size
        rows = self._rows(self.state.step * every, every)
        # All processes know all rows, so what to divide by needs no exchange.
        share = 1.0 / max(1, int(self._counts[rows].sum()))
        for group in self.optimiser.param_groups:
            group["lr"] = self._rate()
        losses = []
        for batch in rows.view(settings.accumulate, processes.world, settings.rows):
            mine = batch[processes.rank]
            text = self.data.take(mine)
            roots = [r.to(self.device, non_blocking=True) for r in self.recipe.roots(text)]
            loss = self.recipe.loss(mine, text.to(self.device), roots)
            (loss.total * share).backward()  # type: ignore[no-untyped-call]
            losses.append(loss)
        self._exchange()
        torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=False)
        return losses

    def _exchange(self) -> None:
        if self.processes.world == 1:
            return
        for parameter in self.parameters:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)

    def _rows(self, start: int, count: int) -> Tensor:
        """[count] rows of the data: an endless stream of shuffled epochs, from place `start` of it."""
        total = self.data.tokens.shape[0]
        picked = []
        for place in range(start, start + count):
            epoch, at = divmod(place, total)
            if self._order is None or self._order[0] != epoch:
                generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
                self._order = (epoch, torch.randperm(total, generator=generator))
            picked.append(self._order[1][at])
        return torch.stack(picked)

    def _report(self, meter: _Meter) -> None:
        report = meter.report()
        if report is not None and not self.processes.rank:
            self.tell(report)

    def _check(self) -> None:
        """Save; judge the weights in the engine; keep them if they are the best so far."""
        if not self.processes.rank:
            score = self.state.step if self.check is None else self.check(self.state)
            if score > self.state.best:
                self.state.best = float(score)
                self.keep()
        self.save()
        if self.processes.world > 1:
            dist.barrier()


class _Meter:
    """Sums losses between reports without waiting for the device."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._clear()

    def _clear(self) -> None:
        self.since, self.losses, self.tokens = time.monotonic(), list[Loss](), 0

    def add(self, losses: list[Loss]) -> None:
        """One step's."""
        settings, processes = self.loop.settings, self.loop.processes
        self.losses += losses
        length = self.loop.data.tokens.shape[1]
        self.tokens += settings.rows * settings.accumulate * processes.world * length

    def report(self) -> Report | None:
        """What came since the last one; waits for the device."""
        if not self.losses:
            return None
        rows = torch.tensor([loss.rows for loss in self.losses]).sum(0).clamp(min=1)
        losses = torch.stack([loss.steps for loss in self.losses]).sum(0).cpu() / rows
        hits = torch.stack([loss.hits for loss in self.losses]).sum(0).cpu() / rows
        loop, state = self.loop, self.loop.state
        progress = min(1.0, loop._progress())
        left = state.seconds * (1 - progress) / max(progress, 1e-9)
        report = Report(
            step=state.step,
            progress=progress,
            tokens_per_s=self.tokens / max(1e-9, time.monotonic() - self.since),
            seconds_left=left,
            losses=tuple(losses.tolist()),
            agreement=tuple(hits.tolist()),
            learning_rate=loop._rate(),
        )
        self._clear()
        return report
