"""Matrix products with weights that are packed once, when they are loaded.

On a CPU with bfloat16 units, bfloat16 weights are reordered for oneDNN; everywhere else packing keeps the weight as it
is (so a packed weight is still the parameter, and gradients reach it). Only this file knows which.

A library sums in an order of its own for each number of rows. On AMX oneDNN gives a row the same bits beside up to 31
others (tried for the shapes of SmolLM2 and Qwen2.5, one and two threads; with 8,960 inputs a lone row is an exception);
beside more of them about one value in 5,000 differs by one bit. A weight packed as `fixed` is multiplied in pieces of
which this is known, or of one size, so that a row's bits never depend on its company.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.ops.reference.layers import act_mul

_ROWS_HINT = 8  # rows a product is laid out for: a few requests, or one draft tree
_ALIKE = (2, 32)  # oneDNN: a row has the same bits in products of so many rows
_PIECE = 8  # rows of every product of a fixed weight elsewhere


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [out, in] and its bias, ready for `linear`."""

    weight: Tensor  # [O, I], or an opaque oneDNN tensor
    bias: Tensor | None  # [O]
    onednn: bool
    fixed: bool = False  # whether a row's bits must not depend on the rows beside it


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The MLPs of a mixture of experts, ready for `experts`."""

    gate_up: tuple[Packed, ...]
    down: tuple[Packed, ...]


@cache
def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 natively."""
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not onednn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    # oneDNN says yes from AVX-512 on, where it emulates; only units of the CPU's own are faster than float32.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def repacks(weight: Tensor) -> bool:
    """Whether packing copies a weight into the oneDNN layout."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_bfloat16_units()


def pack_linear(weight: Tensor, bias: Tensor | None, fixed: bool = False) -> Packed:
    """Lay out a weight for `linear`.

    Args:
        weight: [O, I].
        bias: [O] or None.
        fixed: a row's product is to have the same bits whatever rows stand beside it; slower above a few rows.
    """
    if not repacks(weight):
        return Packed(weight, bias, False, fixed)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
    return Packed(packed, None if bias is None else bias.detach(), True, fixed)


def linear(x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
    """x W^T + b (+ residual).

    Args:
        x: [R, I].
        residual: [R, O] or None.

    Returns:
        [R, O].
    """
    if packed.fixed:
        return _in_pieces(x, packed, residual)
    return _product(x, packed, residual)


def _in_pieces(x: Tensor, packed: Packed, residual: Tensor | None) -> Tensor:
    """`linear` by products in which a row has the bits that it has in any of them."""
    least, most = _ALIKE if packed.onednn else (_PIECE, _PIECE)
    sums = []
    for start in range(0, x.shape[0], most):
        rows = x[start : start + most]
        added = None if residual is None else residual[start : start + most]
        short = max(0, least - rows.shape[0])
        if short:  # filled up with zeros
            rows = F.pad(rows, (0, 0, 0, short))
            added = None if added is None else F.pad(added, (0, 0, 0, short))
        made = _product(rows, packed, added)
        sums.append(made[: made.shape[0] - short])
    if len(sums) == 1:
        return sums[0]
    return torch.cat(sums) if sums else _product(x, packed, residual)


def _product(x: Tensor, packed: Packed, residual: Tensor | None) -> Tensor:
    if not packed.onednn:
        if residual is not None and packed.bias is None:
            return torch.addmm(residual, x, packed.weight.T)  # one kernel
        out = F.linear(x, packed.weight, packed.bias)
        return out if residual is None else residual + out
    product = torch.ops.mkldnn._linear_pointwise
    if residual is None:
        plain: Tensor = product(x, packed.weight, packed.bias, "none", [], "")
        return plain
    added: Tensor = product.binary(x, residual, packed.weight, packed.bias, "add")
    return added


def gated(x: Tensor, packed: Packed, activation: str) -> Tensor:
    """act(gate(x)) * up(x), gate and up from one product (faster here than two with fused activations).

    Args:
        x: [R, I].
        packed: of [2 * O, I], the gate first.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        [R, O].
    """
    return act_mul(linear(x, packed), activation)


def pack_experts(gate_up: Tensor, down: Tensor, fixed: bool = False) -> PackedExperts:
    """Lay out E experts for `experts`.

    Args:
        gate_up: [E, 2 * I, H].
        down: [E, H, I].
        fixed: as `pack_linear`'s.
    """
    return PackedExperts(
        gate_up=tuple(pack_linear(weight, None, fixed) for weight in gate_up.unbind()),
        down=tuple(pack_linear(weight, None, fixed) for weight in down.unbind()),
    )


def experts(
    x: Tensor, router: Tensor, packed: PackedExperts, chosen: int, activation: str
) -> Tensor:
    """Mixture of experts (arXiv 2401.04088, section 2.1): softmax over the router, the best `chosen`, renormalised.

    Every expert runs on every row and a row that did not choose it weighs it zero: no shape depends on data.

    Args:
        x: [R, H].
        router: [R, E], router logits.

    Returns:
        [R, H].
    """
    probs = torch.softmax(router.float(), dim=-1)
    best, ids = probs.topk(chosen, dim=-1)
    weights = (
        torch.zeros_like(probs).scatter(1, ids, best / best.sum(dim=-1, keepdim=True)).to(x.dtype)
    )
    out = torch.zeros_like(x)
    for i, (gate_up, down) in enumerate(zip(packed.gate_up, packed.down, strict=True)):
        out = torch.addcmul(out, linear(gated(x, gate_up, activation), down), weights[:, i : i + 1])
    return out
