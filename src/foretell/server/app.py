"""The routes: OpenAI's and vLLM's, and the page. HTTP in, HTTP out; what happens in between is the other modules'.

Invariants: a request that ends early in any way (error, disconnect, time limit) aborts what it queued; every error is
the OpenAI error object; nothing blocks the event loop for longer than a small JSON text takes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version as installed_version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from foretell.llm import LLMParts
from foretell.outputs import RequestOutput
from foretell.server import replies
from foretell.server.asked import Asked, Asker
from foretell.server.bridge import Bridge, Call, Draining, EngineDead
from foretell.server.errors import ApiError, json_response, param_of, path_of
from foretell.server.exposition import EngineCollector, exposition
from foretell.server.guard import Guard
from foretell.server.live import page_router, stats
from foretell.server.replies import ChoiceStream, Style, Usage
from foretell.server.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    NamedTool,
    TokenizeRequest,
)
from foretell.server.settings import ServerSettings
from foretell.server.tools import (
    THINK,
    ForcedReader,
    PlainReader,
    Reader,
    ReasoningReader,
    format_of,
    reader_of,
)

log = logging.getLogger("foretell.server")
INLINE = 1 << 16  # bytes of JSON that are parsed in the event loop; more goes to a thread
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": what}
    for status, what in (
        (400, "The request is wrong."),
        (401, "The key is wrong."),
        (404, "There is no such model."),
        (413, "The body is too large."),
        (503, "Too many requests wait, or the server goes down."),
    )
}


@dataclass(slots=True)
class Server:
    """What the routes share.

    Args:
        parts: of the LLM that is served.
    """

    parts: LLMParts
    settings: ServerSettings
    bridge: Bridge
    asker: Asker
    collector: EngineCollector
    started: float = field(default_factory=time.time)
    under_way: int = 0  # HTTP requests that are being answered


def build_server(parts: LLMParts, settings: ServerSettings) -> Server:
    """Everything behind the routes; the engine's thread is not started."""
    bridge = Bridge(parts.driver)
    parts.driver.engine.tolerant = True
    config = parts.config
    collector = EngineCollector(
        lambda: bridge.metrics,
        settings.metrics_prefix,
        settings.model_names[0],
        config.drafter is not None or bool(parts.driver.engine.drafts),
        {
            "block_size": str(config.block_size),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "num_gpu_blocks": str(parts.driver.engine.num_blocks),
        },
    )
    return Server(parts, settings, bridge, Asker(parts, settings), collector)


def build_app(server: Server) -> ASGIApp:
    """The application, guarded."""
    app = FastAPI(
        title="foretell",
        version=installed_version("foretell"),
        description="OpenAI-compatible server with speculative decoding.",
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.server = server
    app.include_router(_routes(server))
    if server.settings.page:
        app.include_router(page_router(server.bridge, server.parts, server.settings))
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_fault)
    inner: ASGIApp = app
    if server.settings.allowed_origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=server.settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
        )
    return Guard(inner, server.settings)


# Errors.


async def _on_http(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response()
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, str(error.detail), None, error.headers).response()


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = path_of(first["loc"])
    if first["type"] == "extra_forbidden":
        said = f"{param} is not a parameter of this route"
    elif first["type"] == "json_invalid":
        param, said = "", f"the body is not JSON: {first.get('ctx', {}).get('error', '')}"
    elif not param:
        said = str(first["msg"])
        param = param_of(said, Common.model_fields) or ""
    else:
        said = f"{param}: {first['msg']}"
    return ApiError(400, said, param or None).response()


async def _on_fault(request: Request, error: Exception) -> Response:
    if isinstance(error, EngineDead):
        return ApiError(500, str(error)).response()
    return ApiError(500, "the server made a mistake; its log says more.").response()


class _GuardedRequest(Request):
    """A request whose JSON may be neither too deep nor hold half characters."""

    async def json(self) -> Any:
        """The body."""
        body = await self.body()
        limit = self.app.state.server.settings.max_json_depth
        if len(body) <= INLINE:
            return read_json(body, limit)
        return await run_in_threadpool(read_json, body, limit)


