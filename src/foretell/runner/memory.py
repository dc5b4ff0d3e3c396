"""How much memory there is and what the weights take. Only measuring; who gets what is decided in build.py."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from foretell.spec.chained import ChainedDrafter


def device_bytes(device: torch.device) -> tuple[int, int]:
    """(bytes of the device, bytes of them that are in use); of a host, what it can still give, and 0."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free
    return _host_available(), 0


def drafter_bytes(drafter: object) -> int:
    """Bytes of the weights that a drafter brings: those of the modules it holds, directly or one step down."""
    held = [value for part in (drafter, *_parts(drafter)) for value in vars(part).values()]
    modules = {id(value): value for value in held if isinstance(value, nn.Module)}
    return sum(weights_bytes(module) for module in modules.values())


def _parts(drafter: object) -> list[object]:
    """The drafters that a chain is made of."""
    return [drafter.free, drafter.trained] if isinstance(drafter, ChainedDrafter) else []


def weights_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers; shared ones count once.

    A parameter whose values were packed for the device has its shape but no memory of its own (`Linear.pack`): the
    copy is as large as what the shape says.
    """
    tensors = (*model.parameters(), *model.buffers())
    return sum({tensor.data_ptr() or id(tensor): tensor.nbytes for tensor in tensors}.values())


def _host_available() -> int:
    """Bytes the host can give, by the kernel's estimate and the container's limit."""
    values = [_meminfo("MemAvailable")]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdecimal():
        values.append(int(text) - int(used.read_text()))
    return max(min(values), 0)


def _meminfo(key: str) -> int:
    path = Path("/proc/meminfo")
    if not path.exists():  # not Linux: an amount that any machine with a model on it has
        return 8 << 30
    for line in path.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 8 << 30
