"""What stands before the routes: request ids, keys, sizes, times, and a line of log for each request.

Pure ASGI, so that streams and disconnects pass through untouched.

Invariants: nothing of a key is logged or said; every response carries X-Request-Id; a body larger or slower than
allowed is refused without being kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretell.server.errors import ApiError
from foretell.server.settings import ServerSettings

log = logging.getLogger("foretell.server")
OPEN = frozenset(
    ("/", "/app.js", "/style.css", "/health", "/ping", "/version", "/metrics", "/favicon.ico")
)
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Guard:
    """The outermost layer.

    Args:
        app: what is guarded; `inner`.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.inner = app
        self._settings = settings
        self._keys = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        start, status, begun = time.monotonic(), 0, False

        async def answer(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                found = MutableHeaders(scope=message)
                found["x-request-id"] = request_id
                found["x-content-type-options"] = "nosniff"
            await send(message)

        body = _Body(receive, self._settings)
        try:
            self._check(scope, headers)
            await self.inner(scope, body.receive, answer)
        except ApiError as error:
            if not begun:
                await error.response()(scope, receive, answer)
        finally:
            if self._settings.log_requests:
                _tell(scope, request_id, status, time.monotonic() - start)

    def _check(self, scope: Scope, headers: Headers) -> None:
        lengths = headers.getlist("content-length")
        if len(lengths) > 1 or (lengths and headers.get("transfer-encoding")):
            raise ApiError(
                400, "the request says its length twice.", headers={"connection": "close"}
            )
        if lengths and not lengths[0].isdecimal():
            raise ApiError(400, "content-length is not a number.")
        if lengths and int(lengths[0]) > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)
        if self._keys and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            self._check_key(headers.getlist("authorization"))

    def _check_key(self, given: Sequence[str]) -> None:
        kind, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        digest = _digest(key.strip())
        known = [secrets.compare_digest(digest, one) for one in self._keys]  # all, in equal time
        if kind.lower() != "bearer" or not any(known):
            raise ApiError(401, "Unauthorized", headers={"www-authenticate": "Bearer"})


class _Body:
    """A request's body, counted and timed."""

    def __init__(self, receive: Receive, settings: ServerSettings) -> None:
        self._receive = receive
        self._settings = settings
        self._size = 0
        self._complete = False
        self._deadline = time.monotonic() + settings.body_timeout

    async def receive(self) -> Message:
        """The next part; after the last one it waits for the client to go."""
        if self._complete:
            return await self._receive()
        left = self._deadline - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0.001))
        except TimeoutError:
            raise ApiError(
                408, "the request took too long to arrive.", headers={"connection": "close"}
            ) from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._settings.max_body_bytes:
                raise _too_large(self._settings.max_body_bytes)
            self._complete = not message.get("more_body", False)
        return message


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes.", headers={"connection": "close"})


def _digest(key: str) -> bytes:
    """Keys are compared as digests, so that not even their lengths show."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _tell(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    client = scope.get("client")
    log.info(
        "request",
        extra={
            "fields": {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status or 499,  # 499: the client went before there was an answer
                "seconds": round(seconds, 4),
                "client": client[0] if client else None,
            }
        },
    )


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what `extra={"fields": ...}` adds."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line |= fields
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
