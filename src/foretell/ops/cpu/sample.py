"""Arg-max over a vocabulary. See `ops/reference/sample`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretell.ops.cpu.compiled import ELEMENTS, Kernel
from foretell.ops.cpu.lanes import load, order, store_int64
from foretell.ops.reference import sample as reference

_PART = 512  # scores whose greatest is found before its place is
_INFINITY = np.int32(0x7F800000)
_LOWEST, _HIGHEST = np.int32(-(1 << 31)), np.int32((1 << 31) - 1)


def argmax_checked(scores: Tensor) -> Tensor:
    """Arg-max over the last axis, or -1 where a row holds a NaN or no finite score."""
    if scores.dtype not in ELEMENTS or scores.requires_grad:
        return reference.argmax_checked(scores)
    scores = scores.contiguous()
    width = scores.shape[-1]
    out = torch.empty(scores.shape[:-1], dtype=torch.int64)
    ARGMAX[scores.dtype](scores.data_ptr(), out.data_ptr(), out.numel(), width)
    return out


def _argmax(scores: int, out: int, rows: int, width: int) -> None:
    for row in range(rows):
        first = row * width
        best, least, where = _LOWEST, _HIGHEST, 0
        for part in range(0, width, _PART):
            greatest = _LOWEST
            for i in range(first + part, first + min(part + _PART, width)):
                key = order(load(scores, i))
                greatest = key if key > greatest else greatest
                least = key if key < least else least
            if greatest > best:
                best, where = greatest, part
        found = -1
        # A NaN of either sign lies outside the infinities.
        if least >= -_INFINITY - 1 and -_INFINITY - 1 < best < _INFINITY:
            found = where
            while order(load(scores, first + found)) != best:
                found += 1
        store_int64(out, row, found)


ARGMAX = Kernel(_argmax)
