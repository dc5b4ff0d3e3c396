"""The operations of a CPU: compiled loops for bfloat16 and float32, the reference for all else, oneDNN for products."""

from __future__ import annotations

from torch import Tensor

from foretell.ops.cpu import attention, layers, sample
from foretell.ops.cpu.compiled import ELEMENTS, prepare
from foretell.ops.reference import linear
from foretell.ops.table import OpTable

KERNELS = (
    layers.EMBED,
    layers.RMS_NORM,
    layers.ACT_MUL,
    attention.ROPE_STORE,
    attention.KEY_PLACES,
    attention.TREE_ATTENTION,
    sample.ARGMAX,
)


def pack_linear(weight: Tensor, bias: Tensor | None, fixed: bool = False) -> linear.Packed:
    """Lay out a weight; with the first one it is known which kernels will run, and they are compiled."""
    if weight.dtype in ELEMENTS:
        prepare(KERNELS, weight.dtype)
    return linear.pack_linear(weight, bias, fixed)


def gated(x: Tensor, packed: linear.Packed, activation: str) -> Tensor:
    """act(gate(x)) * up(x). See `reference.linear.gated`."""
    return layers.act_mul(linear.linear(x, packed), activation)


CPU = OpTable(
    embed=layers.embed,
    rms_norm=layers.rms_norm,
    rope_store=attention.rope_store,
    mask=attention.mask,
    attention=attention.attention,
    act_mul=layers.act_mul,
    repacks=linear.repacks,
    pack_linear=pack_linear,
    linear=linear.linear,
    gated=gated,
    pack_experts=linear.pack_experts,
    experts=linear.experts,
    argmax=sample.argmax_checked,
)
