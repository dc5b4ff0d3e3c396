"""What the launchers ask about a device: how many processors it has, and how much shared memory a program may use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits that tile sizes are chosen by."""

    processors: int
    shared_bytes: int  # that one program may use
    capability: int  # 80, 89, 90, ...


INTERPRETED = DeviceLimits(processors=4, shared_bytes=1 << 17, capability=80)


@cache
def limits(device: torch.device) -> DeviceLimits:
    """Limits of a device; in the interpreter (a CPU tensor) those of a small GPU."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        processors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        capability=10 * properties.major + properties.minor,
    )


def power_of_two(n: int) -> int:
    """The least power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def ceil_div(n: int, divisor: int) -> int:
    """n / divisor, rounded up."""
    return -(-n // divisor)


def dense_rows(x: Tensor) -> Tensor:
    """x itself where its last axis is dense, else a dense copy (a row stride of 0 stays)."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def dot_precision(dtype: torch.dtype) -> str:
    """How `tl.dot` treats its operands: float32 exactly (tests), where tf32 would be the default."""
    return "ieee" if dtype == torch.float32 else "tf32"
