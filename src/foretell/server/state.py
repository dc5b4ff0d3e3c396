"""What the routes share: the engine's bridge, the reader of requests, the counters. Made before anything listens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from foretell.llm import LLMParts
from foretell.server.asked import Asker
from foretell.server.bridge import Bridge
from foretell.server.exposition import EngineCollector
from foretell.server.settings import ServerSettings


@dataclass(slots=True)
class Server:
    """What the routes share.

    Args:
        parts: of the LLM that is served.
    """

    parts: LLMParts
    settings: ServerSettings
    bridge: Bridge
    asker: Asker
    collector: EngineCollector
    started: float = field(default_factory=time.time)
    under_way: int = 0  # HTTP requests that are being answered


def build_server(parts: LLMParts, settings: ServerSettings) -> Server:
    """Everything behind the routes; the engine's thread is not started."""
    bridge = Bridge(parts.driver)
    parts.driver.engine.tolerant = True
    config = parts.config
    collector = EngineCollector(
        lambda: bridge.metrics,
        settings.metrics_prefix,
        settings.model_names[0],
        config.drafter is not None or bool(parts.driver.engine.drafts),
        {
            "block_size": str(config.block_size),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "num_gpu_blocks": str(parts.driver.engine.num_blocks),
        },
    )
    return Server(parts, settings, bridge, Asker(parts, settings), collector)