class _GuardedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            return await handler(_GuardedRequest(request.scope, request.receive))

        return guarded


def read_json(body: bytes, max_depth: int) -> Any:
    """JSON of a body.

    Raises:
        ApiError: it is none, is nested too deeply, or holds half of a surrogate pair.
    """
    try:
        value = json.loads(body)
    except RecursionError:
        raise ApiError(400, f"the body is nested deeper than {max_depth} levels.") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    level, depth = [value], 0
    while level:
        if depth > max_depth:
            raise ApiError(400, f"the body is nested deeper than {max_depth} levels.")
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below.extend(one.values())
                below.extend(one)
            elif isinstance(one, list):
                below.extend(one)
            elif isinstance(one, str) and not one.isascii():
                _check_text(one)
        level, depth = below, depth + 1
    return value


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, "the body holds half of a surrogate pair, which is no character."
        ) from None


# Routes.


def _routes(server: Server) -> APIRouter:
    router = APIRouter(route_class=_GuardedRoute)
    settings, bridge, asker = server.settings, server.bridge, server.asker

    @router.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        name = asker.check_model(body.model)
        asked = await run_in_threadpool(asker.chat, body)
        work = Work(server, body, asked, name, f"chatcmpl-{_id(body, request)}")
        return await work.answer(request)

    @router.post("/v1/completions", responses=ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        name = asker.check_model(body.model)
        asked = await run_in_threadpool(asker.completion, body)
        work = Work(server, body, asked, name, f"cmpl-{_id(body, request)}")
        return await work.answer(request)

    @router.get("/v1/models")
    async def models() -> Response:
        """The names of the model."""
        return json_response(
            {"object": "list", "data": [_model(server, n) for n in settings.model_names]}
        )

    @router.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> Response:
        """One of them."""
        return json_response(_model(server, asker.check_model(name)))

    @router.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Tokens of a text or of a conversation."""
        asker.check_model(body.model)
        ids = await run_in_threadpool(asker.tokens, body)
        found: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": asker.limits.max_model_len,
            "tokens": list(ids),
            "token_strs": [asker.text.alone(i) for i in ids] if body.return_token_strs else None,
        }
        return json_response(found)

    @router.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens."""
        asker.check_model(body.model)
        return json_response({"prompt": await run_in_threadpool(asker.decode, body.tokens)})

    @router.get("/health", responses={503: {"description": "The engine has died."}})
    async def health() -> Response:
        """200 while the engine takes work."""
        if bridge.alive:
            return Response(status_code=200)
        return ApiError(503, f"the engine has stopped: {type(bridge.death).__name__}").response()

    @router.get("/ping", responses={503: {"description": "The engine has died."}})
    @router.post("/ping", responses={503: {"description": "The engine has died."}})
    async def ping() -> Response:
        """The same."""
        return await health()

    @router.get("/version")
    async def version() -> Response:
        """Of this package."""
        return json_response({"version": installed_version("foretell")})

    @router.get("/load")
    async def load() -> Response:
        """Requests that are being answered."""
        return json_response({"server_load": server.under_way})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(exposition(server.collector), media_type="text/plain; version=0.0.4")

    @router.get("/server_info")
    async def server_info() -> Response:
        """How the server was set up, and what drafts."""
        config = server.parts.config
        return json_response(
            {
                "model": list(settings.model_names),
                "max_model_len": asker.limits.max_model_len,
                "vocab_size": asker.limits.vocab_size,
                "config": json.loads(json.dumps(replies.plain(config), default=str)),
                "speculation": server.parts.driver.engine.resolved.as_dict(),
                "started": server.started,
                "metrics": stats(bridge, server.parts),
            }
        )

    return router


def _model(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(server.started),
        "owned_by": "foretell",
        "root": server.parts.config.model,
        "parent": None,
        "max_model_len": server.asker.limits.max_model_len,
    }


def _id(body: Common, request: Request) -> str:
    return body.request_id or str(request.state.request_id) or uuid.uuid4().hex


class Work:
    """One request on its way through the engine.

    Args:
        name: of the model, as the answer says it.
        answer_id: of the answer.
    """

    def __init__(
        self, server: Server, body: Common, asked: Asked, name: str, answer_id: str
    ) -> None:
        self._server, self._body, self._asked = server, body, asked
        self._chat = body if isinstance(body, ChatRequest) else None
        self._id, self._name, self._created = answer_id, name, int(time.time())
        logprobs = body.logprobs if isinstance(body, ChatRequest | CompletionRequest) else None
        self._style = Style(
            server.asker.text,
            ids_as_tokens=bool(body.return_tokens_as_token_ids),
            logprobs=logprobs is not None and logprobs is not False,
            token_ids=bool(body.return_token_ids),
            metrics=body.speculation_metrics,
            drafts=body.report_drafts,
        )
        self._calls: list[Call] = []

    async def answer(self, request: Request) -> Response:
        """Queue, and answer whole or as a stream."""
        self._check_queue()
        try:
            self._calls = [self._server.bridge.submit(job) for job in self._asked.jobs]
        except Draining as error:
            raise _busy(str(error), 1) from error
        except EngineDead as error:
            raise ApiError(500, str(error)) from error
        self._server.under_way += 1
        if self._body.stream:
            return _Stream(self._events(), self._close)
        try:
            return await self._whole(request)
        finally:
            self._close()

    def _check_queue(self) -> None:
        server = self._server
        coming = sum(job.params.n for job in self._asked.jobs)
        most = server.parts.config.max_num_seqs + server.settings.max_queue
        if server.bridge.open + coming > most and server.bridge.open > 0:
            latency = server.bridge.metrics.latency.mean
            raise _busy(
                f"{server.bridge.open} requests are under way and {server.settings.max_queue} may wait; try later.",
                max(1, min(60, math.ceil(latency))),
            )

    def _close(self) -> None:
        """Once, however the request ended."""
        self._server.under_way -= 1
        for call in self._calls:
            self._server.bridge.cancel(call)

    # Whole answers.

    async def _whole(self, request: Request) -> Response:
        gathered = asyncio.ensure_future(self._gather())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait(
                (gathered, gone),
                timeout=self._server.settings.request_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if gathered.done():
                return json_response(self.body_of(gathered.result()))
            if gone.done():
                return Response(status_code=499)
            raise ApiError(504, "the request took too long to answer.")
        except ValueError as error:
            raise ApiError(400, str(error), self._place) from error
        except EngineDead as error:
            raise ApiError(500, str(error)) from error
        finally:
            for task in (gathered, gone):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _gather(self) -> list[RequestOutput]:
        found = []
        for call in self._calls:
            async for output in call.outputs():
                found.append(output)
        return found

    def body_of(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer, from finished outputs, one per job.

        Raises:
            ApiError: one of them failed.
        """
        usage, choices = Usage(), list[dict[str, Any]]()
        for place, output in enumerate(outputs):
            usage.add(place, output)
            for one in output.outputs:
                if one.finish_reason == "error":
                    raise ApiError(500, str(one.stop_reason or "the request failed."))
                if self._chat is not None:
                    choices.append(
                        replies.chat_choice(
                            one,
                            output,
                            self._style,
                            self._reader(output),
                            self._server.settings.response_role,
                            self._asked.prefix,
                        )
                    )
                else:
                    index = place * len(output.outputs) + one.index
                    echo = self._echo(output)
                    choices.append(replies.text_choice(one, index, output, self._style, echo))
        body = self._envelope(choices, stream=False)
        body["usage"] = usage.body()
        if self._chat is not None and outputs[0].prompt_logprobs is not None:
            body["prompt_logprobs"] = replies.prompt_logprobs(outputs[0])
        return body

    # Streams.

    async def _events(self) -> AsyncIterator[bytes]:
        """Server-sent events up to [DONE]; whatever ends them early aborts the request."""
        try:
            limit = self._server.settings.request_timeout
            deadline = None if limit is None else asyncio.get_running_loop().time() + limit
            async with asyncio.timeout_at(deadline):
                async for chunk in self._chunks():
                    yield _event(chunk)
        except TimeoutError:
            yield _event(ApiError(504, "the request took too long to answer.").body())
        except ApiError as error:
            yield _event(error.body())
        except ValueError as error:
            yield _event(ApiError(400, str(error), self._place).body())
        except EngineDead as error:
            yield _event(ApiError(500, str(error)).body())
        yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        options = self._body.stream_options
        told = self._server.settings.force_include_usage
        told = told or bool(options is not None and options.include_usage)
        running = bool(options is not None and options.continuous_usage_stats and told)
        usage, streams = Usage(), dict[tuple[int, int], ChoiceStream]()
        async for place, output in _merged(self._calls):
            usage.add(place, output)
            for one in output.outputs:
                if one.finish_reason == "error":
                    raise ApiError(500, str(one.stop_reason or "the request failed."))
                stream = streams.get((place, one.index))
                if stream is None:
                    stream = streams[place, one.index] = self._stream(place, one.index, output)
                if self._chat is not None:
                    pieces = stream.chat_pieces(one, output)
                else:
                    pieces = stream.text_pieces(one, output, self._echo(output))
                for piece in pieces:
                    chunk = self._envelope([piece], stream=True)
                    if running:
                        chunk["usage"] = usage.body()
                    yield chunk
        if told:
            chunk = self._envelope([], stream=True)
            chunk["usage"] = usage.body()
            yield chunk

    def _stream(self, place: int, index: int, output: RequestOutput) -> ChoiceStream:
        if self._chat is None:
            n = self._asked.jobs[place].params.n
            return ChoiceStream(place * n + index, self._style)
        role = self._server.settings.response_role
        return ChoiceStream(index, self._style, self._reader(output), role, self._asked.prefix)

    # Both.

    @property
    def _place(self) -> str:
        return "prompt" if self._chat is None else "messages"

    def _envelope(self, choices: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._chat is not None:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._name,
            "choices": choices,
        }

    def _echo(self, output: RequestOutput) -> str | None:
        if not self._body.echo:
            return None
        if output.prompt is not None and self._body.truncate_prompt_tokens is None:
            return output.prompt
        return self._server.asker.text.decode(output.prompt_token_ids)

    def _reader(self, output: RequestOutput) -> Reader:
        body, settings = self._chat, self._server.settings
        assert body is not None
        rest: Reader = PlainReader()
        if body.tools and body.tool_choice != "none" and settings.tool_parser is not None:
            if isinstance(body.tool_choice, NamedTool):
                rest = ForcedReader(body.tool_choice.function.name)
            elif body.tool_choice == "required":
                rest = ForcedReader(None)
            else:
                parser = settings.tool_parser
                rest = reader_of(
                    format_of(self._server.asker.template) if parser == "auto" else parser
                )
        if settings.reasoning_parser is None:
            return rest
        opened = (output.prompt or "").rstrip().endswith(THINK)
        return ReasoningReader(rest, opened or settings.reasoning_parser == "deepseek_r1")


class _Stream(StreamingResponse):
    """Server-sent events; `close` is called once, also if the client goes before the first of them."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


def _busy(said: str, seconds: int) -> ApiError:
    return ApiError(503, said, headers={"retry-after": str(seconds)})


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _merged(calls: Sequence[Call]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several calls as they come, each with the place of its call."""
    if len(calls) == 1:
        async for output in calls[0].outputs():
            yield 0, output
        return
    waiting = {asyncio.ensure_future(call.queue.get()): place for place, call in enumerate(calls)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                got = task.result()
                if isinstance(got, Exception):
                    raise got
                if not got.finished:
                    waiting[asyncio.ensure_future(calls[place].queue.get())] = place
                yield place, got
    finally:
        for task in waiting:
            task.cancel()
