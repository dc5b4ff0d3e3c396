"""A live server in this process, around a tiny random model with a byte-level tokenizer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import uvicorn
from lab import tiny_decoder
from tiny_tokenizers import byte_level

from foretell.config import EngineConfig
from foretell.engine.build import engine_around
from foretell.engine.engine import Engine
from foretell.llm import LLM
from foretell.metrics import Recorder
from foretell.runner.build import Parts, assemble
from foretell.server.app import build_app
from foretell.server.run import Process
from foretell.server.settings import ServerSettings
from foretell.server.state import Server, build_server
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.drafter import Drafter, NoDrafter
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

VOCABULARY = 272
EOS = 2
MODEL = "tiny"
PATIENCE = 120.0  # seconds that a test waits for what must come, on a machine with much else to do


def drafting(seed: int) -> DraftModelDrafter:
    """A draft model of the tiny target's vocabulary; seed 0 is the target itself."""
    vocabulary = same(VOCABULARY, VOCABULARY, VOCABULARY, torch.device("cpu"))
    return DraftModelDrafter(
        tiny_decoder(seed, vocabulary=VOCABULARY), vocabulary, Acceptance.MATCH
    )


def tiny_llm(
    drafter: Drafter | None = None,
    tree: Tree | None = None,
    target: torch.nn.Module | None = None,
    **config: object,
) -> LLM:
    """An LLM around a random decoder in float64."""
    settings: dict[str, object] = {
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "model": MODEL,
        "adaptive": False,  # always the same tree: counts in tests are exact
    }
    settings.update(config)
    full = EngineConfig(**settings)  # type: ignore[arg-type]
    parts = Parts(
        target or tiny_decoder(0, vocabulary=VOCABULARY),  # type: ignore[arg-type]
        drafter or NoDrafter(),
        torch.float64,
        tree=tree or chain(0),
        scratch=getattr(drafter, "scratch", 0),
    )
    tokenizer = byte_level()
    recorder = Recorder()
    engine = engine_around(assemble(full, parts, tokenizer), full, recorder)
    return LLM.around(full, engine, tokenizer, recorder)  # type: ignore[arg-type]


class Gate:
    """The tiny target behind a gate: while it is shut, a pass of the target waits, and the engine with it."""

    def __init__(self) -> None:
        self.target = tiny_decoder(0, vocabulary=VOCABULARY)
        self.reached = threading.Event()  # a pass waits, or has waited
        self._open = threading.Event()
        self._plain = self.target.logits
        self.target.logits = self._logits  # type: ignore[method-assign]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._open.is_set():
            self.reached.set()
            assert self._open.wait(PATIENCE), "nobody opened the gate"
        return self._plain(hidden)

    def open(self) -> None:
        """Let the passes through from here on."""
        self._open.set()


@dataclass
class Live:
    """A server that listens."""

    llm: LLM
    settings: ServerSettings
    server: Server = field(init=False)
    port: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.server = build_server(self.llm.parts(), self.settings)
        config = uvicorn.Config(
            build_app(self.server),
            host="127.0.0.1",
            port=0,
            log_config=None,
            http="h11",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
        )
        self.process = Process(config, self.server)
        self.server.bridge.start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while not self.process.started:
            time.sleep(0.01)
            assert self._thread.is_alive(), "the server did not start"
        self.port = self.process.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        return self.llm.parts().driver.engine

    def _run(self) -> None:
        asyncio.run(self.process.serve())

    def close(self) -> None:
        self.process.should_exit = True
        self._thread.join(timeout=PATIENCE)
        self.server.bridge.stop()
        assert not self._thread.is_alive(), "the server does not end"

    def idle(self, timeout: float = PATIENCE) -> None:
        """Wait until nothing runs, and prove that nothing leaked."""
        wait_for(lambda: self.server.bridge.open == 0 and not self.engine.has_work(), timeout)
        scheduler = self.engine.scheduler
        scheduler.check()
        assert not scheduler.running
        assert not scheduler.waiting
        assert scheduler.blocks.available == scheduler.blocks.usable, "blocks are lost"
        wait_for(lambda: self.server.under_way == 0, timeout)


def start(llm: LLM | None = None, **settings: object) -> Live:
    """A listening server; `close` it."""
    return Live(
        llm or tiny_llm(drafting(0), chain(3)),
        ServerSettings(model_names=(MODEL,), **settings),  # type: ignore[arg-type]
    )


def wait_for(true: Callable[[], bool], timeout: float = PATIENCE) -> None:
    """Until it is true."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
