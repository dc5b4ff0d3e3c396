"""Load on a server: Poisson arrivals at a rate, or a closed loop of so many users, and what the clients saw.

Arrivals are drawn before the clock starts and are not moved by slow answers: an open loop, as users are. A closed loop
keeps a number of requests under way and sends the next when one ends, as batch jobs do. Definitions are in
docs/metrics.md; they are vLLM's.

Invariant: warm-up requests are in no figure, and failed ones are counted but in no latency.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from foretell.bench.client import Client, Counters, Served, read_counters
from foretell.bench.prompts import BenchPrompt
from foretell.bench.stats import Distribution

LATE = 0.05  # seconds; a client that sends later than that is the bottleneck itself


@dataclass(frozen=True, slots=True)
class Load:
    """What is put on a server.

    Args:
        rate: requests a second, Poisson; infinity sends all at once; None = a closed loop.
        users: most requests under way; None = no limit (only with a rate).
        requests: how many in all; prompts repeat if there are too few.
    """

    requests: int
    rate: float | None = None
    users: int | None = None
    seed: int = 0
    warm_up: int = 1

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"requests must be at least 1, got {self.requests}")
        if self.rate is None and self.users is None:
            raise ValueError("a load needs a rate (requests a second) or a number of users")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate must be above 0, got {self.rate}")
        if self.users is not None and self.users < 1:
            raise ValueError(f"users must be at least 1, got {self.users}")

    @property
    def label(self) -> str:
        """For people."""
        users = "" if self.users is None else f"{self.users} users"
        if self.rate is None:
            return users
        rate = "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"
        return f"{rate}, at most {users}" if users else rate


@dataclass(frozen=True, slots=True)
class Limits:
    """What a user accepts, in milliseconds; None = anything. A request within all of them is good."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @property
    def any(self) -> bool:
        """There is a limit."""
        return any(x is not None for x in (self.ttft_ms, self.tpot_ms, self.e2el_ms))

    def holds(self, one: Served) -> bool:
        """The request is within all limits."""
        seen = (one.first, one.per_token or 0.0, one.latency)
        wanted = (self.ttft_ms, self.tpot_ms, self.e2el_ms)
        return all(w is None or 1e3 * s <= w for s, w in zip(seen, wanted, strict=True))


@dataclass(frozen=True, slots=True)
class ServerAcceptance:
    """By the server's own counters."""

    drafts: int
    drafted: int
    accepted: int
    length: float
    rate: float
    per_position: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ServeRow:
    """What one load brought.

    Args:
        late_ms: how much later than due requests left; large values mean that the client was the bottleneck.
        goodput: requests a second that were within the limits; None without limits.
    """

    label: str
    rate: float | None
    users: int | None
    requests: int
    failed: int
    errors: tuple[str, ...]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    tokens_per_s: float
    total_tokens_per_s: float
    goodput: float | None
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2el_ms: Distribution
    late_ms: Distribution
    most_under_way: int
    acceptance: ServerAcceptance | None


class Ask(Protocol):
    """One request."""

    def __call__(self, prompt: BenchPrompt, due: float | None = None) -> Awaitable[Served]: ...


