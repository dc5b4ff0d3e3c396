"""Soak a server: many clients for minutes, some of them rude, each whole answer checked against its solo run.

    foretell serve MODEL --port 8000 --dtype float32 --spec-method ngram --num-speculative-tokens 5
    python bench/serve_soak.py --url http://127.0.0.1:8000 --clients 64 --minutes 10

What clients do: stream or wait; read slowly; go in the middle; send malformed bodies; send prompts that are too long
or huge. What is checked: every answer that was read to its end equals the first answer to the same request, which was
asked alone; refusals have the error object; /health answers; at the end nothing runs, no KV block is in use, and the
memory of the server has not grown after the first third. The last line is one JSON object.

float32, because answers are compared: with bfloat16 a product's sums depend on how many rows it has, so a near-tie may
go the other way in company than alone, with drafts or without.

Not a benchmark: clients and server share the machine. Needs httpx, and psutil for the memory of a server by --pid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field

import httpx

WORDS = [
    "river",
    "stone",
    "light",
    "paper",
    "garden",
    "music",
    "winter",
    "table",
    "number",
    "story",
]


@dataclass
class Seen:
    """What happened."""

    answered: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    cancelled: int = 0
    refused: int = 0
    busy: int = 0
    failed: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """One of a fixed set, so that it can be asked alone first."""

    path: str
    body: dict[str, object]


def requests(count: int, seed: int) -> list[Request]:
    """Chats and completions, greedy and sampled, with and without limits on their form."""
    draw = random.Random(seed)
    found = []
    for place in range(count):
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 60)))
        body: dict[str, object] = {
            "max_tokens": draw.randint(1, 48),
            "temperature": draw.choice([0, 0.7, 1.0]),
            "seed": place,
        }
        if draw.random() < 0.15:
            body["stop"] = ["the", "."]
        if draw.random() < 0.1:
            body["structured_outputs"] = {"regex": "[a-z ]{5,40}[.]"}
        if draw.random() < 0.1:
            body["speculate"] = False
        if draw.random() < 0.5:
            found.append(Request("/v1/completions", body | {"prompt": text}))
        else:
            messages = [{"role": "user", "content": text}]
            found.append(Request("/v1/chat/completions", body | {"messages": messages}))
    return found


def text_of(choice: dict) -> str:
    """The text of a whole answer or of a piece."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


async def ask_alone(client: httpx.AsyncClient, request: Request) -> tuple[str, str, int]:
    """(text, finish reason, tokens) of a request that runs by itself."""
    answer = await client.post(request.path, json=request.body)
    answer.raise_for_status()
    data = answer.json()
    choice = data["choices"][0]
    return text_of(choice), choice["finish_reason"], data["usage"]["completion_tokens"]


async def stream(
    client: httpx.AsyncClient, request: Request, draw: random.Random, seen: Seen
) -> tuple[str, str, int] | None:
    """The same from a stream; None if this client went before the end, or was refused for the queue."""
    body = request.body | {"stream": True, "stream_options": {"include_usage": True}}
    slow, leaves = draw.random() < 0.2, draw.random() < 0.15
    start, text, reason, tokens = time.perf_counter(), "", "", -1
    async with client.stream("POST", request.path, json=body) as answer:
        if answer.status_code == 503:
            seen.busy += 1
            return None
        answer.raise_for_status()
        heard = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            heard += 1
            if heard == 2:
                seen.first.append(time.perf_counter() - start)
            data = json.loads(line[6:])
            if "error" in data:
                raise RuntimeError(data["error"]["message"])
            for choice in data["choices"]:
                text += text_of(choice)
                reason = choice["finish_reason"] or reason
            if data.get("usage"):
                tokens = data["usage"]["completion_tokens"]
            if leaves and heard > draw.randint(1, 6):
                seen.cancelled += 1
                return None
            if slow:
                await asyncio.sleep(draw.random() * 0.2)
    seen.whole.append(time.perf_counter() - start)
    return text, reason, tokens


async def be_rude(client: httpx.AsyncClient, draw: random.Random, seen: Seen) -> None:
    """A request that must be refused with an error object."""
    kind = draw.randrange(5)
    headers = {"content-type": "application/json"}
    if kind == 0:
        answer = await client.post("/v1/completions", content=b'{"prompt": ', headers=headers)
    elif kind == 1:
        answer = await client.post("/v1/completions", json={"prompt": "a", "temperature": "hot"})
    elif kind == 2:
        answer = await client.post("/v1/completions", json={"prompt": "word " * 200_000})
    elif kind == 3:
        deep = b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"
        answer = await client.post("/v1/chat/completions", content=deep, headers=headers)
    else:
        answer = await client.post("/v1/completions", json={"prompt": [10**9], "max_tokens": 1})
    if not 400 <= answer.status_code < 500 or "error" not in answer.json():
        seen.wrong.append(f"rude request {kind} got {answer.status_code}")
    seen.refused += 1


