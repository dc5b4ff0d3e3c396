"""The bridge between asyncio and the engine: one thread steps the engine, everybody else talks to it by an inbox.

A call is one prompt with its n answers. Its outputs come to the event loop in the order of the steps, all of one step
in one wake-up. The bridge knows neither HTTP nor JSON.

Invariants: only the engine's thread touches engine, driver and assemblies; a call gets outputs and then exactly one end
(an output that is finished, or an error), whatever happens; once the thread has died, nothing is taken in.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from foretell.assembly import Assembly
from foretell.driver import Driver
from foretell.jobs import Job
from foretell.metrics import Metrics
from foretell.outputs import RequestOutput

log = logging.getLogger("foretell.server")
IDLE = 0.5  # seconds between two looks at the clock while there is nothing to do


class EngineDead(RuntimeError):
    """The engine's thread has ended by an error; the process must be started anew."""


class Draining(RuntimeError):
    """The server is going down and takes nothing in."""


@dataclass(slots=True, eq=False)
class Call:
    """One prompt under way.

    Args:
        job: what is asked.
        loop: where outputs go.
    """

    job: Job
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    assembly: Assembly | None = None  # the engine thread's
    over: bool = False  # the event loop's: its end was handed out, or it was cancelled

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """What comes, the last one finished.

        Raises:
            ValueError: the engine refuses the job.
            EngineDead: the engine died.
        """
        while True:
            got = await self.queue.get()
            if isinstance(got, Exception):
                raise got
            yield got
            if got.finished:
                return


News = list[tuple[Call, RequestOutput | Exception]]


@dataclass(frozen=True, slots=True)
class Speed:
    """Recent pace of the engine.

    Args:
        tokens_per_s, steps_per_s: over the last seconds in which it worked.
        plain_step: mean seconds of recent steps without drafts, or None if there were none.
        drafted_step: mean seconds of recent steps with drafts, or None.
        plain_tokens_per_s: what plain decoding would give now: a token per running request and step, in the time of
            a plain step, or of a drafted one where no plain one was seen (then plain decoding is faster than this).
    """

    tokens_per_s: float = 0.0
    plain_tokens_per_s: float = 0.0
    steps_per_s: float = 0.0
    plain_step: float | None = None
    drafted_step: float | None = None


