"""From settings to a listening process, and down again.

SIGTERM and SIGINT: no new requests, what runs is answered (up to the drain time), then the process ends with 0. If the
engine's thread dies, /health says so for a moment and the process ends with 1, for a supervisor to start it anew.

Invariant: a response that was begun is finished or ended with an error, never cut in silence by our own end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from foretell.llm import LLMParts
from foretell.server.app import build_app
from foretell.server.guard import JsonLines
from foretell.server.settings import ServerSettings
from foretell.server.state import Server, build_server

log = logging.getLogger("foretell.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where the server listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    root_path: str = ""
    log_level: str = "info"


class Process(uvicorn.Server):
    """uvicorn, which on its way down lets the engine finish what it has begun."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._serving = server

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """As uvicorn does, but a signal that was obeyed is not raised once more: the exit code is ours."""
        with super().capture_signals():
            try:
                yield
            finally:
                self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what is new, drain, close."""
        settings = self._serving.settings
        log.info("draining", extra={"fields": {"open": self._serving.bridge.open}})
        ended = await self._serving.bridge.drain(settings.drain_timeout)
        if not ended:
            log.warning("requests were aborted at the end of the drain time")
        await super().shutdown(sockets)


def serve(parts: LLMParts, settings: ServerSettings, listen: Listen) -> int:
    """Serve until a signal or the engine's death; returns the exit code."""
    log_as_json(listen.log_level)
    server = build_server(parts, settings)
    config = uvicorn.Config(
        build_app(server),
        host=listen.host,
        port=listen.port,
        uds=listen.uds,
        ssl_keyfile=listen.ssl_keyfile,
        ssl_certfile=listen.ssl_certfile,
        root_path=listen.root_path,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http="h11",
        ws="none",
        lifespan="off",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(settings.drain_timeout) + 5,
    )
    process = Process(config, server)
    resolved = parts.driver.engine.resolved.as_dict()
    log.info("starting", extra={"fields": {"model": parts.config.model, "speculation": resolved}})
    server.bridge.start()
    try:
        asyncio.run(_watched(process, server))
    finally:
        server.bridge.stop()
    return 0 if server.bridge.death is None else 1


async def _watched(process: Process, server: Server) -> None:
    loop = asyncio.get_running_loop()

    def end_soon() -> None:
        def end() -> None:
            process.should_exit = True

        loop.call_later(server.settings.death_grace, end)

    def on_death(error: BaseException) -> None:
        loop.call_soon_threadsafe(end_soon)

    server.bridge.on_death = on_death
    if server.bridge.death is not None:  # before anybody listened for it
        end_soon()
    await process.serve()


def log_as_json(level: str) -> None:
    """All logs of this process as JSON lines on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("foretell", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(level.upper())