async def client_loop(
    client: httpx.AsyncClient,
    known: list[tuple[Request, tuple[str, str, int]]],
    until: float,
    seed: int,
    seen: Seen,
) -> None:
    """One client until the time is over."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        try:
            if draw.random() < 0.1:
                await be_rude(client, draw, seen)
                continue
            request, wanted = draw.choice(known)
            if draw.random() < 0.7:
                got = await stream(client, request, draw, seen)
            elif draw.random() < 0.1:
                try:
                    await client.post(request.path, json=request.body, timeout=0.05)
                except httpx.TimeoutException:
                    seen.cancelled += 1
                continue
            else:
                start = time.perf_counter()
                got = await ask_alone(client, request)
                seen.whole.append(time.perf_counter() - start)
            if got is None:
                continue
            seen.answered += 1
            seen.checked += 1
            if got != wanted:
                seen.wrong.append(f"{request.body}: {got!r} instead of {wanted!r}")
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 503:
                seen.busy += 1
            else:
                seen.failed.append(f"HTTP {error.response.status_code}")
        except (httpx.HTTPError, RuntimeError) as error:
            seen.failed.append(f"{type(error).__name__}: {error}")


async def watch(url: str, until: float, pid: int | None, seen: Seen) -> None:
    """/health and memory, twice a second, over a connection of its own."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        while time.monotonic() < until:
            start = time.perf_counter()
            answer = await client.get("/health")
            seen.health.append(time.perf_counter() - start)
            if answer.status_code != 200:
                seen.wrong.append(f"/health says {answer.status_code}")
            if pid is not None:
                import psutil

                seen.memory.append(psutil.Process(pid).memory_info().rss / 2**20)
            await asyncio.sleep(0.5)


def quantiles(values: list[float]) -> dict[str, float]:
    """Median and tails in milliseconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    pick = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {name: round(1e3 * ordered[round(q * last)], 1) for name, q in pick.items()}


async def soak(options: argparse.Namespace) -> dict[str, object]:
    """Everything; returns the record."""
    limits = httpx.Limits(max_connections=options.clients + 8, max_keepalive_connections=64)
    seen = Seen()
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as client:
        known = []
        for request in requests(options.requests, options.seed):
            known.append((request, await ask_alone(client, request)))
        print(f"{len(known)} requests asked alone; now {options.clients} clients", file=sys.stderr)
        until = time.monotonic() + 60 * options.minutes
        clients = [
            client_loop(client, known, until, options.seed + 1 + i, seen)
            for i in range(options.clients)
        ]
        await asyncio.gather(*clients, watch(options.url, until, options.pid, seen))
        stats: dict[str, object] = {}
        for _ in range(240):  # clients that went leave work behind for a moment
            stats = (await client.get("/stats")).json()
            if not stats["running"] and not stats["waiting"]:
                break
            await asyncio.sleep(0.5)
        for request, wanted in known[:5]:
            if await ask_alone(client, request) != wanted:
                seen.wrong.append("after the load a request gives another answer")
    return record(options, seen, stats)


def record(options: argparse.Namespace, seen: Seen, stats: dict[str, object]) -> dict[str, object]:
    """The JSON line."""
    third = len(seen.memory) // 3
    growth = None
    if third:
        early, late = seen.memory[third : 2 * third], seen.memory[2 * third :]
        growth = round(sum(late) / len(late) - sum(early) / len(early), 1)
    leaked = stats["kv_cache_usage"]
    return {
        "clients": options.clients,
        "minutes": options.minutes,
        "checked": seen.checked,
        "cancelled": seen.cancelled,
        "refused": seen.refused,
        "busy": seen.busy,
        "failed": len(seen.failed),
        "failures": sorted(set(seen.failed))[:5],
        "wrong": len(seen.wrong),
        "wrongs": seen.wrong[:5],
        "first_ms": quantiles(seen.first),
        "answer_ms": quantiles(seen.whole),
        "health_ms": quantiles(seen.health),
        "memory_growth_mib": growth,
        "running_at_end": stats["running"],
        "kv_usage_at_end": leaked,
        "sound": not seen.wrong and not seen.failed and not leaked and bool(seen.checked),
    }


def main() -> None:
    """Read the options, soak, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=40, help="different requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, default=None, help="of the server, for its memory")
    found = asyncio.run(soak(parser.parse_args()))
    print(json.dumps(found))
    sys.exit(0 if found["sound"] else 1)


if __name__ == "__main__":
    main()
