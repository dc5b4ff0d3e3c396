"""The CPU's compiled operations against the reference: odd shapes, both element types, memory that is NaN where nobody
may look, and rows whose bits must not depend on their company."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from kernel_cases import BUSHY, CHAIN, error, pages, tree_rows

from foretell.ops.cpu import attention, layers, sample
from foretell.ops.cpu.fixed import FIXED
from foretell.ops.cpu.table import CPU
from foretell.ops.meta import LayerKV, RaggedRows, TreeRows
from foretell.ops.reference import attention as reference_attention
from foretell.ops.reference import layers as reference
from foretell.ops.reference import sample as reference_sample

DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float32: 2e-6}


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 24.0, 33.94])
@pytest.mark.parametrize("width", [1, 40, 576])
def test_embedding_is_the_references_bit_for_bit(
    dtype: torch.dtype, scale: float, width: int
) -> None:
    weight = noise(11, width, dtype=dtype)
    tokens = torch.tensor([[3, 99], [-1, 99], [10, 99], [0, 99]])[:, 0]  # not dense
    expected = reference.embed(tokens, weight, scale)
    assert torch.equal(layers.embed(tokens, weight, scale), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 576), (5, 1), (3, 7), (2, 9, 80), (0, 64)])
def test_norm_is_the_references(dtype: torch.dtype, residual: bool, shape: tuple[int, ...]) -> None:
    x, weight = 3 * noise(*shape, dtype=dtype), noise(shape[-1])
    added = noise(*shape, dtype=dtype) if residual else None
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5, added)
    out = layers.rms_norm(x, weight, 1e-5, added)
    assert out.dtype == dtype
    assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 3072), (4, 2), (3, 86), (2, 3, 34)])
def test_activation_and_product_are_the_references(
    dtype: torch.dtype, activation: str, shape: tuple[int, ...]
) -> None:
    gate_up = 8 * noise(*shape, dtype=dtype)
    expected = reference.act_mul(gate_up.double(), activation)
    assert error(layers.act_mul(gate_up, activation), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activation_at_the_ends_of_the_numbers_is_the_references(activation: str) -> None:
    ends = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 87.0, -87.0, 89.0, -89.0, 1e30, -1e30])
    gate_up = torch.cat((ends, torch.ones_like(ends)))
    expected = reference.act_mul(gate_up, activation)
    out = layers.act_mul(gate_up, activation)
    assert torch.allclose(out, expected, rtol=2e-6, atol=1e-36)
    broken = layers.act_mul(torch.tensor([torch.nan, 1.0]), activation)
    assert broken.isnan().all(), "a NaN was lost"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"),
    [(9, 3, 64, 64), (7, 1, 80, 80), (4, 4, 24, 12), (2, 1, 256, 64)],
)
def test_rotation_and_kv_write_are_the_references(
    dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, dim: int, rotated: int
) -> None:
    rows = 5
    angle = noise(rows, 1, rotated // 2)
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    norms = (noise(dim), noise(dim)) if normed else None
    qkv = noise(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    slots = torch.tensor([4, 17, 0, 23, 5])
    shape = (3, 8, kv_heads, dim)
    kv = LayerKV(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    plain = LayerKV(*(torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(2)))
    wide_norms = None if norms is None else (norms[0].double(), norms[1].double())
    expected = reference_attention.rope_store(
        qkv.double(), heads, wide_norms, 1e-6, cos.double(), sin.double(), plain, slots
    )
    out = attention.rope_store(qkv, heads, norms, 1e-6, cos, sin, kv, slots)
    assert error(out, expected) < TOLERANCE[dtype]
    for page, wanted in ((kv.k, plain.k), (kv.v, plain.v)):
        assert torch.equal(page.isnan(), wanted.isnan()), "written elsewhere than the reference"
        assert error(page.nan_to_num(), wanted.nan_to_num()) < TOLERANCE[dtype]


def attend(
    meta: TreeRows,
    kv: LayerKV,
    q: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    block_size, kv_heads = kv.k.shape[1:3]
    keys = attention.mask(meta, window, block_size, q.shape[1] // kv_heads, q.dtype)
    return attention.attention(q, kv, meta, keys, window, q.shape[2] ** -0.5, softcap)


def both(
    meta: TreeRows,
    written: Tensor,
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(kernel's output over poisoned pages, the reference's in float64)."""
    count, kv_heads = heads
    kv = pages(meta.blocks, written, kv_heads, dim, block_size, dtype)
    # Queries are a part of a wider row, as the model hands them over.
    q = noise(meta.positions.numel(), count + 2, dim, dtype=dtype)[:, :count]
    out = attend(meta, kv.poisoned, q, window, softcap)
    wide = LayerKV(kv.clean.k.double(), kv.clean.v.double())
    mask = reference_attention.mask(meta, window, block_size, count // kv_heads, torch.float64)
    expected = reference_attention.attention(
        q.double(), wide, meta, mask, window, dim**-0.5, softcap
    )
    return out, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "softcap", "first_key"),
    [(None, None, 0), (9, None, 0), (None, 5.0, 1), (70, 5.0, 3)],
)
@pytest.mark.parametrize("parents", [(-1,), CHAIN, BUSHY], ids=["one", "chain", "bushy"])
def test_tree_attention_is_the_references(
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    first_key: int,
    parents: tuple[int, ...],
) -> None:
    meta, written = tree_rows([0, 61, 150], parents, 16, first_key)
    out, expected = both(meta, written, (6, 2), 16, 16, dtype, window, softcap)
    assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 64), (2, 80), (3, 96), (4, 128), (5, 24), (7, 8), (8, 64), (9, 256)]
)
def test_tree_attention_of_any_group_and_head_size(
    dtype: torch.dtype, group: int, dim: int
) -> None:
    meta, written = tree_rows([70, 5], BUSHY, 16)
    out, expected = both(meta, written, (2 * group, 2), dim, 16, dtype)
    assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [1, 4, 7, 32])
