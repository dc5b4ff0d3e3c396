"""The client against a server on a real socket: chunked HTTP whose events are torn anywhere, and one that hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
from bench_lab import PROMPTS

from foretell.bench.client import Client, Served

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    )
    await reader.readexactly(length)


def ask(handler: Handler) -> Served:
    async def go() -> Served:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
                return await Client(http, {"model": "m"}).ask(PROMPTS[0])
        finally:
            server.close()

    return asyncio.run(go())


def test_events_torn_into_single_bytes_are_whole_pieces() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD)
        body = b": a comment\r\n\r\n"
        for text in ("Ä", "你好", " end"):
            body += event({"choices": [{"delta": {"content": text}}]})
        body += event({"choices": [], "usage": {"completion_tokens": 6, "prompt_tokens": 2}})
        body += b"data: [DONE]\r\n\r\n"
        for place in range(len(body)):
            writer.write(chunk(body[place : place + 1]))
        writer.write(chunk(b""))
        await writer.drain()
        writer.close()

    served = ask(serve)
    assert served.error == ""
    assert len(served.pieces) == 3
    assert (served.tokens, served.prompt_tokens, served.counted) == (6, 2, True)
    assert served.sent <= served.pieces[0] <= served.ended


def test_a_server_that_hangs_up_in_the_middle_is_a_failed_request() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(event({"choices": [{"delta": {"content": "half"}}]})))
        await writer.drain()
        writer.close()

    served = ask(serve)
    assert "RemoteProtocolError" in served.error
