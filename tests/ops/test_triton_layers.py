"""The small kernels of a layer against the reference, at sizes that fill no tile."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import DEVICE, HALF, error, noise, poison, tolerance

from foretell.ops.meta import LayerKV
from foretell.ops.reference import attention as reference_attention
from foretell.ops.reference import layers as reference
from foretell.ops.triton import layers

DTYPES = (torch.float32, HALF)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 7.3])
def test_embedding_of_padding_is_that_of_token_zero(dtype: torch.dtype, scale: float) -> None:
    weight = noise(11, 1200, dtype=dtype)
    tokens = torch.tensor([3, -1, 10, 0], device=DEVICE)
    out = layers.embed(tokens, weight, scale)
    assert torch.equal(out, reference.embed(tokens, weight, scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 80, 1000])
@pytest.mark.parametrize("residual", [False, True])
def test_norm_is_the_references(dtype: torch.dtype, width: int, residual: bool) -> None:
    x, weight = noise(5, width, dtype=dtype), noise(width)
    before = noise(5, width, dtype=dtype) if residual else None
    out = layers.rms_norm(x, weight, 1e-5, before)
    assert error(out, reference.rms_norm(x, weight, 1e-5, before)) < tolerance(dtype)


def test_norm_of_heads_inside_larger_rows() -> None:
    x = noise(3, 7, 48)[:, 2:5]
    weight = noise(48)
    out = layers.rms_norm(x, weight, 1e-6)
    assert error(out, reference.rms_norm(x, weight, 1e-6)) < tolerance(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_addition_and_norm_are_two_operations_in_one(dtype: torch.dtype, parts: int) -> None:
    x, weight = noise(4, 700, dtype=dtype), noise(700)
    delta = noise(parts, 4, 700) if parts else noise(4, 700, dtype=dtype)
    whole = delta.sum(0).to(dtype) if parts else delta
    total, normed = layers.add_rms_norm(x, delta, weight, 1e-5)
    assert error(total, x + whole) < tolerance(dtype)
    assert error(normed, reference.rms_norm(total, weight, 1e-5)) < tolerance(dtype)


def angles(rows: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angle = noise(rows, 1, dim // 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (80, 80), (96, 96), (80, 32), (128, 128)])
def test_rotation_is_the_references(dtype: torch.dtype, dim: int, rotated: int) -> None:
    x = noise(3, 5, dim, dtype=dtype)
    cos, sin = angles(3, rotated, dtype)
    expected = reference.rope(x.clone(), cos, sin)
    assert error(layers.rope(x, cos, sin), expected) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"), [(7, 1, 64, 64), (4, 2, 80, 32), (9, 3, 16, 16)]
)
def test_rotation_and_kv_write_are_the_references(
    dtype: torch.dtype, normed: bool, parts: int, heads: int, kv_heads: int, dim: int, rotated: int
) -> None:
    rows, every = 5, heads + 2 * kv_heads
    cos, sin = angles(rows, rotated, dtype)
    norms = (noise(dim), noise(dim)) if normed else None
    split = noise(max(parts, 1), rows, every * dim)
    qkv = split.sum(0).to(dtype).view(rows, every, dim)
    slots = torch.tensor([4, 17, 0, 23, 5], device=DEVICE)
    shape = (3, 8, kv_heads, dim)
    kv = LayerKV(poison(*shape, dtype=dtype), poison(*shape, dtype=dtype))
    plain = LayerKV(poison(*shape, dtype=dtype), poison(*shape, dtype=dtype))
    expected = reference_attention.rope_store(
        qkv.clone(), heads, norms, 1e-6, cos, sin, plain, slots
    )
    out = layers.rope_store(split if parts else qkv, heads, norms, 1e-6, cos, sin, kv, slots)
    assert error(out, expected) < tolerance(dtype)
    for page, wanted in ((kv.k, plain.k), (kv.v, plain.v)):
        assert torch.equal(page.isnan(), wanted.isnan()), "written elsewhere than the reference"
        assert error(page.nan_to_num(), wanted.nan_to_num()) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [8, 1300])
def test_activation_and_product_are_the_references(
    dtype: torch.dtype, activation: str, inner: int
) -> None:
    gate_up = 4 * noise(3, 2 * inner, dtype=dtype)
    expected = reference.act_mul(gate_up, activation)
    assert error(layers.act_mul(gate_up, activation), expected) < tolerance(dtype)
    parts = torch.stack((gate_up.float() - 1, torch.ones_like(gate_up, dtype=torch.float32)))
    assert error(layers.act_mul_parts(parts, activation, dtype), expected) < tolerance(dtype)


def test_no_rows_are_no_launch() -> None:
    assert layers.rms_norm(noise(0, 8), noise(8), 1e-5).shape == (0, 8)
    assert layers.act_mul(noise(0, 8), "silu").shape == (0, 4)
    assert (
        layers.embed(torch.empty(0, dtype=torch.int64, device=DEVICE), noise(3, 8), 1.0).shape[0]
        == 0
    )
