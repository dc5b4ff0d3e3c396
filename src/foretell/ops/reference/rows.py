"""Which rows a small pass runs, in plain PyTorch: nodes under verification, a drafter's window, a level of its tree.

From lengths and block tables to tokens, positions and KV slots. What the rows then see is said in `ops/meta.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.ops.meta import SlotArrays, flat_slots


@dataclass(frozen=True, slots=True)
class Gathered:
    """Nodes under verification, one row of N per request."""

    tokens: Tensor  # [B, N] int64; node 0 is the pending token, -1 a missing draft
    positions: Tensor  # [B, N] int64
    kv_slots: Tensor  # [B, N] int64, null for requests that are not live
    blocks: Tensor  # [B, M] int32
    context: Tensor  # [B] int64, keys that all nodes see


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows of a drafter behind the text of each request."""

    positions: Tensor  # [B, m] int64, rotary
    tail_positions: Tensor  # [B, T] int64, rotary positions of all tail keys
    kv_slots: Tensor  # [B, m] int64, null for rows that must leave no trace


def gather(
    slots: SlotArrays,
    draft: Tensor,
    most_drafted: Tensor,
    rows: Tensor,
    depths: Tensor,
    longest: int,
    block_size: int,
) -> Gathered:
    """The pending token and its drafts, as far as the request wants them and the drafter was made for texts so long.

    Args:
        draft: [S, N or more] int64, tokens to verify.
        most_drafted: [S] int64, levels of a draft that each request wants.
        rows: [B] int64, slots.
        depths: [B or 1, N] int64.
        longest: tokens of the longest text that is drafted for.
        block_size: entries of a KV block.
    """
    nodes = depths.shape[1]
    lengths = slots.length[rows]
    length = lengths.unsqueeze(1)
    root = slots.tokens[rows.unsqueeze(1), length - 1].to(torch.int64)
    deepest = torch.minimum(most_drafted[rows], longest - lengths)
    wanted = depths[:, 1:] <= deepest.unsqueeze(1)
    drafted = torch.where(wanted, draft[rows, 1:nodes], -1)
    indices = length - 1 + torch.arange(nodes, device=rows.device)
    blocks = slots.blocks[rows]
    live = slots.live[rows].unsqueeze(1).expand_as(indices)
    return Gathered(
        tokens=torch.cat((root, drafted), dim=1),
        positions=length - 1 + depths,
        kv_slots=flat_slots(blocks, indices, block_size, live),
        blocks=blocks,
        context=lengths - 1,
    )


def place(
    base: Tensor,
    live: Tensor,
    count: Tensor | None,
    blocks: Tensor,
    places: Tensor,
    depths: Tensor,
    shift: int,
    block_size: int,
) -> Placed:
    """Where rows stand whose KV entries are `base + places`.

    Args:
        base: [B] int64, entry of tail key 0.
        live: [B] bool; requests that are not leave no trace.
        count: [B] int64, rows whose place is not below it leave none either; None: all rows count.
        blocks: [B, M] int32.
        places: [m] int64, which tail key each row is.
        depths: [1, T] int64, depth of each tail key.
        shift: a rotary position is its entry's depth behind the base, less this.
    """
    tail = base.unsqueeze(1) + (depths - shift)
    entries = base.unsqueeze(1) + places
    valid = live.unsqueeze(1).expand_as(entries)
    if count is not None:
        valid = valid & (places < count.unsqueeze(1))
    return Placed(
        positions=tail[:, places],
        tail_positions=tail,
        kv_slots=flat_slots(blocks, entries, block_size, valid),
    )
