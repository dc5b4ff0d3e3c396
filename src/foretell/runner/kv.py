"""KVPool: one block id addresses the target's and the drafter's layers. Owns the memory, not the blocks.

Who holds which block is the scheduler's business (engine/blocks.py); block 0 is the null block of rows that must leave
no trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foretell.ops.meta import LayerKV
from foretell.spec.drafter import KVSpec


class KVPool:
    """Paged KV of the target and, behind the same block ids, of the drafter.

    Args:
        blocks: number of blocks, the null block included.
        block_size: tokens per block.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        target: KVSpec,
        drafter: KVSpec | None,
        dtype: torch.dtype,
        drafter_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.target = _allocate(blocks, block_size, target, dtype, device)
        self.drafter: tuple[LayerKV, ...] = ()
        if drafter is not None:
            self.drafter = _allocate(blocks, block_size, drafter, drafter_dtype, device)

    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in (*self.target, *self.drafter))


def _allocate(
    blocks: int, block_size: int, spec: KVSpec, dtype: torch.dtype, device: torch.device
) -> tuple[LayerKV, ...]:
    shape = (blocks, block_size, spec.heads, spec.head_dim)
    return tuple(
        LayerKV(k=_zeros(shape, dtype, device), v=_zeros(shape, dtype, device))
        for _ in range(spec.layers)
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not junk: a masked key is still multiplied by a zero weight, and 0 * NaN is NaN.

    On a CPU the pages come from the system as zeros and take no memory before they are written, so a large pool costs
    what is used of it (`torch.zeros` would touch every page).
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def clear_blocks(layers: Sequence[LayerKV], blocks: Sequence[int]) -> None:
    """Zero whole blocks in every layer, after a request with NaN in it has used some."""
    for layer in layers:
        layer.k[list(blocks)] = 0
        layer.v[list(blocks)] = 0
