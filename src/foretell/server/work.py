"""One request on its way through the engine: queued, then answered whole or as server-sent events.

Invariant: a request that ends early in any way (error, disconnect, time limit) aborts what it queued.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from foretell.outputs import RequestOutput
from foretell.server import replies
from foretell.server.asked import Asked
from foretell.server.bridge import Call, Draining, EngineDead
from foretell.server.errors import ApiError, json_response
from foretell.server.replies import ChoiceStream, Style, Usage
from foretell.server.schema import ChatRequest, Common, CompletionRequest, NamedTool
from foretell.server.state import Server
from foretell.server.tools import (
    THINK,
    ForcedReader,
    PlainReader,
    Reader,
    ReasoningReader,
    format_of,
    reader_of,
)


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
