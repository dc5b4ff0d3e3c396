"""From a configuration to an engine: the host's side around a built runner."""

from __future__ import annotations

from typing import cast

from foretell.config import EngineConfig
from foretell.engine.blocks import BlockManager
from foretell.engine.engine import Engine, Watcher
from foretell.engine.scheduler import Scheduler
from foretell.engine.self_test import Tokenizer, prove
from foretell.engine.trace import TraceWriter
from foretell.runner.build import Built
from foretell.runner.load import build
from foretell.spec import grammar
from foretell.spec.controller import Controller
from foretell.spec.grammar import Grammars


def build_engine(config: EngineConfig, watcher: Watcher | None = None) -> tuple[Engine, object]:
    """Load and allocate everything; returns the engine and the tokenizer.

    Raises:
        ValueError: see `foretell.runner.build.build`.
    """
    writer = None
    if isinstance(config.trace, str):
        watcher = writer = TraceWriter(config.trace, watcher)
    built = build(config)
    if writer is not None:
        writer.begin(config.model, built.resolved)
    engine = engine_around(built, config, watcher)
    engine.compat = prove(built, config, cast("Tokenizer | None", built.tokenizer))
    return engine, built.tokenizer


def engine_around(built: Built, config: EngineConfig, watcher: Watcher | None = None) -> Engine:
    """The engine of a built runner."""
    if built.tokenizer is not None:
        tokens = cast("grammar.Tokenizer", built.tokenizer)
        built.runner.grammars = Grammars(tokens, built.vocab_size, built.eos_token_ids)
    scheduler = Scheduler(
        blocks=BlockManager(built.blocks, config.block_size, config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=built.max_model_len,
        trees=built.trees,
        scheduling=config.scheduling_policy,
        scratch=built.scratch,
        drafter_kv=built.drafter_kv,
        drafted_length=built.drafted_length,
        learned_prompt=built.learned_prompt,
        controller=Controller(built.trees) if config.adapts and len(built.trees) > 1 else None,
        rests=built.rests,
    )
    engine = Engine(
        built.runner,
        scheduler,
        built.eos_token_ids,
        built.vocab_size,
        built.max_stop_ids,
        watcher,
    )
    engine.resolved = built.resolved
    return engine
