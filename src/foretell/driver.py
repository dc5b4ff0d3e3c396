"""Driver: queues jobs in an engine, steps it, and routes what comes to the assemblies.

It knows neither prompts nor callers; LLM is one, and whoever runs an engine for many callers can be another. Several
threads may call: one steps at a time, for all of them.

Invariant: a request is either in `_live` and in the engine, or in neither; the engine is never entered twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foretell.assembly import Assembly
from foretell.interrupts import held
from foretell.jobs import Job
from foretell.metrics import FinishReason, Metrics, Recorder
from foretell.outputs import RequestOutput
from foretell.prompts import encode_bad_words
from foretell.seeds import child_seed, request_seed
from foretell.text import TokenText

if TYPE_CHECKING:
    from foretell.engine.engine import Delta, Engine


@dataclass(frozen=True, slots=True)
class Child:
    """One of a request's n answers, as the engine knows it."""

    assembly: Assembly
    index: int


class Driver:
    """Brings requests from jobs to finished assemblies.

    Args:
        recorder: hears how requests end; it is the engine's watcher, too.
        seed: requests without a seed derive one from it and from their number.
    """

    def __init__(
        self, engine: Engine, token_text: TokenText, recorder: Recorder, seed: int
    ) -> None:
        self.engine = engine
        self._text = token_text
        self._recorder = recorder
        self._seed = seed
        self._live: dict[str, Child] = {}
        self._counter = 0
        self._lock = threading.RLock()
        self._inside = False
        self._late: list[Assembly] = []  # to be dropped when the engine is left

    def queue(self, jobs: Sequence[Job], assemblies: list[Assembly]) -> None:
        """Queue all jobs. `assemblies` takes one each, also of a job that the engine then refuses: `drop` them all.

        Raises:
            ValueError: the engine refuses a job.
        """
        with self._alone():
            for job in jobs:
                assembly = Assembly(str(self._counter), job.prompt, job.params, self._text)
                assemblies.append(assembly)
                self._add(job, assembly)

    def pump(self) -> None:
        """One step of the engine, for everybody; nothing where another thread brought everybody to the end.

        Raises:
            RuntimeError: the engine has nothing to do, so what is waited for would never come.
            KeyboardInterrupt: Ctrl-C came; the step was finished first.
        """
        with self._alone():
            if self._live and not self.engine.has_work():
                raise RuntimeError(
                    f"the engine has no work left but requests {sorted(self._live)} have not ended"
                )
            for delta in self.engine.step() if self._live else ():
                self._take(delta)

    def news(self, assembly: Assembly) -> RequestOutput | None:
        """What the caller of a stream has not seen yet; None = nothing."""
        with self._lock:
            return assembly.news()

    def drop(self, assemblies: Sequence[Assembly]) -> None:
        """Abort what still runs of these."""
        with self._lock:
            if (
                self._inside
            ):  # the garbage collector closes a forgotten stream in the middle of a step
                self._late.extend(assemblies)
                return
            with self._alone():
                self._late.extend(assemblies)

    def metrics(self) -> Metrics:
        """The counters, and what the engine holds right now."""
        return replace(self._recorder.snapshot(), state=self.engine.state())

    def running(self, request_id: str | None = None) -> list[Assembly]:
        """The assemblies that go on; only the one of that id, if one is given."""
        with self._lock:
            found = {id(child.assembly): child.assembly for child in self._live.values()}
        return [one for one in found.values() if request_id in (None, one.request_id)]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else is in the engine, and Ctrl-C waits."""
        with held(), self._lock:
            self._inside = True
            try:
                yield
            finally:
                self._abort(self._late)
                self._inside = False

    def _abort(self, assemblies: list[Assembly]) -> None:
        while assemblies:
            assembly = assemblies.pop()
            for index in assembly.abort():
                child = _child_id(assembly, index)
                if child in self._live:
                    self.engine.abort(child)
                    self._forget(child, "abort")

    def _add(self, job: Job, assembly: Assembly) -> None:
        seed = job.params.seed
        if seed is None:
            seed = request_seed(self._seed, self._counter)
        self._counter += 1
        bad_words = encode_bad_words(job.params.bad_word_strings, self._text.tokenizer)
        for index in range(job.params.n):
            child = _child_id(assembly, index)
            self.engine.add(
                child,
                job.prompt.token_ids,
                job.params,
                seed=child_seed(seed, index),
                priority=job.priority,
                bad_words=bad_words,
            )
            self._live[child] = Child(assembly, index)

    def _take(self, delta: Delta) -> None:
        child = self._live.get(delta.request_id)
        if child is None:  # ended on our side already
            return
        if child.assembly.take(child.index, delta):
            self.engine.abort(delta.request_id)
        reason = child.assembly.replies[child.index].finish_reason
        if reason is not None:
            self._forget(delta.request_id, reason)

    def _forget(self, child: str, reason: FinishReason) -> None:
        del self._live[child]
        self._recorder.ended(child, reason)


def _child_id(assembly: Assembly, index: int) -> str:
    """The engine's name for one answer."""
    return assembly.request_id if assembly.params.n == 1 else f"{index}_{assembly.request_id}"
