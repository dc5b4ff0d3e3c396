"""The process: SIGTERM under load loses no finished response, the engine's death ends it with 1, a restart is clean."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from serving_lab import wait_for

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from serving_lab import MODEL, drafting, tiny_llm
from foretell.server.run import Listen, serve
from foretell.server.settings import ServerSettings
from foretell.spec.tree import chain
llm = tiny_llm(drafting(0), chain(3), max_num_seqs=4, max_model_len=500)
if sys.argv[3] == "dying":
    engine = llm.parts().driver.engine
    step, count = engine.step, [0]
    def dying():
        count[0] += 1
        if count[0] > 5:
            raise MemoryError("injected")
        return step()
    engine.step = dying
settings = ServerSettings(model_names=(MODEL,), death_grace=1.0)
sys.exit(serve(llm.parts(), settings, Listen(port=int(sys.argv[2]))))
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, kind: str = "sound", port: int | None = None) -> None:
        self.port = port or free_port()
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(SUPPORT), str(self.port), kind],
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        wait_for(self.up, 60)

    def up(self) -> bool:
        assert self.process.poll() is None, self.process.stderr.read()
        try:
            return httpx.get(f"{self.url}/health", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False

    def end(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(url: str, count: int, length: int) -> tuple[list[threading.Thread], list[object]]:
    """Clients under way, half of them streaming; what each got."""
    got: list[object] = [None] * count

    def one(place: int) -> None:
        body = {"prompt": f"p{place}", "max_tokens": length, "ignore_eos": True, "seed": 1}
        try:
            if place % 2:
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                got[place] = answer.status_code, answer.json()
                return
            text, lines = "", []
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60
            ) as stream:
                lines = [line for line in stream.iter_lines() if line]
            for line in lines[:-1]:
                piece = json.loads(line[6:])
                text += str(piece["error"]) if "error" in piece else ""
                text += "".join(c["text"] for c in piece.get("choices", ()))
            got[place] = lines[-1], text
        except httpx.HTTPError as error:
            got[place] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads, got


def test_sigterm_under_load_answers_what_was_begun_and_a_restart_is_clean() -> None:
    server = Process()
    threads, got = answers(server.url, 8, 300)
    load = lambda: httpx.get(f"{server.url}/load").json()["server_load"]  # noqa: E731
    wait_for(lambda: load() == 8)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    late, refused = answers(server.url, 1, 5)
    for thread in (*threads, *late):
        thread.join(60)
    assert server.end() == 0
    for place, found in enumerate(got):
        assert isinstance(found, tuple), found
        if place % 2:
            assert found[0] == 200
            assert found[1]["usage"]["completion_tokens"] == 300
        else:
            assert found[0] == "data: [DONE]"
            assert "error" not in found[1]
    late_one = refused[0]
    assert isinstance(late_one, httpx.HTTPError) or "error" in str(late_one)
    log = [json.loads(line) for line in server.process.stderr.read().splitlines()]
    assert any(line["message"] == "request" and line["request_id"] for line in log)
    assert any(line["message"] == "starting" and line["speculation"]["method"] for line in log)
    again = Process(port=server.port)
    threads, got = answers(again.url, 2, 5)
    for thread in threads:
        thread.join(30)
    assert got[1][0] == 200  # type: ignore[index]
    again.process.send_signal(signal.SIGINT)
    assert again.end() == 0


def test_the_engine_s_death_is_seen_and_ends_the_process_for_its_supervisor() -> None:
    server = Process("dying")
    threads, got = answers(server.url, 2, 300)
    for thread in threads:
        thread.join(30)
    assert got[1][0] == 500  # type: ignore[index]
    assert "injected" in got[1][1]["error"]["message"]  # type: ignore[index]
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert server.end() == 1


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(sent: signal.Signals) -> None:
    server = Process()
    begin = time.monotonic()
    server.process.send_signal(sent)
    assert server.end() == 0
    assert time.monotonic() - begin < 10
