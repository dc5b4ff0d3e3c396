"""The drafter protocol: two attributes, three methods. All that proposes tokens implements this and no more.

There is no rollback (garbage KV is garbage by definition), no prefill (it is `observe`), no reset (position 0
overwrites), no special case after a full acceptance (the window always re-runs the newly committed tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.ops.group import Group
from foretell.ops.meta import LayerKV, RaggedRows
from foretell.ops.table import REFERENCE, OpTable
from foretell.spec.nodes import Shape
from foretell.spec.processors import Law, Mode


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV a model needs for one token: `layers` times keys and values of `heads` x `head_dim`."""

    layers: int
    heads: int
    head_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class KVView:
    """The drafter's own layers of the KV pool, behind the target's block ids."""

    layers: tuple[LayerKV, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Committed prompt tokens of one step's chunks, flat, each with the target feature that stands before it.

    Token t_i at position i comes with f_{i-1}, the feature of the position that predicts it (EAGLE, arXiv 2401.15077,
    section 4.1), stored at entry i: so an entry depends on tokens up to i only and a cached block stays valid whatever
    follows it.
    """

    tokens: Tensor  # [R] int64
    features: Tensor | None  # [R, F]
    meta: RaggedRows


@dataclass(frozen=True, slots=True)
class Window:
    """Newly committed tokens of each request, with the target feature of the node that emitted each.

    Row j of request b is valid iff `j < count[b]`; valid rows come first and the last valid one is the pending token,
    the root of the next tree.
    """

    slots: Tensor  # [B] int64
    tokens: Tensor  # [B, W] int64, W = D + 1
    start: Tensor  # [B] int64, position of row 0
    count: Tensor  # [B] int64, at least 1 for live requests
    features: Tensor | None  # [B, W, F]
    live: Tensor  # [B] bool; rows that are not must leave no trace in the KV
    blocks: Tensor  # [B, M] int32
    text: Tensor  # [S, L] int32, committed tokens of all slots, the window included
    law: Law
    mode: Mode
    keys: int  # host-side bound of every key index that may be touched
    ops: OpTable = REFERENCE
    least_match: Tensor | None = None  # [B] int64, tokens of context that a look-up must match

    @property
    def length(self) -> Tensor:
        """[B] committed tokens after the window; the pending one is at `length - 1`."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens."""

    tokens: Tensor  # [B, N] int64, node 0 ignored, -1 = nothing proposed
    parents: Tensor | None = None  # [B, N] int64 for dynamic trees; None = the static tree
    probs: Tensor | None = None  # [B, N, V] law each node was drawn from; None = point masses

    def shared(self, group: Group) -> Draft:
        """Rank 0's, for every rank; ranks that drafted by themselves may differ by a rounding."""
        if group.alone:
            return self
        return Draft(
            group.share(self.tokens),
            None if self.parents is None else group.share(self.parents),
            None if self.probs is None else group.share(self.probs),
        )


class Drafter(Protocol):
    """What the step calls. `kv` and `features` are read once, before anything is allocated."""

    kv: KVSpec | None  # None: needs no paged KV
    features: tuple[
        int, ...
    ]  # target features read: () none, (-1,) final hidden, (l, m, h) layer taps

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Receive the target (for its embedding and head) and the drafter's KV; called once."""
        ...

    def observe(self, rows: PromptRows) -> None:
        """Ingest prompt tokens."""
        ...

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Ingest the window, then draft the tree of `shape`; with a one-node tree only ingest."""
        ...


class Learner(Protocol):
    """A drafter that gains by the texts of requests that ended; called between steps, never inside one."""

    def learn(self, text: Tensor) -> None:
        """Take in a text, [R] integers on the host; must not wait for the device."""
        ...


class NoDrafter:
    """Plain decoding: the baseline every drafter is compared with."""

    kv: KVSpec | None = None
    features: tuple[int, ...] = ()

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Nothing to bind."""

    def observe(self, rows: PromptRows) -> None:
        """Nothing to ingest."""

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Propose nothing."""
        return nothing(window.tokens.shape[0], shape)


def nothing(rows: int, shape: Shape) -> Draft:
    """A draft without a single token."""
    return Draft(
        tokens=torch.full((rows, shape.tree.nodes), -1, dtype=torch.int64, device=shape.bits.device)
    )
