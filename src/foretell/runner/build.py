"""Build order after loading: trees, memory, KV, slots, drafter. From models to a Runner that can take plans.

Nothing large is allocated before it is known to fit. Reading checkpoints is `load.py`'s work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretell.config import EngineConfig, Speculation
from foretell.model.decoder import Decoder
from foretell.runner.kv import KVPool
from foretell.runner.memory import available_bytes, weights_bytes
from foretell.runner.runner import Runner
from foretell.runner.slots import STOP_IDS, Slots, SlotSizes
from foretell.runner.step import Device
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.drafter import Drafter, KVSpec, KVView
from foretell.spec.tree import Tree, chain, from_paths
from foretell.spec.verify import Acceptance, Typical
from foretell.spec.vocabulary import Tokenizer

LARGEST_CPU_POOL = 4 << 30  # bytes of KV that an unconfigured CPU engine takes at most


@dataclass(frozen=True, slots=True)
class Built:
    """A runner, and what the host side must know of it."""

    runner: Runner
    tokenizer: (
        Tokenizer | None
    )  # transformers' fast tokenizer; None for an engine of token ids only
    trees: tuple[Tree, ...]
    blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_stop_ids: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Loaded models, before memory is divided."""

    target: Decoder
    drafter: Drafter
    draft_dtype: torch.dtype


def assemble(config: EngineConfig, parts: Parts, tokenizer: Tokenizer | None) -> Built:
    """Divide the memory and wire target, drafter, slots and KV together."""
    target, drafter = parts.target, parts.drafter
    trees = trees_for(config.speculation)
    deepest, widest = max(t.depth for t in trees), max(t.nodes for t in trees)
    max_model_len, blocks = _pool(config, parts, widest)
    device = target.device
    kv = KVPool(
        blocks=blocks,
        block_size=config.block_size,
        target=KVSpec(*target.kv_shape),
        drafter=drafter.kv,
        dtype=target.dtype,
        drafter_dtype=parts.draft_dtype,
        device=device,
    )
    sizes = SlotSizes(
        slots=config.max_num_seqs,
        length=max_model_len,
        blocks=-(-(max_model_len + 2 * widest + 2) // config.block_size),
        nodes=widest,
        depth=deepest,
        features=target.feature_width(drafter.features),
        vocabulary=target.config.vocab_size,
    )
    slots = Slots(sizes, target.dtype, device)
    acceptance = Acceptance(config.acceptance)
    if acceptance is Acceptance.REJECTION and isinstance(drafter, DraftModelDrafter):
        shape = (sizes.slots + 1, widest, sizes.vocabulary)
        slots.draft_probs = torch.zeros(shape, dtype=torch.float32, device=device)
    drafter.bind(target, KVView(kv.drafter, config.block_size) if drafter.kv else None)
    runner = Runner(Device(target, drafter, slots, kv, acceptance, Typical()), trees)
    return Built(
        runner=runner,
        tokenizer=tokenizer,
        trees=trees,
        blocks=blocks,
        max_model_len=max_model_len,
        vocab_size=target.config.vocab_size,
        eos_token_ids=target.config.eos_token_ids,
        max_stop_ids=STOP_IDS,
    )


def trees_for(speculation: Speculation) -> tuple[Tree, ...]:
    """The trees a step may verify: plain decoding, and what the drafter fills."""
    if speculation.drafter is None:
        return (chain(0),)
    given: Sequence[object] | None = speculation.tree
    if given is None:
        return (chain(0), chain(speculation.drafter.num_speculative_tokens))
    if isinstance(given[0], int):
        return (chain(0), Tree(tuple(int(str(parent)) for parent in given)))
    return (chain(0), from_paths([path for path in given if isinstance(path, tuple)]))


def _pool(config: EngineConfig, parts: Parts, nodes: int) -> tuple[int, int]:
    """(max_model_len, blocks of the KV pool, the null block included)."""
    size = config.block_size
    spec, draft = KVSpec(*parts.target.kv_shape), parts.drafter.kv
    per_token = spec.bytes_per_token(parts.target.dtype.itemsize)
    if draft is not None:
        per_token += draft.bytes_per_token(parts.draft_dtype.itemsize)
    memory = config.kv_cache_memory_bytes
    if memory is None:
        memory = available_bytes(parts.target.device, config.gpu_memory_utilization)
        if parts.target.device.type == "cpu":
            memory = min(memory, LARGEST_CPU_POOL)
    longest = config.max_model_len or parts.target.config.max_position
    slack = 2 * nodes + size
    fits = memory // (per_token * size)
    needed = config.max_num_seqs * (-(-(longest + slack) // size)) + 1
    blocks = min(fits, needed)
    room = (blocks - 1) * size - slack
    if config.max_model_len is None:
        longest = min(longest, room)
    if longest < 1 or room < longest:
        raise ValueError(
            f"max_model_len={longest} needs {(longest + slack) * per_token / 2**20:.0f} MiB of KV cache, but "
            f"{max(memory, 0) / 2**20:.0f} MiB are left beside {weights_bytes(parts.target) / 2**20:.0f} MiB of "
            "weights; lower max_model_len, raise gpu_memory_utilization or kv_cache_memory_bytes, use a smaller "
            "draft model or fewer num_speculative_tokens"
        )
    return longest, blocks
