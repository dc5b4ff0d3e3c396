"""What takes how much memory, and what to do where it does not fit. Plain arithmetic: nothing is allocated or measured.

The engine divides its memory by `divide` and explains a failure by `remedies`; `foretell plan` shows the same numbers
before anything is loaded. memory.py says how much there is.

Invariant: `divide` is the only place that knows how many blocks a pool gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretell.spec.drafter import KVSpec

MIB, GIB = 1 << 20, 1 << 30
HIGHEST_UTILIZATION = 0.97  # of a device's memory; the rest is the driver's and the allocator's
GRAPH_BYTES = 6 * MIB  # of one captured graph, its memory pool apart
RESTING = 32  # tokens whose features are kept for a drafter that rests
SLOT_WORDS = 64  # 64-bit numbers per slot besides text, tables and drafts


@dataclass(frozen=True, slots=True)
class Model:
    """Weights of a model and the KV of one token.

    Args:
        bytes: of the weights as they lie on the device.
        kv: None where it keeps none.
        itemsize: bytes of a number in its KV.
        heads: bytes of the weights that are heads over a vocabulary of their own.
    """

    name: str
    bytes: int
    kv: KVSpec | None
    itemsize: int
    heads: int = 0

    @property
    def per_token(self) -> int:
        """Bytes of KV of one token."""
        return 0 if self.kv is None else self.kv.bytes_per_token(self.itemsize)


@dataclass(frozen=True, slots=True)
class Shape:
    """What steps work on, besides weights.

    Args:
        nodes, depth: of the largest tree.
        scratch: key indices behind the text that the drafter writes.
        features: width of the target feature that a slot keeps, 0 = none.
        inner: width of the MLP.
        laws: drafts keep the law they were drawn from.
        graphs: how many graphs are captured, 0 = none.
    """

    hidden: int
    inner: int
    vocabulary: int
    itemsize: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    nodes: int = 1
    depth: int = 0
    scratch: int = 0
    features: int = 0
    laws: bool = False
    graphs: int = 0

    @property
    def tail(self) -> int:
        """Key indices past the committed text that one step may touch."""
        return max(self.nodes, self.scratch)

    @property
    def slack(self) -> int:
        """Key indices per request that are reserved beside its text."""
        return 2 * self.tail + self.block_size


@dataclass(frozen=True, slots=True)
class Division:
    """What became of the memory for KV.

    Args:
        blocks: of the pool, the null block included.
        longest: tokens of the longest request; below 1 = none fits.
        fits: blocks that the memory has room for; `blocks` may be fewer, where no more are needed.
    """

    blocks: int
    longest: int
    fits: int
    asked: int

    @property
    def works(self) -> bool:
        """One request of the length that was asked for fits."""
        return self.longest >= max(self.asked, 1)


def divide(memory: int, per_token: int, shape: Shape, asked: int | None, most: int) -> Division:
    """Blocks of KV out of `memory` bytes.

    Args:
        per_token: KV bytes of one token, target and drafter together.
        asked: max_model_len, if it was given: less is then no answer.
        most: the longest text that the model was made for.
    """
    size, slack = shape.block_size, shape.slack
    longest = most if asked is None else asked
    fits = memory // (per_token * size)
    needed = shape.max_num_seqs * (-(-(longest + slack) // size)) + 1
    blocks = min(fits, needed)
    return Division(blocks, min(longest, (blocks - 1) * size - slack), fits, asked or 1)


@dataclass(frozen=True, slots=True)
class Part:
    """One user of memory."""

    name: str
    bytes: int
    what: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All of it.

    Args:
        total: bytes of the device.
        utilization: share of them that may be used.
        parts: who takes what, the KV pool last.
        needed: KV bytes that `max_num_seqs` requests of the longest length would take.
    """

    total: int
    utilization: float
    target: Model
    drafter: Model | None
    shape: Shape
    parts: tuple[Part, ...]
    division: Division
    asked: int | None
    most: int
    kv_bytes: int | None = None

    @property
    def budget(self) -> int:
        """Bytes that may be used."""
        return int(self.total * self.utilization)

    @property
    def used(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def per_token(self) -> int:
        """KV bytes of one token, target and drafter."""
        return self.target.per_token + (0 if self.drafter is None else self.drafter.per_token)

    @property
    def works(self) -> bool:
        """The engine would start."""
        return self.division.works

    def requests(self, length: int) -> int:
        """How many requests of so many tokens, prompt and answer, run at once without preemption."""
        if length > self.division.longest:
            return 0
        size = self.shape.block_size
        each = -(-(length + self.shape.slack) // size)
        return min(max((self.division.blocks - 1) // each, 0), self.shape.max_num_seqs)

    @property
    def missing(self) -> int:
        """Bytes that one request of the length asked for still lacks; 0 where it fits."""
        length = self.asked or 1
        size = self.shape.block_size
        blocks = -(-(length + self.shape.slack) // size) + 1
        return max(blocks * size * self.per_token - self.left, 0)

    @property
    def left(self) -> int:
        """Bytes for KV."""
        if self.kv_bytes is not None:
            return self.kv_bytes
        return max(self.budget - (self.used - self.parts[-1].bytes), 0)


def make_plan(
    target: Model,
    drafter: Model | None,
    shape: Shape,
    total: int,
    utilization: float,
    asked: int | None,
    most: int,
    taken: Sequence[Part] = (),
    kv_bytes: int | None = None,
    largest_pool: int | None = None,
) -> MemoryPlan:
    """Add it up.

    Args:
        taken: what else has a part of the device, such as its driver.
        kv_bytes: of the KV pool, if it was given.
        largest_pool: bytes that the KV pool takes at most.
    """
    parts = [Part("weights", target.bytes, target.name)]
    if drafter is not None:
        parts.append(Part("drafter", drafter.bytes, drafter.name))
    parts += workspace(shape, asked or most)
    parts += taken
    free = int(total * utilization) - sum(part.bytes for part in parts)
    memory = free if kv_bytes is None else kv_bytes
    if largest_pool is not None and kv_bytes is None:
        memory = min(memory, largest_pool)
    per_token = target.per_token + (0 if drafter is None else drafter.per_token)
    division = divide(max(memory, 0), per_token, shape, asked, most)
    pool = max(division.blocks, 0) * shape.block_size * per_token
    said = f"{max(division.blocks, 0):,} blocks of {shape.block_size} tokens, {per_token:,} bytes a token"
    parts.append(Part("KV cache", pool, said))
    return MemoryPlan(
        total, utilization, target, drafter, shape, tuple(parts), division, asked, most, kv_bytes
    )


def workspace(shape: Shape, length: int) -> list[Part]:
    """What steps need beside weights and KV.

    A chunk of prompts is as large as the token budget; logits are made for the nodes of all requests, and for sampled
    ones in float32 too.
    """
    rows = shape.max_num_batched_tokens
    wide = 4 * shape.hidden + 3 * shape.inner
    verified = min(shape.max_num_seqs * shape.nodes, rows)
    logits = verified * shape.vocabulary * (shape.itemsize + 4)
    slots = (shape.max_num_seqs + 1) * (
        4 * (length + shape.depth + 2)
        + 8 * (shape.nodes + SLOT_WORDS)
        + 4 * (-(-(length + shape.slack) // shape.block_size))
        + (2 + RESTING) * shape.features * shape.itemsize
    )
    if shape.laws:
        slots += (shape.max_num_seqs + 1) * shape.nodes * shape.vocabulary * 4
    parts = [
        Part("workspace", rows * wide * shape.itemsize, f"activations of {rows:,} rows"),
        Part(
            "logits", logits, f"{verified:,} nodes under verification x {shape.vocabulary:,} tokens"
        ),
        Part("slots", slots, f"text, tables and drafts of {shape.max_num_seqs:,} running requests"),
    ]
    if shape.graphs:
        bytes_ = shape.graphs * GRAPH_BYTES + logits
        parts.append(Part("graphs", bytes_, f"{shape.graphs} captured, and their shared pool"))
    return parts


@dataclass(frozen=True, slots=True)
class Remedy:
    """What could be changed.

    Args:
        saved: bytes that it would gain on each device.
        enough: it alone makes the engine start.
    """

    what: str
    saved: int
    enough: bool


def remedies(plan: MemoryPlan) -> list[Remedy]:
    """What helps, the cheapest first: settings before draft length, before models, before hardware."""
    found = [_more_kv(plan), _fewer_requests(plan), _shorter(plan), _fewer_drafts(plan)]
    if plan.kv_bytes is not None:  # nothing else makes that pool larger
        return [Remedy(what, saved, saved >= plan.missing) for what, saved in filter(None, found)]
    found += [_smaller_drafter(plan), _more_devices(plan), _smaller_heads(plan)]
    missing = plan.missing
    return [
        Remedy(what, saved, saved >= missing)
        for what, saved in (entry for entry in found if entry is not None)
        if saved > 0
    ]


def explain(plan: MemoryPlan) -> str:
    """One sentence on what does not fit, then the remedies with their figures."""
    length = plan.asked or 1
    kv = (length + plan.shape.slack) * plan.per_token
    beside = ", ".join(
        f"{part.bytes / MIB:,.0f} MiB {part.name}" for part in plan.parts[:-1] if part.bytes >= MIB
    )
    said = (
        f"max_model_len={length} needs {kv / MIB:,.1f} MiB of KV cache, but {plan.left / MIB:,.1f} MiB are left beside "
        f"{beside or 'small parts'} of {plan.budget / MIB:,.0f} MiB"
    )
    cures = "; ".join(
        f"{cure.what} ({cure.saved / MIB:,.0f} MiB{', enough' if cure.enough else ''})"
        for cure in remedies(plan)
    )
    return f"{said}. What helps, the cheapest first: {cures or 'a larger device'}"


def table(plan: MemoryPlan, lengths: Sequence[int]) -> dict[str, object]:
    """The plan as JSON can hold it."""
    return {
        "total_bytes": plan.total,
        "budget_bytes": plan.budget,
        "used_bytes": plan.used,
        "parts": [{"name": p.name, "bytes": p.bytes, "what": p.what} for p in plan.parts],
        "kv_bytes_per_token": plan.per_token,
        "kv_bytes_per_token_of_the_drafter": 0 if plan.drafter is None else plan.drafter.per_token,
        "blocks": plan.division.blocks,
        "max_model_len": plan.division.longest,
        "fits": plan.works,
        "requests": {str(length): plan.requests(length) for length in lengths},
        "missing_bytes": 0 if plan.works else plan.missing,
        "remedies": [
            {"what": cure.what, "saved_bytes": cure.saved, "enough": cure.enough}
            for cure in remedies(plan)
        ],
    }


def _more_kv(plan: MemoryPlan) -> tuple[str, int] | None:
    if plan.kv_bytes is not None:
        more = plan.kv_bytes + plan.missing
        return f"raise kv_cache_memory_bytes from {plan.kv_bytes:,} to {more:,}", plan.missing
    share = HIGHEST_UTILIZATION - plan.utilization
    if share <= 0:
        return None
    what = f"raise gpu_memory_utilization from {plan.utilization:g} to {HIGHEST_UTILIZATION:g}"
    return what, int(share * plan.total)


def _fewer_requests(plan: MemoryPlan) -> tuple[str, int] | None:
    seqs = max(plan.shape.max_num_seqs // 4, 1)
    if seqs == plan.shape.max_num_seqs:
        return None
    less = replace(plan.shape, max_num_seqs=seqs)
    return f"lower max_num_seqs from {plan.shape.max_num_seqs} to {seqs}", _saved(plan, less)


def _shorter(plan: MemoryPlan) -> tuple[str, int] | None:
    if plan.asked is None or plan.asked < 2:
        return None
    what = f"lower max_model_len from {plan.asked} to {plan.asked // 2}"
    return what, (plan.asked - plan.asked // 2) * plan.per_token


def _fewer_drafts(plan: MemoryPlan) -> tuple[str, int] | None:
    drafted = plan.shape.nodes - 1
    if drafted < 2:
        return None
    k = max(drafted // 2, 1)
    less = replace(
        plan.shape, nodes=k + 1, depth=min(plan.shape.depth, k), scratch=min(plan.shape.scratch, k)
    )
    kv = (plan.shape.slack - less.slack) * plan.per_token
    return f"draft {k} tokens instead of {drafted} (num_speculative_tokens)", kv + _saved(
        plan, less
    )


def _smaller_drafter(plan: MemoryPlan) -> tuple[str, int] | None:
    drafter = plan.drafter
    if drafter is None or drafter.bytes <= plan.target.bytes // 20:
        return None
    tenth = plan.target.bytes // 10
    if drafter.bytes > tenth * 5 // 4:
        return "use a drafter of a tenth of the target's size", drafter.bytes - tenth
    return "use a drafter without weights (ngram, suffix)", drafter.bytes


def _more_devices(plan: MemoryPlan) -> tuple[str, int] | None:
    return "spread over two devices (tensor_parallel_size=2)", plan.target.bytes // 2


def _smaller_heads(plan: MemoryPlan) -> tuple[str, int] | None:
    drafter = plan.drafter
    if drafter is None or drafter.heads == 0:
        return None
    what = "use heads that share the target's output layer, or a smaller draft vocabulary"
    return what, drafter.heads


def _saved(plan: MemoryPlan, less: Shape) -> int:
    length = plan.asked or plan.most
    before = sum(part.bytes for part in workspace(plan.shape, length))
    return before - sum(part.bytes for part in workspace(less, length))
