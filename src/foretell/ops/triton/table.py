"""The operations of a CUDA device: Triton kernels, and cuBLAS for the matrix products."""

from __future__ import annotations

from torch import Tensor

from foretell.ops.reference import linear
from foretell.ops.table import OpTable
from foretell.ops.triton import attention, layers, sample


def linear_onto(x: Tensor, packed: linear.Packed, residual: Tensor | None = None) -> Tensor:
    """x W^T + b, or that added onto the residual in place: one kernel and no copy. See `reference.linear.linear`."""
    if residual is None or packed.bias is not None:
        return linear.linear(x, packed, residual)
    return residual.addmm_(x, packed.weight.T)


def gated(x: Tensor, packed: linear.Packed, activation: str) -> Tensor:
    """act(gate(x)) * up(x): one product, one kernel. See `reference.linear.gated`."""
    return layers.act_mul(linear.linear(x, packed), activation)


CUDA = OpTable(
    embed=layers.embed,
    rms_norm=layers.rms_norm,
    rope_store=layers.rope_store,
    mask=attention.mask,
    attention=attention.attention,
    act_mul=layers.act_mul,
    repacks=linear.repacks,
    pack_linear=linear.pack_linear,
    linear=linear_onto,
    gated=gated,
    pack_experts=linear.pack_experts,
    experts=linear.experts,
    argmax=sample.argmax_checked,
)
