"""Attention sees what ops/meta.py says, checked key by key with plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.ops.meta import LayerKV, RaggedRows, TreeRows
from foretell.ops.reference import attention

KV_HEADS, GROUP, DIM, BLOCK = 2, 3, 8, 4


def random_kv(blocks=24):
    shape = (blocks, BLOCK, KV_HEADS, DIM)
    return LayerKV(torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64))


def naive(q, kv, blocks, keys, scale, softcap):
    """One row [heads, D] over the listed key indices."""
    out = []
    for head in range(KV_HEADS * GROUP):
        place = [(int(blocks[s // BLOCK]), s % BLOCK, head // GROUP) for s in keys]
        scores = torch.stack([q[head] @ kv.k[p] for p in place]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.softmax(scores, 0)
        out.append(sum(w * kv.v[p] for w, p in zip(weights, place, strict=True)))
    return torch.cat(out)


def run(q, kv, meta, window, softcap=None, scale=0.3):
    mask = attention.mask(meta, window, BLOCK, GROUP, torch.float64)
    return attention.attention(q, kv, meta, mask, window, scale, softcap)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("first_key", [0, 1])
def test_a_tree_row_sees_its_context_and_the_tail_keys_of_its_bits(window, first_key, softcap):
    rows, nodes, tails = 3, 4, 6
    kv = random_kv()
    context = torch.tensor([9, 2, 13])
    bits = torch.tensor([[0b1, 0b11, 0b100101, 0b111000]]).expand(rows, -1)
    depths = torch.tensor([0, 1, 1, 2, 2, 3])
    tail_positions = context.unsqueeze(1) + depths
    positions = tail_positions[:, [0, 1, 4, 5]]
    blocks = torch.randperm(23)[: rows * 6].view(rows, 6).to(torch.int32) + 1
    meta = TreeRows(
        positions, torch.zeros_like(positions), blocks, context, bits, tail_positions, 19, first_key
    )
    q = torch.randn(rows * nodes, KV_HEADS * GROUP, DIM, dtype=torch.float64)
    out = run(q, kv, meta, window, softcap).view(rows, nodes, -1)
    for b in range(rows):
        for n in range(nodes):
            here = int(positions[b, n])
            seen = [(s, s) for s in range(first_key, int(context[b]))]
            seen += [
                (int(context[b]) + j, int(tail_positions[b, j]))
                for j in range(tails)
                if bits[b, n] >> j & 1
            ]
            keys = [s for s, position in seen if window is None or here - position < window]
            expected = naive(q.view(rows, nodes, -1, DIM)[b, n], kv, blocks[b], keys, 0.3, softcap)
            torch.testing.assert_close(out[b, n], expected)


def test_the_sixty_fourth_tail_key_is_the_sign_bit():
    kv, nodes = random_kv(), 64
    blocks = torch.arange(1, 18, dtype=torch.int32).unsqueeze(0)
    positions = torch.arange(nodes).unsqueeze(0)
    bits = torch.full((1, nodes), -(1 << 63))
    meta = TreeRows(positions, positions, blocks, torch.tensor([0]), bits, positions, nodes)
    q = torch.randn(nodes, KV_HEADS * GROUP, DIM, dtype=torch.float64)
    only = kv.v[int(blocks[0, 15]), 3].repeat_interleave(GROUP, 0).flatten()
    torch.testing.assert_close(run(q, kv, meta, None), only.expand(nodes, -1))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("first_key", [0, 1])
def test_a_ragged_row_sees_the_keys_up_to_its_own(window, first_key, softcap):
    kv = random_kv()
    lengths = ((0, 5), (7, 1), (3, 6))
    blocks = torch.randperm(23)[:18].view(3, 6).to(torch.int32) + 1
    starts = torch.tensor([s for s, _ in lengths])
    offsets = torch.tensor([0, 5, 6, 12])
    rows = torch.cat([torch.arange(s, s + n) for s, n in lengths])
    meta = RaggedRows(rows, rows, blocks, starts, offsets, lengths, first_key)
    q = torch.randn(12, KV_HEADS * GROUP, DIM, dtype=torch.float64)
    out = run(q, kv, meta, window, softcap)
    row = 0
    for b, (start, count) in enumerate(lengths):
        for here in range(start, start + count):
            keys = [s for s in range(first_key, here + 1) if window is None or here - s < window]
            if keys:
                torch.testing.assert_close(
                    out[row], naive(q[row], kv, blocks[b], keys, 0.3, softcap)
                )
            row += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_sees_nothing_gives_junk_but_no_nan(dtype):
    wide = random_kv()
    kv = LayerKV(wide.k.to(dtype), wide.v.to(dtype))
    nothing = torch.zeros(1, 2, dtype=torch.int64)
    meta = TreeRows(
        nothing, nothing, torch.ones(1, 2, dtype=torch.int32), nothing[:, 0], nothing, nothing, 8
    )
    q = torch.randn(2, KV_HEADS * GROUP, DIM, dtype=dtype)
    mask = attention.mask(meta, None, BLOCK, GROUP, dtype)
    assert attention.attention(q, kv, meta, mask, None, 0.3, None).isfinite().all()
    ragged = RaggedRows(
        nothing[0, :1],
        nothing[0, :1],
        meta.blocks,
        nothing[0, :1],
        torch.tensor([0, 1]),
        ((0, 1),),
        1,
    )
    mask = attention.mask(ragged, None, BLOCK, GROUP, dtype)
    assert attention.attention(q[:1], kv, ragged, mask, None, 0.3, None).isfinite().all()


def test_keys_and_values_are_written_to_their_slots_only():
    kv = random_kv()
    before = LayerKV(kv.k.clone(), kv.v.clone())
    slots = torch.tensor([5, 33, 8])
    k, v = torch.randn(2, 3, KV_HEADS, DIM, dtype=torch.float64)
    attention.store_kv(k, v, kv, slots)
    for new, old, rows in ((kv.k, before.k, k), (kv.v, before.v, v)):
        flat = new.view(-1, KV_HEADS, DIM)
        assert torch.equal(flat[slots], rows)
        rest = torch.ones(len(flat), dtype=torch.bool).scatter(0, slots, False)
        assert torch.equal(flat[rest], old.view(-1, KV_HEADS, DIM)[rest])


def test_scores_far_from_zero_do_not_reach_masked_keys():
    """The mask's number is finite: it must outweigh any score."""
    kv = random_kv()
    kv.k.mul_(1e3)
    blocks = torch.arange(1, 7, dtype=torch.int32).unsqueeze(0)
    one = torch.ones(1, 1, dtype=torch.int64)
    meta = TreeRows(9 * one, 9 * one, blocks, torch.tensor([9]), one, 9 * one, 24)
    q = 1e3 * torch.randn(1, KV_HEADS * GROUP, DIM, dtype=torch.float64)
    expected = naive(q[0], kv, blocks[0], range(10), 1 / math.sqrt(DIM), None)
    out = run(q, kv, meta, None, scale=1 / math.sqrt(DIM))
    torch.testing.assert_close(out[0], expected)
