"""One rank's part of a decoder: which sizes work, and the shape of a part (Megatron-LM, arXiv 1909.08053, section 3).

Queries, keys, values, gate and up are split by columns, the products after them by rows and summed over the ranks;
experts are split over their inner size, all of them on every rank. Embedding and head are split by tokens. Above the
number of KV heads each of them is kept by several ranks. Norms and the router are whole everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.model.config import ModelConfig
from foretell.ops.group import Group


@dataclass(frozen=True, slots=True)
class Cut:
    """Entries `start` to `stop` of one dimension of a tensor."""

    dim: int
    start: int
    stop: int


def sizes(config: ModelConfig) -> tuple[int, ...]:
    """All numbers of ranks that a model can be split into."""
    return tuple(size for size in range(1, config.heads + 1) if _fits(config, size))


def _fits(config: ModelConfig, size: int) -> bool:
    kv = config.kv_heads
    heads = config.heads % size == 0 and (kv % size == 0 or size % kv == 0)
    return heads and config.intermediate_size % size == 0 and config.vocab_size >= size * size


def check_size(config: ModelConfig, size: int, field: str, what: str = "the model") -> None:
    """Refuse a number of ranks that a model cannot be split into.

    Raises:
        ValueError: names the sizes that would work.
    """
    if _fits(config, size):
        return
    work = ", ".join(map(str, sizes(config)))
    raise ValueError(
        f"{field}={size} does not divide {what}: it has {config.heads} heads, {config.kv_heads} KV heads and an inner "
        f"size of {config.intermediate_size}; sizes that work: {work}"
    )


def part_of(config: ModelConfig, group: Group) -> ModelConfig:
    """The shape of one rank's layers; what is not split keeps its size."""
    if group.alone:
        return config
    return replace(
        config,
        heads=config.heads // group.size,
        kv_heads=kv_part(config, group)[1],
        intermediate_size=config.intermediate_size // group.size,
    )


def kv_part(config: ModelConfig, group: Group) -> tuple[int, int]:
    """(first KV head, how many) that a rank keeps: those that its query heads read."""
    count = max(1, config.kv_heads // group.size)
    return group.rank * config.kv_heads // group.size, count
