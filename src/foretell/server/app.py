"""The routes: OpenAI's and vLLM's, and the page. HTTP in, HTTP out; what happens in between is the other modules'.

Invariants: every error is the OpenAI error object; nothing blocks the event loop for longer than a small JSON takes.
"""

from __future__ import annotations

import json
import uuid
from importlib.metadata import version as installed_version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from foretell.server import replies
from foretell.server.bodies import GuardedRoute
from foretell.server.bridge import EngineDead
from foretell.server.errors import ApiError, json_response, param_of, path_of
from foretell.server.exposition import exposition
from foretell.server.guard import Guard
from foretell.server.live import page_router, stats
from foretell.server.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from foretell.server.state import Server
from foretell.server.work import Work

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


# Routes.


def _routes(server: Server) -> APIRouter:
    router = APIRouter(route_class=GuardedRoute)
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