async def serve_load(
    client: Client, prompts: Sequence[BenchPrompt], load: Load, limits: Limits
) -> tuple[ServeRow, list[Served]]:
    """Warm up, put the load on, and sum up."""
    asked = repeated(prompts, load.warm_up + load.requests)
    for prompt in asked[: load.warm_up]:
        await client.ask(prompt)
    asked = asked[load.warm_up :]
    before = await read_counters(client.http)
    if load.rate is None:
        assert load.users is not None
        served = await closed_loop(client.ask, asked, load.users)
    else:
        due = arrivals(load.rate, load.requests, load.seed)
        served = await open_loop(client.ask, asked, due, load.users, client.clock)
    after = await read_counters(client.http)
    counted = None if before is None or after is None else after.since(before)
    return summed(served, load, limits, counted), served


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests are due: gaps are exponential with mean 1 / rate.

    The same seed gives the same pattern at every rate, only stretched, so that loads can be compared.
    """
    draw = random.Random(seed)
    now, found = 0.0, []
    for _ in range(count):
        now += 0.0 if math.isinf(rate) else draw.expovariate(1.0) / rate
        found.append(now)
    return found


def repeated(prompts: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """So many prompts, from the start again if there are too few."""
    return [prompts[i % len(prompts)] for i in range(count)]


async def open_loop(
    ask: Ask,
    prompts: Sequence[BenchPrompt],
    due: Sequence[float],
    users: int | None,
    clock: Callable[[], float],
) -> list[Served]:
    """Requests leave when they are due, or, beyond `users` under way, when another has ended."""
    gate = None if users is None else asyncio.Semaphore(users)
    start = clock()

    async def one(prompt: BenchPrompt, at: float) -> Served:
        await asyncio.sleep(max(0.0, start + at - clock()))
        if gate is None:
            return await ask(prompt, start + at)
        async with gate:
            return await ask(prompt, start + at)

    return list(await asyncio.gather(*map(one, prompts, due)))


async def closed_loop(ask: Ask, prompts: Sequence[BenchPrompt], users: int) -> list[Served]:
    """`users` requests under way until all have been sent."""
    left = iter(list(enumerate(prompts)))
    served: dict[int, Served] = {}

    async def user() -> None:
        for place, prompt in left:
            served[place] = await ask(prompt)

    await asyncio.gather(*(user() for _ in range(users)))
    return [served[place] for place in sorted(served)]


def summed(
    served: Sequence[Served], load: Load, limits: Limits, counted: Counters | None
) -> ServeRow:
    """The figures of a load."""
    good = [one for one in served if not one.error]
    begin = min((one.sent for one in served), default=0.0)
    end = max((one.ended for one in good), default=begin)
    seconds = max(end - begin, 1e-9)
    read, written = sum(o.prompt_tokens for o in good), sum(o.tokens for o in good)
    within = sum(limits.holds(one) for one in good)
    return ServeRow(
        label=load.label,
        rate=load.rate,
        users=load.users,
        requests=len(good),
        failed=len(served) - len(good),
        errors=tuple(dict.fromkeys(one.error for one in served if one.error))[:5],
        seconds=seconds,
        prompt_tokens=read,
        output_tokens=written,
        requests_per_s=len(good) / seconds,
        tokens_per_s=written / seconds,
        total_tokens_per_s=(read + written) / seconds,
        goodput=within / seconds if limits.any else None,
        ttft_ms=_ms([one.first for one in good]),
        tpot_ms=_ms([t for one in good if (t := one.per_token) is not None]),
        itl_ms=_ms([gap for one in good for gap in one.gaps]),
        e2el_ms=_ms([one.latency for one in good]),
        late_ms=_ms([one.late for one in served]),
        most_under_way=_under_way(good),
        acceptance=None if counted is None else _acceptance(counted),
    )


def doubts(row: ServeRow, served: Sequence[Served]) -> list[str]:
    """What a reader must know before believing the row."""
    said = []
    if row.failed:
        said.append(f"{row.label}: {row.failed} requests failed, first reason: {row.errors[0]}")
    if row.late_ms.percentiles["p99"] > 1e3 * LATE and row.users is None:
        said.append(
            f"{row.label}: requests left up to {row.late_ms.percentiles['p99']:.0f} ms late: the client was the "
            "bottleneck, so latencies are too good; use a faster client machine"
        )
    if any(not one.counted and not one.error for one in served):
        said.append(
            f"{row.label}: the server reports no usage, so pieces were counted as tokens; with several tokens a piece "
            "tokens/s is too low and TPOT too high"
        )
    return said


def _ms(values: Sequence[float]) -> Distribution:
    return Distribution.of([1e3 * value for value in values])


def _under_way(served: Sequence[Served]) -> int:
    """Most requests at the same time."""
    turns = sorted([(o.sent, 1) for o in served] + [(o.ended, -1) for o in served])
    now = most = 0
    for _, change in turns:
        now += change
        most = max(most, now)
    return most


def _acceptance(counted: Counters) -> ServerAcceptance | None:
    if counted.drafts <= 0:
        return None
    return ServerAcceptance(
        drafts=int(counted.drafts),
        drafted=int(counted.drafted),
        accepted=int(counted.accepted),
        length=1 + counted.accepted / counted.drafts,
        rate=counted.accepted / counted.drafted if counted.drafted else 0.0,
        per_position=tuple(count / counted.drafts for count in counted.per_position),
    )
