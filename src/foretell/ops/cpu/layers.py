"""Embedding, norm, and the activation of a gated MLP over few rows. What they mean is in `ops/reference/layers`.

Arithmetic is in float32 and rounded once. A row is computed alone, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from foretell.ops.cpu.compiled import ELEMENTS, Kernel
from foretell.ops.cpu.lanes import (
    HALF,
    ONE,
    ZERO,
    exp,
    load,
    load_float32,
    load_int64,
    store,
)
from foretell.ops.reference import layers as reference

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_SQRT_HALF = np.float32(math.sqrt(0.5))
_TANH_SCALE, _TANH_CUBIC = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)


def embed(tokens: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Token embeddings. See `reference.layers.embed`."""
    if weight.dtype not in ELEMENTS or weight.requires_grad:
        return reference.embed(tokens, weight, scale)
    rows, width = tokens.shape[0], weight.shape[1]
    tokens = tokens.contiguous()
    out = torch.empty(rows, width, dtype=weight.dtype)
    if scale != 1.0:
        scale = float(torch.tensor(scale, dtype=weight.dtype))
    EMBED[weight.dtype](tokens.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, scale)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Root-mean-square norm. See `reference.layers.rms_norm`."""
    if x.dtype not in ELEMENTS or weight.dtype is not torch.float32 or x.requires_grad:
        return reference.rms_norm(x, weight, eps, residual)
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    added = 0
    if residual is not None:
        residual = residual.contiguous()
        added = residual.data_ptr()
    RMS_NORM[x.dtype](
        x.data_ptr(),
        weight.data_ptr(),
        added,
        out.data_ptr(),
        x.numel() // width,
        width,
        eps,
    )
    return out


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up. See `reference.layers.act_mul`."""
    if gate_up.dtype not in ELEMENTS or gate_up.requires_grad:
        return reference.act_mul(gate_up, activation)
    gate_up = gate_up.contiguous()
    inner = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], inner), dtype=gate_up.dtype)
    ACT_MUL[gate_up.dtype](
        gate_up.data_ptr(), out.data_ptr(), out.numel() // inner, inner, _ACTIVATIONS[activation]
    )
    return out


def _embed(tokens: int, weight: int, out: int, rows: int, width: int, scale: float) -> None:
    factor = np.float32(scale)
    for row in range(rows):
        source = max(load_int64(tokens, row), 0) * width
        for i in range(width):
            store(out, row * width + i, load(weight, source + i) * factor)


def _rms_norm(
    x: int, weight: int, residual: int, out: int, rows: int, width: int, eps: float
) -> None:
    for row in range(rows):
        first = row * width
        total = ZERO
        for i in range(first, first + width):
            total += load(x, i) * load(x, i)
        scale = ONE / np.float32(math.sqrt(total / np.float32(width) + np.float32(eps)))
        if residual == 0:
            for i in range(width):
                store(out, first + i, load(x, first + i) * scale * load_float32(weight, i))
        else:
            for i in range(width):
                normed = load(x, first + i) * scale * load_float32(weight, i)
                store(out, first + i, load(residual, first + i) + normed)


@njit(error_model="numpy")
def _gelu(x):  # type: ignore[no-untyped-def]
    return HALF * x * (ONE + np.float32(math.erf(x * _SQRT_HALF)))


def _act_mul(gate_up: int, out: int, rows: int, inner: int, activation: int) -> None:
    for row in range(rows):
        gate, first = 2 * row * inner, row * inner
        up = gate + inner
        if activation == 0:
            for i in range(inner):
                x = load(gate_up, gate + i)
                store(out, first + i, x / (ONE + exp(-x)) * load(gate_up, up + i))
        elif activation == 1:
            for i in range(inner):
                x = load(gate_up, gate + i)
                store(out, first + i, _gelu(x) * load(gate_up, up + i))
        else:  # x / 2 * (1 + tanh(y)) is x / (1 + e^(-2 y))
            for i in range(inner):
                x = load(gate_up, gate + i)
                y = _TANH_SCALE * (x + _TANH_CUBIC * x * x * x)
                store(out, first + i, x / (ONE + exp(-y)) * load(gate_up, up + i))


EMBED, RMS_NORM, ACT_MUL = Kernel(_embed), Kernel(_rms_norm), Kernel(_act_mul)
