"""What tests of benchmarks run on: tiny engines by variant, and an OpenAI-compatible server that scripts its times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx
import torch
from lab import make_lab, tiny_decoder
from tiny_tokenizers import byte_level

from foretell import LLM, EngineConfig
from foretell.bench.prompts import BenchPrompt
from foretell.bench.variants import Variant
from foretell.metrics import Recorder
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.tree import chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

VOCABULARY = 259
PROMPTS = [
    BenchPrompt("a1", "animals", "a cat"),
    BenchPrompt("a2", "animals", "the dog and the cat"),
    BenchPrompt("c1", "cities", "Paris is a city"),
    BenchPrompt("c2", "cities", "x"),
]


@dataclass
class TinyEngines:
    """Opens an engine of random models for each variant: the draft model is the target itself, or `poor`."""

    poor: bool = False
    opened: list[Variant] = field(default_factory=list)
    closed: int = 0

    def __call__(self, variant: Variant) -> LLM:
        self.opened.append(variant)
        k = 0 if variant.plain else (variant.k or 3)
        own = tiny_decoder(1 if self.poor else 0, vocabulary=VOCABULARY)
        pairs = same(VOCABULARY, VOCABULARY, VOCABULARY, torch.device("cpu"))
        drafter = DraftModelDrafter(own, pairs, Acceptance.MATCH) if k else None
        lab = make_lab(drafter, chain(k), tiny_decoder(0, vocabulary=VOCABULARY))
        lab.engine.watcher = recorder = Recorder()
        llm = LLM.around(EngineConfig(), lab.engine, byte_level(), recorder)
        close = llm.close

        def counted() -> None:
            self.closed += 1
            close()

        llm.close = counted  # type: ignore[method-assign]
        return llm


@dataclass
class Clock:
    """Seconds that only the server moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Script:
    """What the server does for a request: (seconds to wait, text) of each piece, and how many tokens it says it was."""

    pieces: Sequence[tuple[float, str]] = ((0.5, "one"), (0.1, " two"), (0.3, " three"))
    tokens: int | None = 5
    prompt_tokens: int = 7
    status: int = 200
    error: str | None = None


class Stream(httpx.AsyncByteStream):
    """Server-sent events, cut in the middle of lines as networks do."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self.parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self.parts:
            middle = len(part) // 2
            yield part[:middle]
            yield part[middle:]


@dataclass
class FakeServer(httpx.AsyncBaseTransport):
    """An OpenAI-compatible server without a socket.

    Args:
        script: by number of the request, from 0.
        metrics: /metrics, one text per call; the last one stays.
    """

    clock: Clock = field(default_factory=Clock)
    script: Callable[[int], Script] = lambda number: Script()
    metrics: list[str] = field(default_factory=list)
    models: tuple[str, ...] = ("tiny",)
    asked: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        path = request.url.path
        if path == "/metrics":
            if not self.metrics:
                return httpx.Response(404)
            return httpx.Response(
                200, text=self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
            )
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})
        body = json.loads(await request.aread())
        number = len(self.asked)
        self.asked.append((path, body))
        script = self.script(number)
        if script.status != 200:
            error = {"error": {"message": script.error, "code": script.status}}
            return httpx.Response(script.status, json=error)
        return httpx.Response(
            200, stream=Stream(self._events(script, path.endswith("chat/completions")))
        )

    async def _events(self, script: Script, chat: bool) -> AsyncIterator[bytes]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if chat:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for seconds, text in script.pieces:
            await asyncio.sleep(0)
            self.clock.now += seconds
            choice: dict[str, object] = {"delta": {"content": text}} if chat else {"text": text}
            yield _event({"choices": [choice]})
        yield _event({"choices": [{"delta": {}, "text": "", "finish_reason": "stop"}]})
        if script.tokens is not None:
            usage = {"completion_tokens": script.tokens, "prompt_tokens": script.prompt_tokens}
            yield _event({"choices": [], "usage": usage})
        self.under_way -= 1
        yield b"data: [DONE]\n\n"


def _event(data: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