class Bridge:
    """Runs a driver in a thread of its own.

    Args:
        driver: not to be used by anyone else from `start` on.
        on_death: called in the engine's thread when it ends by an error.
    """

    def __init__(
        self, driver: Driver, on_death: Callable[[BaseException], None] | None = None
    ) -> None:
        self.death: BaseException | None = None
        self.on_death = on_death
        self._driver = driver
        self._inbox: SimpleQueue[tuple[str, Call | None]] = SimpleQueue()
        self._live: list[Call] = []  # the engine thread's
        self._open: set[Call] = set()  # the event loop's
        self._metrics = driver.metrics()
        self._pace = _Pace()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from the event loop.

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """The engine's thread takes work."""
        return self._thread.is_alive() and self.death is None

    @property
    def open(self) -> int:
        """Answers that are asked for and have not ended."""
        return sum(call.job.params.n for call in self._open)

    @property
    def metrics(self) -> Metrics:
        """Counters and state after the last step."""
        return self._metrics

    @property
    def speed(self) -> Speed:
        """Recent pace."""
        return self._pace.speed()

    def submit(self, job: Job) -> Call:
        """Queue a job; `Call.outputs` says how it goes.

        Raises:
            EngineDead, Draining: nothing is taken in any more.
        """
        if self.death is not None:
            raise EngineDead(f"the engine has stopped: {self.death}")
        if self._closing:
            raise Draining("the server is shutting down")
        call = Call(job, asyncio.get_running_loop())
        self._open.add(call)
        self._inbox.put(("add", call))
        self._check_alive(call)
        return call

    def cancel(self, call: Call) -> None:
        """Abort a call; a call that has ended is no error."""
        if not call.over:
            call.over = True
            self._open.discard(call)
            self._inbox.put(("drop", call))

    async def drain(self, timeout: float) -> bool:
        """Take nothing in and wait for what runs; True if all ended in time. The rest is aborted."""
        self._closing = True
        deadline = time.monotonic() + timeout
        while self._open and self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        ended = not self._open
        for call in tuple(self._open):
            self.cancel(call)
        return ended

    def stop(self) -> None:
        """End the thread after its step; what still runs is aborted."""
        self._closing = True
        self._inbox.put(("stop", None))
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    def _check_alive(self, call: Call) -> None:
        """If the engine died while the call was put in, nobody reads the inbox any more."""
        if self.death is not None:
            self._deliver([(call, EngineDead(f"the engine has stopped: {self.death}"))])

    def _deliver(self, news: News) -> None:
        for call, what in news:
            if call.over:
                continue
            if isinstance(what, Exception) or what.finished:
                self._end(call, what)
            else:
                call.queue.put_nowait(what)

    def _end(self, call: Call, what: RequestOutput | Exception) -> None:
        call.over = True
        self._open.discard(call)
        call.queue.put_nowait(what)

    # The engine's thread.

    def _run(self) -> None:
        try:
            while self._take():
                if self._driver.engine.has_work():
                    self._step()
                self._post()
        except BaseException as error:
            log.exception("the engine has died")
            self._die(error)

    def _step(self) -> None:
        start = time.perf_counter()
        before = self._metrics
        self._driver.pump()
        self._metrics = now = self._driver.metrics()
        self._pace.add(
            start,
            time.perf_counter(),
            now.generation_tokens - before.generation_tokens,
            now.prompt_tokens - before.prompt_tokens,
            now.num_drafts - before.num_drafts,
            max(now.state.running, 1),
        )

    def _take(self) -> bool:
        """Read the inbox, waiting if there is nothing to do; False = stop."""
        idle = not self._driver.engine.has_work()
        while True:
            try:
                what, call = self._inbox.get(timeout=IDLE) if idle else self._inbox.get_nowait()
            except Empty:
                return True
            idle = False
            if what == "stop":
                self._driver.drop([c.assembly for c in self._live if c.assembly is not None])
                self._live.clear()
                self._metrics = self._driver.metrics()
                return False
            assert call is not None
            (self._add if what == "add" else self._drop)(call)

    def _add(self, call: Call) -> None:
        made: list[Assembly] = []
        try:
            self._driver.queue([call.job], made)
        except ValueError as error:
            self._driver.drop(made)
            self._tell(call.loop, [(call, error)])
            return
        call.assembly = made[0]
        self._live.append(call)
        self._metrics = self._driver.metrics()

    def _drop(self, call: Call) -> None:
        if call in self._live:
            self._live.remove(call)
            assert call.assembly is not None
            self._driver.drop([call.assembly])
            self._metrics = self._driver.metrics()

    def _post(self) -> None:
        """Send what is new to the event loops, each woken once."""
        by_loop: dict[asyncio.AbstractEventLoop, News] = {}
        for call in tuple(self._live):
            assert call.assembly is not None
            output = call.assembly.news()
            if output is not None:
                by_loop.setdefault(call.loop, []).append((call, output))
                if output.finished:
                    self._live.remove(call)
        for loop, news in by_loop.items():
            self._tell(loop, news)

    def _tell(self, loop: asyncio.AbstractEventLoop, news: News) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(self._deliver, news)

    def _die(self, error: BaseException) -> None:
        self.death = error
        calls, self._live = self._live, []
        while True:
            try:
                _, waiting = self._inbox.get_nowait()
            except Empty:
                break
            if waiting is not None:
                calls.append(waiting)
        said = EngineDead(f"the engine has stopped: {type(error).__name__}: {error}")
        for call in calls:
            self._tell(call.loop, [(call, said)])
        if self.on_death is not None:
            self.on_death(error)


@dataclass(slots=True)
class _Pace:
    """Steps of the last seconds, as (begin, end, tokens, drafts); prefill steps count for no mean."""

    window: float = 5.0
    steps: list[tuple[float, float, int, int, int]] = field(default_factory=list)
    plain: list[tuple[float, int]] = field(
        default_factory=list
    )  # the last plain steps: seconds, rows

    def add(
        self, start: float, end: float, tokens: int, prompt: int, drafts: int, rows: int
    ) -> None:
        if not tokens or prompt:
            rows = 0
        elif not drafts:
            self.plain = [*self.plain[-31:], (end - start, rows)]
        steps = self.steps
        steps.append((start, end, tokens, drafts, rows))
        while steps and (end - steps[0][1] > self.window or len(steps) > 512):
            steps.pop(0)

    def speed(self) -> Speed:
        steps = list(self.steps)
        now = time.perf_counter()
        steps = [step for step in steps if now - step[1] <= self.window]
        busy = sum(end - start for start, end, *_ in steps)
        if not steps or busy <= 0:
            return Speed()
        decoding = [(end - start, rows) for start, end, _, _, rows in steps if rows]
        plain = self.plain or decoding
        seconds, rows = _mean([s for s, _ in plain]), _mean([float(r) for _, r in decoding])
        return Speed(
            tokens_per_s=sum(step[2] for step in steps) / busy,
            plain_tokens_per_s=rows / seconds if rows and seconds else 0.0,
            steps_per_s=len(steps) / busy,
            plain_step=_mean([s for s, _ in self.plain]),
            drafted_step=_mean([end - start for start, end, _, drafts, _ in steps if drafts]),
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
