"""Build order after loading: trees, memory, KV, slots, drafter. From models to a Runner that can take plans.

Nothing large is allocated before it is known to fit. Reading checkpoints is `load.py`'s work.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from foretell.config import EngineConfig, checkpoint_of
from foretell.model.decoder import Decoder
from foretell.runner.kv import KVPool
from foretell.runner.memory import device_bytes, drafter_bytes, weights_bytes
from foretell.runner.memory_plan import MemoryPlan, Model, Part, Shape, explain, make_plan
from foretell.runner.runner import Runner
from foretell.runner.slots import STOP_IDS, Slots, SlotSizes
from foretell.runner.step import CATCH_UP, Device
from foretell.spec.compat import Check
from foretell.spec.drafter import Drafter, KVSpec, KVView, Learner
from foretell.spec.ladder import ladder
from foretell.spec.resolved import Resolved
from foretell.spec.tree import Tree, chain
from foretell.spec.tree_spec import static_tree
from foretell.spec.verify import Acceptance, Typical
from foretell.spec.vocabulary import Tokenizer

log = logging.getLogger("foretell")

GRAPHS = 24  # that a run captures, about: a few buckets of rows, of trees and of kinds of sampling
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
    scratch: int  # key indices behind the committed text that the drafter writes
    drafter_kv: bool  # the drafter has KV behind the block ids
    rests: bool  # the drafter can catch up later, so plain steps need not run it
    drafted_length: int  # longest text that is drafted for
    resolved: Resolved  # what drafts, in words and numbers
    checks: tuple[Check, ...]  # what was compared between drafter and target
    learned_prompt: (
        int | None
    )  # prompt tokens that go before the texts of ended requests; None = nobody learns


@dataclass(frozen=True, slots=True)
class Parts:
    """Loaded models, before memory is divided, and what the drafter needs.

    Args:
        draft_dtype: of the drafter's KV.
        tree: what is drafted, or the bound of trees that grow; None = what the configuration says.
        grows: drafts bring their parents.
        draws: drafts bring the laws they were drawn from.
        scratch: key indices behind the committed text that the drafter writes.
        longest: tokens of the longest text it was made for; None = no limit.
        learner: hears the texts of requests that ended.
        learned_prompt: how many of their prompts' last tokens it wants before them.
        resolved: what drafts, in words and numbers; its tree is filled in here.
        checks: what was compared between drafter and target.
    """

    target: Decoder
    drafter: Drafter
    draft_dtype: torch.dtype
    tree: Tree | None = None
    grows: bool = False
    draws: bool = False
    scratch: int = 0
    longest: int | None = None
    learner: Learner | None = None
    learned_prompt: int = 0
    resolved: Resolved = Resolved(method="custom")  # noqa: RUF009  (frozen)
    checks: tuple[Check, ...] = ()


def assemble(config: EngineConfig, parts: Parts, tokenizer: Tokenizer | None) -> Built:
    """Divide the memory and wire target, drafter, slots and KV together."""
    target, drafter = parts.target, parts.drafter
    tree = static_tree(config.speculation) if parts.tree is None else parts.tree
    trees = ladder(tree, parts.grows) if config.adapts else tuple(dict.fromkeys((chain(0), tree)))
    tail = max(tree.nodes, parts.scratch)
    max_model_len, blocks = _pool(config, parts, tree)
    drafted_length = _drafted_length(config, parts, max_model_len)
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
        blocks=-(-(max_model_len + 2 * tail + 2 + CATCH_UP) // config.block_size),
        nodes=tree.nodes,
        depth=tree.depth,
        features=target.feature_width(drafter.features),
        vocabulary=target.config.vocab_size,
        drafted=drafted_length,
    )
    slots = Slots(sizes, target.dtype, device)
    acceptance = Acceptance(config.acceptance)
    if parts.grows:
        slots.draft_parents = torch.zeros_like(slots.draft)
    if parts.draws and acceptance is Acceptance.REJECTION:
        shape = (*slots.draft.shape, sizes.vocabulary)
        slots.draft_probs = torch.zeros(shape, dtype=torch.float32, device=device)
    drafter.bind(target, KVView(kv.drafter, config.block_size) if drafter.kv else None)
    pages = target.ops.kv_pages(kv.target)
    everything = Device(target, drafter, slots, kv, acceptance, Typical(), pages)
    runner = Runner(
        everything,
        trees,
        eager=config.enforce_eager,
        learner=parts.learner,
        traced=config.trace is not None,
    )
    return Built(
        runner=runner,
        tokenizer=tokenizer,
        trees=trees,
        blocks=blocks,
        max_model_len=max_model_len,
        vocab_size=target.config.vocab_size,
        eos_token_ids=tuple(
            token for token in target.config.eos_token_ids if token < target.config.vocab_size
        ),
        max_stop_ids=STOP_IDS,
        scratch=parts.scratch,
        drafter_kv=drafter.kv is not None,
        rests=not drafter.features or tree.depth < CATCH_UP,
        drafted_length=drafted_length,
        resolved=replace(parts.resolved, tree=tree, acceptance=config.acceptance),
        checks=parts.checks,
        learned_prompt=None if parts.learner is None else parts.learned_prompt,
    )


def _drafted_length(config: EngineConfig, parts: Parts, max_model_len: int) -> int:
    """Longest text that is drafted for."""
    own = max_model_len if parts.longest is None else parts.longest
    draft = checkpoint_of(config.drafter)
    if draft is not None:
        own = draft.length_limit(own, max_model_len)
    if own < max_model_len:
        log.info("drafts stop at %d tokens of text, the target goes on to %d", own, max_model_len)
    return min(own, max_model_len)


def _pool(config: EngineConfig, parts: Parts, tree: Tree) -> tuple[int, int]:
    """(max_model_len, blocks of the KV pool, the null block included)."""
    asked, most = config.max_model_len, parts.target.config.max_position
    if asked is not None and asked > most:
        raise ValueError(
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
            f"({most}), the longest text that the model was made for; lower it"
        )
    plan = plan_of(config, parts, tree)
    if not plan.works:
        raise ValueError(explain(plan))
    return plan.division.longest, plan.division.blocks


def plan_of(config: EngineConfig, parts: Parts, tree: Tree) -> MemoryPlan:
    """What the loaded models and the configuration leave for KV on this device."""
    target, drafter = parts.target, parts.drafter
    weights = Model(
        "weights of the target",
        weights_bytes(target),
        KVSpec(*target.kv_shape),
        target.dtype.itemsize,
    )
    draft = Model(
        "weights of the drafter",
        drafter_bytes(drafter),
        drafter.kv,
        parts.draft_dtype.itemsize,
    )
    on_cpu = target.device.type == "cpu"
    shape = Shape(
        hidden=target.config.hidden_size,
        inner=target.config.intermediate_size,
        vocabulary=target.config.vocab_size,
        itemsize=target.dtype.itemsize,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        nodes=tree.nodes,
        depth=tree.depth,
        scratch=parts.scratch,
        features=target.feature_width(drafter.features),
        laws=parts.draws and Acceptance(config.acceptance) is Acceptance.REJECTION,
        graphs=0 if on_cpu or config.enforce_eager else GRAPHS,
    )
    total, used = device_bytes(target.device)
    loaded = weights.bytes + draft.bytes
    return make_plan(
        weights,
        draft,
        shape,
        total=total + loaded if on_cpu else total,  # of a host, what it can still give
        utilization=config.gpu_memory_utilization,
        asked=config.max_model_len,
        most=target.config.max_position,
        taken=[Part("already taken", max(used - loaded, 0), "driver and other processes")],
        kv_bytes=config.kv_cache_memory_bytes,
        largest_pool=LARGEST_CPU_POOL if on_cpu else None,
    )
