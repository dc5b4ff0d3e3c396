"""The attention kernels against the reference: every mask feature, odd shapes, and memory that is NaN where nobody
may look."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import (
    BUSHY,
    CHAIN,
    DEVICE,
    HALF,
    error,
    noise,
    pages,
    poison,
    ragged_rows,
    tolerance,
    tree_rows,
)

from foretell.ops.meta import LayerKV, Meta, RaggedRows
from foretell.ops.reference import attention as reference
from foretell.ops.triton import attention
from foretell.ops.triton.attention import FAST, FIXED, Tuning

GPU = DEVICE.type == "cuda"
APART = Tuning(splits=3, join_inside=False)
INSIDE = Tuning(splits=3, join_inside=True)


def both(
    meta: Meta,
    written: torch.Tensor,
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    tuning: Tuning = FAST,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(kernel's output, reference's in float64)."""
    count, kv_heads = heads
    kv = pages(meta.blocks, written, kv_heads, dim, block_size, dtype)
    q = noise(meta.positions.numel(), count, dim, dtype=dtype)
    scale = dim**-0.5
    plan = attention.mask(meta, window, block_size, count // kv_heads, dtype, tuning)
    out = attention.attention(q, kv.poisoned, meta, plan, window, scale, softcap)
    wide = LayerKV(kv.clean.k.double(), kv.clean.v.double())
    mask = reference.mask(meta, window, block_size, count // kv_heads, torch.float64)
    expected = reference.attention(q.double(), wide, meta, mask, window, scale, softcap)
    return out, expected


@pytest.mark.parametrize(
    "tuning", [FAST, APART, INSIDE, FIXED], ids=["fast", "apart", "inside", "fixed"]
)
@pytest.mark.parametrize(
    ("window", "softcap", "first_key"),
    [(None, None, 0), (9, None, 0), (None, 5.0, 1), (70, 5.0, 3)],
)
@pytest.mark.parametrize("parents", [(-1,), CHAIN, BUSHY], ids=["one", "chain", "bushy"])
def test_tree_rows_are_the_references_however_the_keys_are_divided(
    tuning: Tuning,
    window: int | None,
    softcap: float | None,
    first_key: int,
    parents: tuple[int, ...],
) -> None:
    meta, written = tree_rows([0, 61, 150], parents, 16, first_key)
    out, expected = both(meta, written, (4, 2), 16, 16, torch.float32, window, softcap, tuning)
    assert error(out, expected) < tolerance(torch.float32)


@pytest.mark.parametrize(
    ("group", "dim"),
    [(1, 64), (2, 80), (3, 96), (4, 128), (5, 64), (6, 80), (7, 128), (8, 64), (1, 256), (4, 256)],
)
def test_tree_rows_of_any_group_and_head_size(group: int, dim: int) -> None:
    meta, written = tree_rows([70, 5], BUSHY, 16)
    for dtype in (torch.float32, HALF) if GPU else (torch.float32,):
        out, expected = both(meta, written, (2 * group, 2), dim, 16, dtype)
        assert error(out, expected) < tolerance(dtype), (group, dim, dtype)


def test_tree_rows_in_half_precision() -> None:
    meta, written = tree_rows([130, 17], CHAIN, 16)
    out, expected = both(meta, written, (4, 1), 64, 16, HALF, tuning=APART)
    assert error(out, expected) < tolerance(HALF)


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_tree_rows_in_blocks_of_any_size(block_size: int) -> None:
    meta, written = tree_rows([37, 3], CHAIN, block_size)
    out, expected = both(meta, written, (2, 1), 32, block_size)
    assert error(out, expected) < tolerance(torch.float32)


def test_sixty_four_nodes_fill_the_bits_and_more_than_one_tile() -> None:
    parents = (-1, *[i // 2 for i in range(63)])
    meta, written = tree_rows([33], parents, 16)
    out, expected = both(meta, written, (4, 1), 32, 16)
    assert error(out, expected) < tolerance(torch.float32)


def test_a_row_that_sees_nothing_is_zero_and_not_nan() -> None:
    meta, written = tree_rows([0], (-1,), 16)
    blind = type(meta)(
        meta.positions, meta.kv_slots, meta.blocks, meta.context,
        torch.zeros_like(meta.bits), meta.tail_positions, meta.keys,
    )  # fmt: skip
    kv = pages(meta.blocks, written, 1, 16, 16, torch.float32)
    q = noise(1, 2, 16)
    for tuning in (FAST, APART, INSIDE):
        plan = attention.mask(blind, None, 16, 2, q.dtype, tuning)
        out = attention.attention(q, kv.poisoned, blind, plan, None, 1.0, None)
        assert out.eq(0).all(), tuning


def test_counters_are_zero_after_every_launch_so_layers_can_share_them() -> None:
    meta, written = tree_rows([61, 9], CHAIN, 16)
    kv = pages(meta.blocks, written, 2, 16, 16, torch.float32)
    q = noise(meta.positions.numel(), 4, 16)
    plan = attention.mask(meta, None, 16, 2, q.dtype, INSIDE)
    first = attention.attention(q, kv.poisoned, meta, plan, None, 1.0, None)
    assert plan.counters is not None
    assert plan.counters.eq(0).all()
    assert torch.equal(first, attention.attention(q, kv.poisoned, meta, plan, None, 1.0, None))


def test_fixed_division_gives_a_row_the_same_bits_alone_and_in_company() -> None:
    """Row 0 of a chain of five beside another request, and the same row as plain decoding by itself."""
    meta, written = tree_rows([600, 130], CHAIN, 16)
    kv = pages(meta.blocks, written, 1, 16, 16, torch.float32)
    q = noise(10, 2, 16)
    plan = attention.mask(meta, None, 16, 2, q.dtype, FIXED)
    company = attention.attention(q, kv.poisoned, meta, plan, None, 0.25, None)
    for node in range(5):
        context = meta.context[:1] + node
        alone = type(meta)(
            context.unsqueeze(1), context.unsqueeze(1), meta.blocks[:1], context,
            torch.ones(1, 1, dtype=torch.int64, device=DEVICE), context.unsqueeze(1), meta.keys,
        )  # fmt: skip
        plan = attention.mask(alone, None, 16, 2, q.dtype, FIXED)
        row = attention.attention(q[node : node + 1], kv.poisoned, alone, plan, None, 0.25, None)
        assert torch.equal(row[0], company[node]), node


@pytest.mark.parametrize(
    ("window", "softcap", "first_key"),
    [(None, None, 0), (9, None, 0), (None, 5.0, 1), (40, 5.0, 3)],
)
@pytest.mark.parametrize("chunks", [[(0, 33)], [(0, 1), (50, 21), (3, 5)], [(100, 40)]])
def test_ragged_rows_are_the_references(
    window: int | None, softcap: float | None, first_key: int, chunks: list[tuple[int, int]]
) -> None:
    meta, written = ragged_rows(chunks, 16, first_key)
    out, expected = both(meta, written, (4, 2), 16, 16, torch.float32, window, softcap)
    seeing = torch.cat([torch.arange(s, s + n) for s, n in chunks]) >= first_key
    assert error(out[seeing.to(DEVICE)], expected[seeing.to(DEVICE)]) < tolerance(torch.float32)


@pytest.mark.parametrize(
    ("group", "dim"), [(1, 256), (2, 96), (3, 80), (4, 128), (7, 64), (8, 128)]
)
def test_ragged_rows_of_any_group_and_head_size(group: int, dim: int) -> None:
    meta, written = ragged_rows([(19, 13), (0, 4)], 16)
    for dtype in (torch.float32, HALF) if GPU else (torch.float32,):
        out, expected = both(meta, written, (2 * group, 2), dim, 16, dtype)
        assert error(out, expected) < tolerance(dtype), (group, dim, dtype)


def test_queries_may_stand_inside_the_rows_of_a_larger_product() -> None:
    meta, written = tree_rows([20, 7], CHAIN, 16)
    kv = pages(meta.blocks, written, 2, 16, 16, torch.float32)
    wide = noise(10, 8, 16)
    plan = attention.mask(meta, None, 16, 2, wide.dtype)
    out = attention.attention(wide[:, :4], kv.poisoned, meta, plan, None, 1.0, None)
    dense = attention.attention(wide[:, :4].contiguous(), kv.poisoned, meta, plan, None, 1.0, None)
    assert torch.equal(out, dense)


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    kv = LayerKV(poison(5, 4, 3, 16), poison(5, 4, 3, 16))
    rows = noise(6, 8, 16)  # keys and values of a row stand side by side
    slots = torch.tensor([3, 19, 0, 7, 8, 12], device=DEVICE)
    attention.store_kv(rows[:, :3], rows[:, 3:6], kv, slots)
    for page, values in ((kv.k, rows[:, :3]), (kv.v, rows[:, 3:6])):
        flat = page.view(20, 3, 16)
        assert torch.equal(flat[slots], values)
        others = torch.ones(20, dtype=torch.bool, device=DEVICE)
        others[slots] = False
        assert flat[others].isnan().all()


def test_fixed_division_gives_prompt_rows_the_same_bits_in_any_chunks() -> None:
    whole, written = ragged_rows([(0, 50)], 16)
    kv = pages(whole.blocks, written, 1, 16, 16, torch.float32)
    q = noise(50, 2, 16)

    def run(meta: RaggedRows, rows: torch.Tensor) -> torch.Tensor:
        plan = attention.mask(meta, None, 16, 2, q.dtype, FIXED)
        return attention.attention(rows, kv.poisoned, meta, plan, None, 0.25, None)

    together = run(whole, q)
    for start, count in ((0, 7), (7, 1), (8, 42)):
        part = replace(
            whole,
            starts=torch.tensor([start], device=DEVICE),
            offsets=torch.tensor([0, count], device=DEVICE),
            lengths=((start, count),),
        )
        rows = slice(start, start + count)
        assert torch.equal(run(part, q[rows]), together[rows]), start
