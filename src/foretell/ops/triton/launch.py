"""Dependent launches (Hopper and on): a kernel may start while the one before it still runs.

Every kernel first lets its successor start, and touches nothing but weights before it has waited for all kernels
before it: what they computed is visible only then. So the gaps between kernels close. On older devices the same kernels
are launched one after the other.

Tried on an H200 and dropped: a product that fetches the head of its weights into the second-level cache, or into
registers, before it waits (no gain in a layer; with 4 kB a row a loss of a tenth).
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from foretell.ops.triton.device import limits


def options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a kernel's launch: its PDL constant, and the launcher's own."""
    if limits(device).capability < 90:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
@no_type_check
def release(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
@no_type_check
def wait(PDL: tl.constexpr):
    """Wait until all that the kernels before wrote can be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
@no_type_check
def start(PDL: tl.constexpr):
    """Both, for a kernel that has nothing to do in between."""
    release(PDL)
    wait(PDL)