def test_tree_attention_in_blocks_of_any_size(block_size: int) -> None:
    meta, written = tree_rows([37, 3], CHAIN, block_size)
    out, expected = both(meta, written, (4, 2), 32, block_size, torch.bfloat16)
    assert error(out, expected) < TOLERANCE[torch.bfloat16]


def test_a_tree_of_64_nodes_uses_the_sign_bit() -> None:
    meta, written = tree_rows([33], tuple(range(-1, 63)), 16)
    assert int(meta.bits.min()) < 0
    out, expected = both(meta, written, (2, 1), 16, 16, torch.float32)
    assert error(out, expected) < TOLERANCE[torch.float32]


def test_a_row_that_sees_nothing_is_zero() -> None:
    meta, written = tree_rows([0], (-1,), 16)
    blind = replace(meta, bits=torch.zeros_like(meta.bits))
    kv = pages(meta.blocks, written, 1, 16, 16, torch.bfloat16)
    out = attend(blind, kv.poisoned, noise(1, 2, 16, dtype=torch.bfloat16))
    assert torch.equal(out, torch.zeros_like(out))


def one_row(meta: TreeRows, node: int, context: int) -> TreeRows:
    """A node as plain decoding would have it: alone behind `context` keys."""
    position = meta.positions[:, node : node + 1]
    return TreeRows(
        positions=position,
        kv_slots=meta.kv_slots[:, node : node + 1],
        blocks=meta.blocks,
        context=torch.tensor([context]),
        bits=torch.ones(1, 1, dtype=torch.int64),
        tail_positions=position,
        keys=context + 1,
        first_key=meta.first_key,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [3, 60, 63, 200])
def test_a_chain_of_drafts_has_the_bits_of_one_row_at_a_time(
    dtype: torch.dtype, context: int
) -> None:
    meta, written = tree_rows([context], CHAIN, 16)
    kv = pages(meta.blocks, written, 2, 64, 16, dtype)
    q = noise(len(CHAIN), 6, 64, dtype=dtype)
    together = attend(meta, kv.poisoned, q)
    for node in range(len(CHAIN)):
        row = attend(one_row(meta, node, context + node), kv.poisoned, q[node : node + 1])
        assert torch.equal(row[0], together[node]), node


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("context", [3, 60, 63, 200])
def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(
    dtype: torch.dtype, window: int | None, context: int
) -> None:
    meta, written = tree_rows([context], BUSHY, 16)
    kv = pages(meta.blocks, written, 2, 64, 16, dtype).poisoned
    q = noise(len(BUSHY), 6, 64, dtype=dtype)
    together = attend(meta, kv, q, window)
    slots = meta.kv_slots[0]
    for node in range(len(BUSHY)):
        path = [i for i in range(len(BUSHY)) if int(meta.bits[0, node]) >> i & 1]
        moved = LayerKV(kv.k.clone(), kv.v.clone())
        for page, old in ((moved.k, kv.k), (moved.v, kv.v)):
            page.view(-1, 2, 64)[slots[: len(path)]] = old.view(-1, 2, 64)[slots[path]]
        row = attend(
            one_row(meta, node, context + len(path) - 1), moved, q[node : node + 1], window
        )
        assert torch.equal(row[0], together[node]), node


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 5.0)])
@pytest.mark.parametrize("start", [0, 7, 61])
def test_in_fixed_order_rows_of_a_prompt_have_the_bits_of_decoding_in_any_chunks(
    dtype: torch.dtype, window: int | None, softcap: float | None, start: int
) -> None:
    rows, other = 131, 5
    blocks = torch.arange(1, 2 + (start + rows) // 16, dtype=torch.int32).unsqueeze(0)
    places = blocks[0].long().repeat_interleave(16) * 16 + torch.arange(16).repeat(blocks.shape[1])
    kv = pages(blocks, places[: start + rows], 2, 32, 16, dtype).poisoned
    q = noise(rows, 8, 32, dtype=dtype)[:, :6]
    positions = torch.arange(start, start + rows)

    def prompt(lengths: tuple[tuple[int, int], ...], some: slice) -> Tensor:
        """One chunk of the prompt, and the first rows of it again as another request's."""
        counts = [count for _, count in lengths]
        ragged = RaggedRows(
            positions=torch.cat([torch.arange(at, at + count) for at, count in lengths]),
            kv_slots=torch.cat([places[at : at + count] for at, count in lengths]),
            blocks=blocks.expand(len(lengths), -1),
            starts=torch.tensor([at for at, _ in lengths]),
            offsets=torch.tensor([0, *counts]).cumsum(0),
            lengths=lengths,
        )
        query = torch.cat([q[at - start : at - start + count] for at, count in lengths])
        keys = FIXED.mask(ragged, window, 16, 3, dtype)
        return FIXED.attention(query, kv, ragged, keys, window, 32**-0.5, softcap)[some]

    whole = prompt(((start, rows),), slice(None))
    beside = prompt(((start, other), (start, rows)), slice(other, None))
    cuts = (start, start + 1, start + 50, start + rows)
    parts = [prompt(((a, b - a),), slice(None)) for a, b in pairwise(cuts)]
    assert torch.equal(whole, beside)
    assert torch.equal(whole, torch.cat(parts))
    for row in (0, 1, 63, 64, 130):
        alone = TreeRows(
            positions=positions[row : row + 1].unsqueeze(0),
            kv_slots=places[start + row : start + row + 1].unsqueeze(0),
            blocks=blocks,
            context=torch.tensor([start + row]),
            bits=torch.ones(1, 1, dtype=torch.int64),
            tail_positions=positions[row : row + 1].unsqueeze(0),
            keys=start + row + 1,
        )
        decoded = attend(alone, kv, q[row : row + 1], window, softcap)
        assert torch.equal(decoded[0], whole[row]), row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [96, 8960])
