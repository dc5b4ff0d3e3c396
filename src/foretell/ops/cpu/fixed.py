"""The operations of a CPU in an order of addition that does not depend on the batch.

A row's result is a function of that row, its keys and the weights, whatever rows, nodes and requests run beside it, and
prompts and decoding add alike: a prompt in any chunks, any tree of drafts and a text computed again after a preemption
give the bits of one token after the other. It costs speed where a step has many rows: products in pieces, and prompts
attend row by row. For bfloat16 and float32; float64 attends to prompts as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from foretell.ops.cpu import attention
from foretell.ops.cpu.compiled import ELEMENTS
from foretell.ops.cpu.table import CPU, pack_linear
from foretell.ops.meta import LayerKV, Meta, RaggedRows, TreeRows
from foretell.ops.reference import attention as reference
from foretell.ops.reference.linear import pack_experts

_NODES = 64  # rows of a prompt that are taken as one chain


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """The rows of prompts as chains, one after the other."""

    chains: tuple[attention.TreeKeys, ...]
    rows: tuple[int, ...]  # of each


def mask(
    meta: Meta, window: int | None, block_size: int, group: int, dtype: torch.dtype
) -> ChainKeys | attention.TreeKeys | reference.Mask:
    """What `attend` needs of this meta besides the window."""
    if not isinstance(meta, RaggedRows) or dtype not in ELEMENTS:
        return attention.mask(meta, window, block_size, group, dtype)
    chains, rows = [], []
    for chain in _chains(meta):
        keys = attention.mask(chain, window, block_size, group, dtype)
        assert isinstance(keys, attention.TreeKeys)
        chains.append(keys)
        rows.append(chain.positions.shape[1])
    return ChainKeys(tuple(chains), tuple(rows))


def attend(
    q: Tensor,
    kv: LayerKV,
    meta: Meta,
    mask: ChainKeys | attention.TreeKeys | reference.Mask,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attend to the paged keys. See `reference.attention.attention`; a row that sees nothing yields zeros."""
    if not isinstance(mask, ChainKeys):
        return attention.attention(q, kv, meta, mask, window, scale, softcap)
    parts = [
        attention.attention(rows, kv, meta, keys, window, scale, softcap)
        for rows, keys in zip(q.split_with_sizes(mask.rows), mask.chains, strict=True)
    ]
    return torch.cat(parts)


def _chains(meta: RaggedRows) -> Iterator[TreeRows]:
    """Every chunk as chains of at most `_NODES` rows: row i sees what is in front of the chain, and rows 0 to i."""
    offset = 0
    for request, (start, rows) in enumerate(meta.lengths):
        for begin in range(0, rows, _NODES):
            count = min(_NODES, rows - begin)
            place = slice(offset + begin, offset + begin + count)
            context = start + begin
            positions = meta.positions[place].unsqueeze(0)
            # Bits 0 to i, less those of keys in front of the first key.
            bits = [
                (1 << i + 1) - (1 << min(i + 1, max(0, meta.first_key - context)))
                for i in range(count)
            ]
            signed = [value - (1 << 64) if value >> 63 else value for value in bits]
            yield TreeRows(
                positions=positions,
                kv_slots=meta.kv_slots[place].unsqueeze(0),
                blocks=meta.blocks[request : request + 1],
                context=torch.tensor([context]),
                bits=torch.tensor([signed]),
                tail_positions=positions,
                keys=context + count,
                first_key=meta.first_key,
            )
        offset += rows


FIXED = replace(
    CPU,
    mask=mask,
    attention=attend,
    pack_linear=partial(pack_linear, fixed=True),
    pack_experts=partial(pack_experts, fixed=True),
)
