"""The table of operations a model runs on, chosen once per device. Logic above never asks which device it is on.

Not a registry: a row of functions with the signatures of `ops/reference`, which is their specification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from foretell.ops.meta import LayerKV
from foretell.ops.reference import attention, layers, linear, ngram, rows, sample, verify

# What `pack_*` returns belongs to the table that made it: an opaque value that only its own `linear`, `gated` or
# `experts` reads. The same holds for `mask` and `attention`, `kv_pages` and `move_kv`.
Opaque = Any


@dataclass(frozen=True, slots=True)
class OpTable:
    """The operations of a decoder and of a step around it; see `ops/reference` for arguments and shapes."""

    embed: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm: Callable[..., Tensor]  # (x, weight, eps, residual=None)
    rope_store: Callable[..., Tensor]  # (qkv, heads, norms, eps, cos, sin, kv, kv_slots)
    mask: Callable[..., Opaque]  # (meta, window, block_size, group, dtype)
    attention: Callable[..., Tensor]  # (q, kv, meta, mask, window, scale, softcap)
    act_mul: Callable[[Tensor, str], Tensor]
    repacks: Callable[[Tensor], bool]  # whether packing copies this weight
    pack_linear: Callable[[Tensor, Tensor | None], Opaque]
    linear: Callable[..., Tensor]  # (x, packed, residual=None)
    gated: Callable[[Tensor, Opaque, str], Tensor]
    pack_experts: Callable[[Tensor, Tensor], Opaque]
    experts: Callable[[Tensor, Tensor, Opaque, int, str], Tensor]
    argmax: Callable[[Tensor], Tensor]  # -1 where a row is not finite
    # Around the decoder:
    angles: Callable[..., tuple[Tensor, Tensor]] = (
        layers.angles
    )  # (positions, frequencies, factor, dtype)
    gather: Callable[..., rows.Gathered] = rows.gather  # the nodes under verification
    decide: Callable[..., verify.Decision] = (
        verify.decide
    )  # (drafted, slots, rows, block_size, moves)
    keep_features: Callable[..., Tensor] = (
        verify.keep_features
    )  # (features, path, count, rows, feature)
    kv_pages: Callable[[Sequence[LayerKV]], Opaque] = verify.kv_pages
    move_kv: Callable[[Opaque, Tensor, Tensor], None] = verify.move_kv
    place: Callable[..., rows.Placed] = rows.place  # rows of a drafter
    last_rows: Callable[[Tensor, Tensor], Tensor] = verify.last_rows
    ngram: Callable[..., Tensor] = ngram.draft
    # (logits, law or None, positions, stream, filtered, ids, targets): the whole of sampling in a kernel or two. None:
    # it is done in parts, from the operations of `reference.sample`.
    draw: Callable[..., Tensor] | None = None


REFERENCE = OpTable(
    embed=layers.embed,
    rms_norm=layers.rms_norm,
    rope_store=attention.rope_store,
    mask=attention.mask,
    attention=attention.attention,
    act_mul=layers.act_mul,
    repacks=linear.repacks,
    pack_linear=linear.pack_linear,
    linear=linear.linear,
    gated=linear.gated,
    pack_experts=linear.pack_experts,
    experts=linear.experts,
    argmax=sample.argmax_checked,
)


def table_for(device: torch.device, deterministic: bool = False) -> OpTable:
    """The operations for a device.

    Args:
        deterministic: those whose sums do not depend on the batch.

    Raises:
        ValueError: there are none for this device.
    """
    if device.type == "cuda":  # Triton is imported where there is a GPU for it
        from foretell.ops.triton.fixed import FIXED
        from foretell.ops.triton.table import CUDA

        return FIXED if deterministic else CUDA
    if device.type == "cpu" and find_spec("numba") is not None:
        # Numba likewise; a Python that is too new for it runs without.
        from foretell.ops.cpu.fixed import FIXED as CPU_FIXED
        from foretell.ops.cpu.table import CPU

        return CPU_FIXED if deterministic else CPU
    if deterministic:
        raise ValueError(
            f"deterministic=True on {device.type!r} needs foretell's compiled operations for CPUs, and numba is not "
            "installed; install numba or leave deterministic away"
        )
    return REFERENCE
