"""Stopwatch: how long a step took, draft and verification together, on the host's clock.

On a synchronous device a step is collected in the call that launched it: its time is that part of the call, and the
drafting of the call before. Where the host is a step behind, results come one after the other, and the time between two
of them is the drafting for the second and its verification; it counts only while the device always had the next step.

Invariant: no event is waited for here; what is measured is what the caller of the engine waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of a step, and of the drafting among them where that can be told apart (else 0)."""

    seconds: float
    draft: float


class Stopwatch:
    """Times steps.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = 0.0
        self._draft = 0.0
        self._last: float | None = (
            None  # when the last step was collected with another one behind it
        )

    def begin(self) -> None:
        """A call of the engine starts."""
        self._began = self._clock()

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """The drafter runs."""
        began = self._clock()
        yield
        self._draft = self._clock() - began

    def lap(self, at_once: bool, behind: bool) -> Lap | None:
        """A step was collected.

        Args:
            at_once: in the call that launched it.
            behind: another step is already on the device.

        Returns:
            None where the time says nothing, as after a pause.
        """
        now, last = self._clock(), self._last
        self._last = now if behind else None
        if at_once:
            return Lap(now - self._began + self._draft, self._draft)
        return None if last is None else Lap(now - last, 0.0)
