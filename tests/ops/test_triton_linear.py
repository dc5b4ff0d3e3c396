"""Our own matrix products and the grouped products of experts, at sizes that fill no tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import DEVICE, HALF, error, noise, tolerance

from foretell.ops.reference import layers as reference_layers
from foretell.ops.reference import linear as reference
from foretell.ops.triton import experts, linear
from foretell.ops.triton.device import DeviceLimits
from foretell.ops.triton.linear import Tile

DTYPES = (torch.float32, HALF)
SMALL = Tile(outputs=32, rows=16, inner=32, stages=2)
SPLIT = Tile(outputs=32, rows=16, inner=32, split_k=3, stages=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [SMALL, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 70, 96), (6, 33, 128), (40, 64, 75)])
@pytest.mark.parametrize("extras", [False, True])
def test_product_is_that_of_float64(
    dtype: torch.dtype, tile: Tile, rows: int, outputs: int, inner: int, extras: bool
) -> None:
    x, weight = noise(rows, inner, dtype=dtype), noise(outputs, inner, dtype=dtype)
    bias = noise(outputs, dtype=dtype) if extras else None
    residual = noise(rows, outputs, dtype=dtype) if extras else None
    out = linear.linear(x, linear.pack_linear(weight, bias, tile), residual)
    expected = x.double() @ weight.double().T
    if bias is not None and residual is not None:
        expected = expected + bias.double() + residual.double()
    assert error(out, expected) < tolerance(dtype)


def test_parts_have_the_same_sum_inside_and_apart() -> None:
    x, weight = noise(20, 200), noise(48, 200)
    inside = linear.pack_linear(weight, None, SPLIT)
    apart = replace(inside, counters=inside.counters[:0])
    for _ in range(2):  # the counters are ready for another launch
        assert torch.equal(linear.linear(x, inside), linear.linear(x, apart))
    assert not inside.counters.any()


def test_a_row_has_the_same_bits_beside_any_number_of_others() -> None:
    x, weight = noise(40, 96, dtype=HALF), noise(48, 96, dtype=HALF)
    packed = linear.pack_linear(weight, None, SPLIT)
    everything = linear.linear(x, packed)
    for rows in (1, 6, 17):
        assert torch.equal(linear.linear(x[:rows], packed), everything[:rows]), rows


def test_without_a_tile_the_product_is_pytorchs() -> None:
    x, weight = noise(3, 32), noise(8, 32)
    assert torch.equal(linear.linear(x, linear.pack_linear(weight, None)), x @ weight.T)


@pytest.mark.parametrize("rows", [1, 4, 16, 33, 64])
def test_chosen_tiles_fit_and_are_right(rows: int) -> None:
    x, weight = noise(rows, 256, dtype=HALF), noise(96, 256, dtype=HALF)
    tile = linear.tile_for(rows, 96, 256, x.element_size(), DEVICE)
    out = linear.product(x, linear.pack_linear(weight, None), None, tile)
    assert error(out, x.double() @ weight.double().T) < tolerance(HALF)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 50, 96), (19, 32, 75)])
def test_gated_product_is_product_and_activation(
    dtype: torch.dtype, activation: str, rows: int, outputs: int, inner: int
) -> None:
    x, weight = noise(rows, inner, dtype=dtype), noise(2 * outputs, inner, dtype=dtype)
    bias = noise(2 * outputs, dtype=dtype)
    out = linear.gated(x, linear.pack_linear(weight, bias, SMALL), activation)
    both = x.double() @ weight.double().T + bias.double()
    expected = reference_layers.act_mul(both, activation)
    assert error(out, expected) < tolerance(dtype)
    fused = linear.gated_product(x, weight, bias, activation, SMALL)
    assert error(fused, expected) < tolerance(dtype)


@pytest.mark.parametrize(
    ("rows", "count", "chosen"), [(1, 8, 2), (5, 3, 3), (200, 8, 2), (9, 5, 1)]
)
def test_routes_list_every_pair_once_in_order(rows: int, count: int, chosen: int) -> None:
    router = noise(rows, count)
    routes = experts.route(router, chosen)
    best, ids = torch.softmax(router, -1).topk(chosen, -1)
    weights = best / best.sum(-1, keepdim=True)
    torch.testing.assert_close(routes.weights, weights, rtol=1e-5, atol=1e-6)
    counts = torch.bincount(ids.flatten().cpu(), minlength=count)
    assert routes.offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    for expert in range(count):
        begin, end = int(routes.offsets[expert]), int(routes.offsets[expert + 1])
        mine = (ids == expert).any(-1).nonzero().flatten()
        assert routes.rows[begin:end].tolist() == mine.tolist(), expert
    row = torch.arange(rows, device=DEVICE, dtype=torch.int32).unsqueeze(1).expand(-1, chosen)
    assert torch.equal(routes.rows[routes.places.long()], row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "count", "chosen"), [(1, 4, 2), (7, 4, 2), (45, 3, 1)])
def test_experts_are_the_references(dtype: torch.dtype, rows: int, count: int, chosen: int) -> None:
    hidden, inner = 40, 70
    x, router = noise(rows, hidden, dtype=dtype), noise(rows, count, dtype=dtype)
    gate_up = noise(count, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
    down = noise(count, hidden, inner, dtype=dtype) * inner**-0.5
    out = experts.experts(x, router, experts.pack_experts(gate_up, down), chosen, "silu")
    wide = reference.pack_experts(gate_up.double(), down.double())
    expected = reference.experts(x.double(), router.double(), wide, chosen, "silu")
    assert error(out, expected) < 2 * tolerance(dtype)


def test_a_row_of_nan_keeps_its_harm_to_itself() -> None:
    x, router = noise(4, 32), noise(4, 4)
    packed = experts.pack_experts(noise(4, 64, 32), noise(4, 32, 32))
    alone = experts.experts(x, router, packed, 2, "silu")
    x[2], router[2] = torch.nan, torch.nan
    out = experts.experts(x, router, packed, 2, "silu")
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], alone[[0, 1, 3]])


def test_streams_are_for_few_rows_of_16_bits_on_a_device_with_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = noise(96, 256, dtype=HALF)
    hopper = DeviceLimits(processors=132, shared_bytes=232448, capability=90)
    for device, most in (
        (hopper, 64),
        (replace(hopper, capability=89), 0),
        (replace(hopper, shared_bytes=101376), 0),
    ):
        monkeypatch.setattr(linear, "limits", lambda _, device=device: device)
        found = [rows for rows in (1, 8, 33, 64, 65) if linear.best_tile(rows, weight) is not None]
        assert found == [rows for rows in (1, 8, 33, 64, 65) if rows <= most]
        assert (linear.best_gated_tile(8, weight) is None) == (most == 0)
        assert linear.best_tile(8, weight.float()) is None
        assert linear.best_tile(8, weight[:, :200]) is None
