"""Bodies of requests: JSON that is neither too deep nor holds half characters; large ones are parsed in a thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from foretell.server.errors import ApiError

INLINE = 1 << 16  # bytes of JSON that are parsed in the event loop; more goes to a thread


class _GuardedRequest(Request):
    """A request whose JSON may be neither too deep nor hold half characters."""

    async def json(self) -> Any:
        """The body."""
        body = await self.body()
        limit = self.app.state.server.settings.max_json_depth
        if len(body) <= INLINE:
            return read_json(body, limit)
        return await run_in_threadpool(read_json, body, limit)


class GuardedRoute(APIRoute):
    """A route whose requests are read so."""

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
