"""Errors as OpenAI clients know them: {"error": {"message", "type", "param", "code"}}, and which parameter is meant.

Invariant: a message never holds more of the request than a short piece, and nothing of a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import HTTPException
from starlette.responses import Response

TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "BadRequestError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
LONGEST = 1000  # characters of a message


class ApiError(HTTPException):
    """A request that gets an error instead of an answer.

    Args:
        status: of HTTP, and `code` in the body.
        param: the request's field that is wrong.
        headers: for the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.status, self.message, self.param = status, message, param

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "BadRequestError" if self.status < 500 else TYPES[500])
        message = self.message if len(self.message) <= LONGEST else self.message[:LONGEST] + "..."
        return {
            "error": {"message": message, "type": kind, "param": self.param, "code": self.status}
        }

    def response(self) -> Response:
        """The error as an HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def json_response(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON in ASCII, so that no text can break it."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


_SPECIAL = (
    ("sample logprobs", "logprobs"),
    ("prompt logprobs", "prompt_logprobs"),
    ("maximum context length", "prompt"),
    ("decoder prompt", "prompt"),
    ("Token id", "prompt"),
    ("chat template", "messages"),
    ("conversation", "messages"),
)


def param_of(message: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """Which field of a request a ValueError of the library speaks of."""
    for sign, param in _SPECIAL:
        if sign in message:
            return otherwise if param in ("prompt", "messages") else param
    names = set(known)
    return next((word for word in re.findall(r"[a-z_]+", message) if word in names), otherwise)


def from_value_error(error: ValueError, known: Iterable[str], otherwise: str | None) -> ApiError:
    """A 400 of a ValueError that the library raised about a request."""
    return ApiError(400, str(error), param_of(str(error), known, otherwise))


def path_of(location: Sequence[object]) -> str:
    """("body", "messages", 0, "role") -> "messages[0].role"; parts that name a type are left out."""
    said = ""
    for part in location:
        if isinstance(part, int):
            said += f"[{part}]"
        elif isinstance(part, str) and re.fullmatch(r"[A-Za-z_]\w*", part) and part != "body":
            if part in ("str", "int", "float", "bool"):
                continue
            said += f".{part}" if said else part
    return said
