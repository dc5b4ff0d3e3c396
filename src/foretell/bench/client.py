"""A streaming client of OpenAI-compatible servers that notes when each piece of an answer came.

Only what a load test needs: one request, its pieces, its counts. Any server that speaks /v1/chat/completions or
/v1/completions with server-sent events will do. httpx is optional for the package, so it is imported when it is used.

Invariant: a failed request is an answer with an error, never an exception; a load test goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretell.bench.prompts import BenchPrompt

if TYPE_CHECKING:
    import httpx

TIMEOUT = 600.0  # seconds without any piece


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its client saw it; seconds of the client's clock.

    Args:
        sent: when the request left.
        pieces: when each piece with text came.
        tokens: of the answer, as the server's usage says; where it says nothing, the number of pieces.
        counted: the server said how many tokens there were.
        late: seconds between when the request was due and when it left.
        error: why there is no answer; "" if there is one.
    """

    sent: float
    pieces: tuple[float, ...] = ()
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    counted: bool = False
    late: float = 0.0
    error: str = ""

    @property
    def first(self) -> float:
        """TTFT: from sending to the first piece with text."""
        return self.pieces[0] - self.sent

    @property
    def latency(self) -> float:
        """E2EL: from sending to the end of the answer."""
        return self.ended - self.sent

    @property
    def per_token(self) -> float | None:
        """TPOT: (E2EL - TTFT) / (tokens - 1); None for an answer of one token."""
        return (self.latency - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> tuple[float, ...]:
        """ITL: between two pieces."""
        return tuple(b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False))


@dataclass(slots=True)
class _Heard:
    """An answer while it comes."""

    pieces: list[float] = field(default_factory=list)
    last: float = 0.0
    usage: Mapping[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Client:
    """Asks one server.

    Args:
        http: an httpx client whose base_url is the server's, without /v1.
        body: what every request says besides its prompt: model, max_tokens, temperature, ...
        chat: /v1/chat/completions with the model's own template; else /v1/completions with plain text.
        clock: seconds.
    """

    http: httpx.AsyncClient
    body: Mapping[str, Any]
    chat: bool = True
    clock: Callable[[], float] = time.perf_counter

    async def ask(self, prompt: BenchPrompt, due: float | None = None) -> Served:
        """One request, followed to its end.

        Args:
            due: when it should have left, by the same clock.
        """
        import httpx

        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        asked = {"messages": prompt.messages} if self.chat else {"prompt": prompt.text}
        body = {**self.body, **asked, "stream": True, "stream_options": {"include_usage": True}}
        heard = _Heard()
        sent = self.clock()
        try:
            async with self.http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    heard.error = _refusal(response.status_code, await response.aread())
                else:
                    async for line in response.aiter_lines():
                        self._hear(line, heard)
        except httpx.HTTPError as error:
            heard.error = f"{type(error).__name__}: {error}"
        return self._served(sent, heard, 0.0 if due is None else max(0.0, sent - due))

    def _hear(self, line: str, heard: _Heard) -> None:
        if not line.startswith("data:"):
            return
        payload = line[5:].strip()
        if payload == "[DONE]":
            return
        now = self.clock()
        try:
            data = json.loads(payload)
        except json.JSONDecodeError:
            heard.error = f"the server sent what is not JSON: {payload[:80]!r}"
            return
        if data.get("error"):
            heard.error = str(data["error"])
            return
        if data.get("usage"):
            heard.usage = data["usage"]
        for choice in data.get("choices") or ():
            heard.last = now
            if _text(choice):
                heard.pieces.append(now)
                break

    def _served(self, sent: float, heard: _Heard, late: float) -> Served:
        usage = heard.usage or {}
        counted = usage.get("completion_tokens") is not None
        error = heard.error
        if not error and not heard.pieces:
            error = "the server's answer had no text"
        return Served(
            sent=sent,
            pieces=tuple(heard.pieces),
            ended=max(heard.last, heard.pieces[-1] if heard.pieces else heard.last),
            tokens=int(usage["completion_tokens"]) if counted else len(heard.pieces),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            counted=counted,
            late=late,
            error=error,
        )


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a piece, of an answer or of a thought; "" for pieces that only carry a role or an end."""
    delta = choice.get("delta")
    if isinstance(delta, Mapping):
        found = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        return str(found or "")
    return str(choice.get("text") or "")


def _refusal(status: int, body: bytes) -> str:
    try:
        data = json.loads(body)
        message = data.get("error", data) if isinstance(data, Mapping) else data
        if isinstance(message, Mapping):
            message = message.get("message", message)
    except ValueError:
        message = body[:200].decode("utf-8", "replace")
    return f"HTTP {status}: {message}"


@dataclass(frozen=True, slots=True)
class Counters:
    """A server's counters of speculation, as vLLM names them."""

    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    per_position: tuple[float, ...] = ()

    def since(self, earlier: Counters) -> Counters:
        """What was counted after `earlier`."""
        places = zip(self.per_position, (*earlier.per_position, *[0.0] * 64), strict=False)
        return Counters(
            self.drafts - earlier.drafts,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            tuple(a - b for a, b in places),
        )


async def read_counters(http: httpx.AsyncClient) -> Counters | None:
    """The server's own counters at /metrics; None where it has none."""
    import httpx

    try:
        answer = await http.get("/metrics", timeout=10.0)
    except httpx.HTTPError:
        return None
    return parse_counters(answer.text) if answer.status_code == 200 else None


def parse_counters(text: str) -> Counters | None:
    """From Prometheus' text format, summed over engines; None where speculation is not among it."""
    sums = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    places: dict[int, float] = {}
    seen = False
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        labels, _, tail = rest.rpartition("}")
        if line.startswith("#") or "spec_decode_num_" not in line:
            continue
        if not rest:
            name, _, tail = line.partition(" ")
        what = name.partition("spec_decode_num_")[2].removesuffix("_total")
        value = float(tail.split()[0])
        if what in sums:
            sums[what] += value
            seen = True
        elif what == "accepted_tokens_per_pos":
            place = int(labels.partition('position="')[2].partition('"')[0])
            places[place] = places.get(place, 0.0) + value
    if not seen:
        return None
    deepest = max(places, default=-1) + 1
    return Counters(
        sums["drafts"],
        sums["draft_tokens"],
        sums["accepted_tokens"],
        tuple(places.get(i, 0.0) for i in range(deepest)),
    )


async def first_model(http: httpx.AsyncClient) -> str:
    """The name of the model that the server offers first.

    Raises:
        ValueError: the server cannot be reached or offers none.
    """
    import httpx

    try:
        answer = await http.get("/v1/models", timeout=30.0)
        answer.raise_for_status()
        models = answer.json()["data"]
        return str(models[0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{http.base_url} offers no model at /v1/models ({type(error).__name__}: {error}); "
            "is the server up, and is --url its address without /v1?"
        ) from error