def test_in_fixed_order_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, inputs: int
) -> None:
    weight = noise(1536, inputs, dtype=dtype) * inputs**-0.5
    bias = noise(1536, dtype=dtype)
    packed = FIXED.pack_linear(weight, bias)
    x, residual = noise(70, inputs, dtype=dtype), noise(70, 1536, dtype=dtype)
    alone = torch.cat([FIXED.linear(x[i : i + 1], packed, residual[i : i + 1]) for i in range(70)])
    for rows in (2, 7, 31, 32, 33, 64, 70):
        assert torch.equal(FIXED.linear(x[:rows], packed, residual[:rows]), alone[:rows]), rows
    assert error(alone, x.double() @ weight.double().T + bias + residual) < TOLERANCE[dtype]
    assert FIXED.linear(x[:0], packed).shape == (0, 1536)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_any_operation_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    x, weight = noise(8, 576, dtype=dtype), noise(576)
    for one, many in (
        (layers.rms_norm(x[5:6], weight, 1e-5), layers.rms_norm(x, weight, 1e-5)),
        (layers.act_mul(x[5:6], "silu"), layers.act_mul(x, "silu")),
    ):
        assert torch.equal(one[0], many[5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 512, 513, 5000])
def test_arg_max_is_the_references(dtype: torch.dtype, width: int) -> None:
    scores = noise(3, 2, width, dtype=dtype)
    assert torch.equal(sample.argmax_checked(scores), reference_sample.argmax_checked(scores))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_id_and_broken_rows_to_minus_one(dtype: torch.dtype) -> None:
    rows = torch.zeros(8, 1500)
    rows[0, [700, 900]] = 2.0
    rows[1, 3] = -0.0  # as good as 0
    rows[2, 1400] = torch.nan
    rows[3, 1400] = -torch.nan
    rows[4] = -torch.inf
    rows[5, 9] = torch.inf
    rows[6, :1499] = -torch.inf
    rows[7, :] = -0.0
    scores = rows.to(dtype)
    expected = torch.tensor([700, 0, -1, -1, -1, -1, 1499, 0])
    assert torch.equal(sample.argmax_checked(scores), expected)
    assert torch.equal(reference_sample.argmax_checked(scores), expected)


def test_other_element_types_take_the_reference() -> None:
    x, weight = noise(2, 8, dtype=torch.float64), noise(8, dtype=torch.float64)
    out = CPU.rms_norm(x, weight, 1e-5)
    assert torch.equal(out, reference.rms_norm(x, weight, 1e-5))
    halves = CPU.act_mul(noise(2, 8, dtype=torch.float16), "silu")
    assert halves.dtype == torch.float16


def test_gradients_take_the_reference() -> None:
    x = noise(2, 8).requires_grad_()
    CPU.rms_norm(x, noise(8), 1e-5).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
