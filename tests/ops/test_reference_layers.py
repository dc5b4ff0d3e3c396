"""The small operations against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foretell.ops.reference import layers, linear

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def test_padding_embeds_like_token_zero():
    weight = torch.randn(5, 4)
    out = layers.embed(torch.tensor([3, -1]), weight, 1.0)
    assert torch.equal(out, weight[[3, 0]])


def test_the_embedding_scale_is_rounded_to_the_weights_dtype():
    weight = torch.randn(5, 4).to(torch.bfloat16)
    scale = torch.tensor(3072**0.5, dtype=torch.bfloat16)
    assert torch.equal(layers.embed(torch.tensor([1]), weight, 3072**0.5), weight[[1]] * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_computed_wide_and_rounded_once(dtype):
    x, weight = 3 * torch.randn(7, 32).to(dtype), 1 + torch.randn(32)
    exact = (
        x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    )
    out = layers.rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), exact, atol=1e-6, rtol=2.0**-8 if dtype != torch.float32 else 1e-5
    )


def test_rms_norm_adds_the_residual_after_the_norm():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    expected = residual + layers.rms_norm(x, weight, 1e-6)
    assert torch.equal(layers.rms_norm(x, weight, 1e-6, residual), expected)


@pytest.mark.parametrize("dim", [8, 4])
def test_rope_turns_pairs_half_a_head_apart_and_leaves_the_rest(dim):
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    angles = torch.randn(3, dim // 2, dtype=torch.float64)
    cos = torch.cat((angles, angles), -1).cos().unsqueeze(1)
    sin = torch.cat((-angles, angles), -1).sin().unsqueeze(1)
    pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 : dim])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag, x[..., dim:]), -1)
    torch.testing.assert_close(layers.rope(x.clone(), cos, sin), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_act_mul_gates_the_second_half_by_the_first(name):
    x = torch.randn(3, 10)
    assert torch.equal(layers.act_mul(x, name), ACTIVATIONS[name](x[:, :5]) * x[:, 5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_linear_is_the_product_with_bias_and_residual(dtype, bias, rows):
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(64, 48).to(dtype)
    b = torch.randn(64).to(dtype) if bias else None
    residual = torch.randn(rows, 64).to(dtype)
    packed = linear.pack_linear(weight, b)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    tolerance = (
        {"atol": 0.1, "rtol": 2.0**-7} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-5}
    )
    out = linear.linear(x, packed)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, **tolerance)
    added = linear.linear(x, packed, residual)
    torch.testing.assert_close(added.double(), exact + residual.double(), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_is_two_products_and_the_activation(dtype, name, bias):
    x, weight = torch.randn(3, 48).to(dtype), torch.randn(64, 48).to(dtype) / 7
    b = torch.randn(64).to(dtype) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    expected = ACTIVATIONS[name](exact[:, :32]) * exact[:, 32:]
    out = linear.gated(x, linear.pack_linear(weight, b), name)
    tolerance = (
        {"atol": 0.02, "rtol": 2.0**-6} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    )
    torch.testing.assert_close(out.double(), expected, **tolerance)


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="holds for the kernels of a CPU with AMX"
)
def test_a_row_of_a_packed_product_does_not_depend_on_the_rows_beside_it():
    """Otherwise a draft's length could change the text in bfloat16."""
    weight = torch.randn(192, 96).to(torch.bfloat16)
    packed = gate = linear.pack_linear(weight, None)
    x = torch.randn(32, 96).to(torch.bfloat16)
    for rows in (2, 5, 32):
        assert torch.equal(linear.linear(x[:rows], packed)[:1], linear.linear(x[:1], packed))
        assert torch.equal(
            linear.gated(x[:rows], gate, "silu")[:1], linear.gated(x[:1], gate, "silu")
        )


def test_plain_weights_stay_the_parameter_so_that_gradients_reach_them():
    weight = torch.randn(4, 3, requires_grad=True)
    assert linear.pack_linear(weight, None).weight is weight
    assert not linear.repacks(weight)
    linear.linear(torch.ones(2, 3), linear.pack_linear(weight, None)).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 3), 2.0))


@pytest.mark.parametrize("chosen", [1, 2])
def test_experts_are_the_best_few_weighted_by_the_router(chosen):
    count, hidden, inner = 4, 12, 20
    x, router = torch.randn(5, hidden), torch.randn(5, count)
    gate_up, down = torch.randn(count, 2 * inner, hidden), torch.randn(count, hidden, inner)
    out = linear.experts(x, router, linear.pack_experts(gate_up, down), chosen, "silu")
    for row in range(5):
        probs = torch.softmax(router[row], 0)
        ids = sorted(range(count), key=lambda e: -probs[e])[:chosen]
        total = sum(probs[e] for e in ids)
        expected = sum(
            probs[e] / total * (down[e] @ layers.act_mul(gate_up[e] @ x[row], "silu")) for e in ids
        )
        torch.testing.assert_close(out[row], expected, atol=1e-4, rtol=1e-4)
