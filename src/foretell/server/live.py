"""The page and its numbers: three files with no outside asset, and /stats, which says what /metrics says.

Invariant: only these files are served, from memory; a path is never joined to a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from foretell.llm import LLMParts
from foretell.server.bridge import Bridge
from foretell.server.errors import json_response
from foretell.server.settings import ServerSettings

FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
# The page loads nothing from elsewhere, runs no inline script and is shown in no frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_router(bridge: Bridge, parts: LLMParts, settings: ServerSettings) -> APIRouter:
    """Routes of the page."""
    router = APIRouter(include_in_schema=False)
    folder = files("foretell.server") / "page"
    for path, (name, kind) in FILES.items():
        router.add_api_route(path, _file((folder / name).read_bytes(), kind), methods=["GET"])

    @router.get("/stats")
    async def numbers() -> Response:
        """What the page shows beside the chat."""
        return json_response({"model": settings.model_names[0], **stats(bridge, parts)})

    return router


def stats(bridge: Bridge, parts: LLMParts) -> dict[str, Any]:
    """The numbers of /metrics that the page shows, and the engine's pace."""
    now, speed = bridge.metrics, bridge.speed
    engine = parts.driver.engine
    return {
        "running": now.state.running,
        "waiting": now.state.waiting,
        "max_num_seqs": parts.config.max_num_seqs,
        "kv_cache_usage": now.state.kv_cache_usage,
        "prompt_tokens": now.prompt_tokens,
        "generation_tokens": now.generation_tokens,
        "num_drafts": now.num_drafts,
        "num_draft_tokens": now.num_draft_tokens,
        "num_accepted_tokens": now.num_accepted_tokens,
        "accepted_per_pos": list(now.num_accepted_tokens_per_pos),
        "mean_acceptance_length": now.mean_acceptance_length,
        "draft_acceptance_rate": now.draft_acceptance_rate,
        "acceptance_rate_per_pos": list(now.acceptance_rate_per_pos) if now.num_drafts else [],
        "time_to_first_token": now.time_to_first_token.mean,
        "fallbacks": now.drafter_fallbacks,
        "drafts": bool(engine.drafts),
        "tokens_per_s": speed.tokens_per_s,
        "steps_per_s": speed.steps_per_s,
        "plain_tokens_per_s": speed.plain_tokens_per_s,
        "plain_measured": speed.plain_step is not None,
        "alive": bridge.alive,
    }


def _file(content: bytes, kind: str) -> Any:
    async def send() -> Response:
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}
        return Response(content, media_type=kind, headers=headers)

    return send
