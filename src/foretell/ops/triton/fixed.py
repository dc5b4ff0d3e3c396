"""The operations of a CUDA device in an order of addition that does not depend on the batch.

A row's result is a function of that row, its keys and the weights, whatever rows, nodes and requests run beside it: a
prompt in any chunks and a chain of drafts give the bits of one token after the other. It costs speed: our own products
with one tile per weight instead of cuBLAS, and attention in parts of fixed length.

What it does not promise: the same bits for a token of the text from the prompt's kernel and from decoding's (a request
that was preempted computes its text again as a prompt), nor for trees that are not chains, where an accepted token's
key stands in another place of its tile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from foretell.ops.triton import attention, experts, linear
from foretell.ops.triton.table import CUDA


def pack_linear(weight: Tensor, bias: Tensor | None) -> linear.Packed:
    """Lay out a weight; its tile is chosen by its shape."""
    return linear.pack_linear(weight, bias, linear.fixed_tile(weight))


def pack_experts(gate_up: Tensor, down: Tensor) -> experts.PackedExperts:
    """Lay out experts; one tile for any number of rows."""
    return experts.pack_experts(gate_up, down, experts.fixed_tile(down))


FIXED = replace(
    CUDA,
    mask=partial(attention.mask, tuning=attention.FIXED),
    pack_linear=pack_linear,
    pack_experts=pack_experts,
)
