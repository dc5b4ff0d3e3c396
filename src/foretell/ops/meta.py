"""What attention must know about the rows it is given: the only description of who sees what.

Two shapes of work exist. `TreeRows` are B requests with the same number of rows each (plain decoding, tree
verification, a drafter's window, one level of a draft tree). `RaggedRows` are prompt chunks of different lengths in one
flat batch. Both are built once per forward pass and passed down explicitly; nothing here is mutated.

Words: a *key index* counts a request's KV entries from 0; entry i lives in block `blocks[b, i // block_size]` at offset
`i % block_size`. A *kv slot* is the flat place `block * block_size + offset`. Block 0 is the null block: rows that must
leave no trace write there, and nobody reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Paged keys and values of one layer."""

    k: Tensor  # [blocks, block_size, kv_heads, head_dim]
    v: Tensor  # [blocks, block_size, kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class TreeRows:
    """B requests with N rows each. Row i of request b sees key s iff

    `first_key <= s < context[b]`, or s is tail key j (`s == context[b] + j`, 0 <= j < T) and bit j of `bits[b, i]` is
    set; and, in a sliding-window layer, `positions[b, i] - position(s) < window`, where a context key's position is s
    and tail key j's is `tail_positions[b, j]`.
    """

    positions: Tensor  # [B, N] int64, rotary position of each row
    kv_slots: Tensor  # [B, N] int64, where each row's key and value are written
    blocks: Tensor  # [B, M] int32, block table
    context: Tensor  # [B] int64, keys below it are visible to every row
    bits: Tensor  # [B, N] int64, which tail keys a row sees, itself included
    tail_positions: Tensor  # [B, T] int64, rotary position of each tail key (T <= 64)
    keys: int  # host-side bound: context[b] + T <= keys for every b
    first_key: int = 0  # keys below it are invisible (EAGLE's entry 0 has no feature)


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Prompt chunks of B requests, one after the other in R flat rows.

    Request b has rows `offsets[b] .. offsets[b + 1] - 1`; its j-th row is key index `starts[b] + j` and sees every key
    s with `first_key <= s <= starts[b] + j` (within the window of the layer, if any).
    """

    positions: Tensor  # [R] int64
    kv_slots: Tensor  # [R] int64
    blocks: Tensor  # [B, M] int32
    starts: Tensor  # [B] int64
    offsets: Tensor  # [B + 1] int64
    lengths: tuple[tuple[int, int], ...]  # the same on the host: (start, rows) of each request
    first_key: int = 0


Meta = TreeRows | RaggedRows


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """What the device knows of running requests, one row each, as far as operations read or write it."""

    tokens: Tensor  # [S, L] int32, committed tokens
    length: Tensor  # [S] int64, how many
    limit: Tensor  # [S] int64, greatest length
    live: Tensor  # [S] bool
    stop: Tensor  # [S, E] int64, stop ids, -1 = none
    blocks: Tensor  # [S, M] int32, block table


def flat_slots(blocks: Tensor, indices: Tensor, block_size: int, valid: Tensor) -> Tensor:
    """Flat KV slots of key indices.

    Args:
        blocks: [B, M] int32, block table.
        indices: [B, N] int64, key indices.
        valid: [B, N] bool; rows that are False go to slot 0, in the null block.

    Returns:
        [B, N] int64.

    Example: with block size 16 and the table [[5, 7]], key index 17 is slot 7 * 16 + 1 = 113.
    """
    block = blocks.gather(1, indices // block_size).to(torch.int64)
    return torch.where(valid, block * block_size + indices % block_size, 0)
