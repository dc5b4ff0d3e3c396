"""Cases for kernels: where they run, which dtypes, and paged rows whose unused memory is poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.ops.meta import LayerKV, RaggedRows, TreeRows, flat_slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies with numpy, which has no bfloat16.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
CHAIN = (-1, 0, 1, 2, 3)
BUSHY = (-1, 0, 0, 0, 1, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class Pages:
    """KV twice: with NaN wherever no key of any request is, and the same with zeros there, for the reference."""

    poisoned: LayerKV
    clean: LayerKV


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative error ||out - ref|| / ||ref|| of one operation."""
    return {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}[dtype]


def error(out: Tensor, reference: Tensor) -> float:
    """||out - ref|| / ||ref||; infinite where something is not finite that should be."""
    assert out.shape == reference.shape, (out.shape, reference.shape)
    if not torch.isfinite(out).all():
        return float("inf")
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm().clamp(min=1e-30))


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, the same on every device."""
    return torch.randn(shape).to(DEVICE, dtype)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """NaN everywhere."""
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def pages(
    blocks: Tensor, written: Tensor, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> Pages:
    """Random KV at the flat slots `written`, in all blocks that the table names."""
    count = int(blocks.max()) + 1
    poisoned, clean = [], []
    for _ in range(2):
        bad = poison(count * block_size, kv_heads, dim, dtype=dtype)
        good = torch.zeros_like(bad)
        values = noise(written.numel(), kv_heads, dim, dtype=dtype)
        bad[written] = values
        good[written] = values
        shape = (count, block_size, kv_heads, dim)
        poisoned.append(bad.view(shape))
        clean.append(good.view(shape))
    return Pages(LayerKV(*poisoned), LayerKV(*clean))


def block_table(rows: int, blocks: int, spare: int = 3) -> Tensor:
    """[rows, blocks + spare] int32: shuffled blocks, none shared, block 0 left out; a view that is not dense."""
    order = torch.randperm(rows * blocks) + 1
    table = torch.zeros(rows, 2 * (blocks + spare), dtype=torch.int32)
    table[:, :blocks] = order.view(rows, blocks).to(torch.int32)
    return table.to(DEVICE)[:, : blocks + spare]


def tree_rows(
    contexts: Sequence[int],
    parents: Sequence[int],
    block_size: int,
    first_key: int = 0,
    spare_keys: int = 40,
) -> tuple[TreeRows, Tensor]:
    """Rows that verify one tree after contexts of these lengths, and the flat slots of all keys there are."""
    depths, bits = [], []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        bits.append((0 if parent < 0 else bits[parent]) | 1 << node)
    nodes, rows = len(parents), len(contexts)
    keys = max(contexts) + nodes + spare_keys
    blocks = block_table(rows, -(-(max(contexts) + nodes) // block_size), 8)
    keys = min(keys, blocks.shape[1] * block_size)
    context = torch.tensor(contexts, device=DEVICE)
    tail = torch.arange(nodes, device=DEVICE)
    indices = context.unsqueeze(1) + tail
    positions = context.unsqueeze(1) + torch.tensor(depths, device=DEVICE)
    # Bits 63 of 64-node trees are negative numbers.
    signed = [bit - (1 << 64) if bit >= 1 << 63 else bit for bit in bits]
    meta = TreeRows(
        positions=positions,
        kv_slots=flat_slots(blocks, indices, block_size, indices >= 0),
        blocks=blocks,
        context=context,
        bits=torch.tensor(signed, device=DEVICE).unsqueeze(0).expand(rows, -1),
        tail_positions=positions,
        keys=keys,
        first_key=first_key,
    )
    firsts = [min(first_key, c) for c in contexts]  # tail keys are seen wherever they are
    return meta, _slots_of(blocks, [c + nodes for c in contexts], block_size, firsts)


def ragged_rows(
    chunks: Sequence[tuple[int, int]], block_size: int, first_key: int = 0
) -> tuple[RaggedRows, Tensor]:
    """Chunks of (start, rows), and the flat slots of all keys there are."""
    ends = [start + rows for start, rows in chunks]
    blocks = block_table(len(chunks), -(-max(ends) // block_size))
    positions = torch.cat([torch.arange(start, start + rows) for start, rows in chunks])
    meta = RaggedRows(
        positions=positions.to(DEVICE),
        kv_slots=torch.zeros_like(positions).to(DEVICE),
        blocks=blocks,
        starts=torch.tensor([start for start, _ in chunks], device=DEVICE),
        offsets=torch.tensor([0, *_running([rows for _, rows in chunks])], device=DEVICE),
        lengths=tuple(chunks),
        first_key=first_key,
    )
    return meta, _slots_of(blocks, ends, block_size, [first_key] * len(chunks))


def _running(counts: Sequence[int]) -> list[int]:
    return [sum(counts[: i + 1]) for i in range(len(counts))]


def _slots_of(
    blocks: Tensor, ends: Sequence[int], block_size: int, firsts: Sequence[int]
) -> Tensor:
    found = []
    for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        keys = torch.arange(min(first, end), end, device=DEVICE).unsqueeze(0)
        found.append(flat_slots(blocks[row : row + 1], keys, block_size, keys >= 0)[0])
    return torch.cat(found)
