"""One drafter for networks that draft token after token: run the newly committed tokens, then grow the tree by levels.

`Autoregressive` is that procedure; `DraftModelDrafter` runs it with a smaller language model, possibly of another
vocabulary, and eagle.py with a layer that reads the target's features. The network's KV lies in the same blocks as
the target's: the entry of the token at position i is entry i, so it depends on tokens up to i only. The tree's own
nodes are written at entries `length - 1 + node` and are never kept: the next window runs the accepted tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.ops.meta import LayerKV, Meta, TreeRows
from foretell.spec.candidates import Choice, Scoring, choice_for, fill_levels
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window
from foretell.spec.nodes import Level, Shape
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary


class Net(Protocol):
    """A network that predicts the token after each row; tokens are the target's ids."""

    def ingest(
        self, tokens: Tensor, features: Tensor | None, meta: Meta, kv: Sequence[LayerKV]
    ) -> Tensor:
        """Run committed tokens ([R] or [B, W]) with the target feature before each; returns [..., H]."""
        ...

    def extend(self, tokens: Tensor, above: Tensor, meta: Meta, kv: Sequence[LayerKV]) -> Tensor:
        """Run drafted tokens ([B, m]) with the network's own output at each one's parent ([B, m, H]); [B, m, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., Vd] logits over the network's own vocabulary."""
        ...


@dataclass(frozen=True, slots=True)
class Entries:
    """How a network's KV entries relate to positions.

    Args:
        rotary_shift: a row's rotary position is its entry less this.
        first_key: entries below it hold nothing.
    """

    rotary_shift: int = 0
    first_key: int = 0


@dataclass(frozen=True, slots=True)
class Spot:
    """Drafted nodes in the scratch entries behind the committed text; key 0 of the tail is the root.

    Rows see the committed text and the tail keys in `bits`.
    """

    place: Tensor  # [m] int64, which tail key each node is written as
    bits: Tensor  # [B or 1, m] int64, which tail keys each node sees, itself included
    depths: Tensor  # [1, T] int64, depth of each tail key


class Autoregressive:
    """The procedure: see the module.

    Args:
        net: what drafts.
        scoring: how its logits become candidates.
        entries: where its KV lies.
    """

    def __init__(self, net: Net, scoring: Scoring, entries: Entries) -> None:
        self.net = net
        self.scoring = scoring
        self.entries = entries
        self._kv: Sequence[LayerKV] = ()
        self._block_size = 0

    def bind(self, kv: KVView) -> None:
        """Receive the KV behind the target's block ids."""
        self._kv, self._block_size = kv.layers, kv.block_size

    def observe(self, rows: PromptRows) -> None:
        """Run prompt tokens for their KV."""
        shift, first = self.entries.rotary_shift, self.entries.first_key
        meta = replace(rows.meta, positions=rows.meta.positions - shift, first_key=first)
        self.net.ingest(rows.tokens, rows.features, meta, self._kv)

    def run_window(self, window: Window) -> Tensor:
        """[B, 1, H], the output at each request's pending token; nothing is left of rows at and after `count`."""
        place = torch.arange(window.tokens.shape[1], device=window.tokens.device)
        placed = window.ops.place(
            window.start, window.live, window.count, window.blocks, place, place.unsqueeze(0),
            self.entries.rotary_shift, self._block_size,
        )  # fmt: skip
        meta = TreeRows(
            positions=placed.positions,
            kv_slots=placed.kv_slots,
            blocks=window.blocks,
            context=window.start,
            bits=((2 << place) - 1).expand_as(placed.positions),
            tail_positions=placed.tail_positions,
            keys=window.keys,
            first_key=self.entries.first_key,
        )
        hidden = self.net.ingest(window.tokens, window.features, meta, self._kv)
        return window.ops.last_rows(hidden, window.count)

    def run_nodes(self, tokens: Tensor, above: Tensor, window: Window, spot: Spot) -> Tensor:
        """Run drafted nodes that will have children.

        Args:
            tokens: [B, m] int64.
            above: [B, m, H], the network's output at each one's parent.
        """
        root = window.length - 1
        placed = window.ops.place(
            root, window.live, None, window.blocks, spot.place, spot.depths,
            self.entries.rotary_shift, self._block_size,
        )  # fmt: skip
        meta = TreeRows(
            positions=placed.positions,
            kv_slots=placed.kv_slots,
            blocks=window.blocks,
            context=root,
            bits=spot.bits.expand_as(placed.positions),
            tail_positions=placed.tail_positions,
            keys=window.keys,
            first_key=self.entries.first_key,
        )
        return self.net.extend(tokens, above, meta, self._kv)

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Run the window, then one small pass per level of the static tree."""
        hidden = self.run_window(window)
        return fill_levels(self.scoring, window, shape, hidden, _Levels(self, window, shape))


@dataclass(frozen=True, slots=True)
class _Levels:
    """The steps of one draft."""

    procedure: Autoregressive
    window: Window
    shape: Shape

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.procedure.net.logits(hidden)

    def run(self, tokens: Tensor, above: Tensor, level: Level) -> Tensor:
        place = level.expanded
        spot = Spot(place, level.bits, self.shape.depths)
        return self.procedure.run_nodes(tokens, above, self.window, spot)


class DraftModelDrafter:
    """Drafts with a language model.

    Args:
        model: the draft model.
        vocabulary: how its tokens and the target's correspond.
        acceptance: under `match` drafts share the target's noise; under `rejection` they are drawn from their own
            stream and their law is handed over.
        greedy: draft the likeliest tokens instead.
    """

    features: tuple[int, ...] = ()

    def __init__(
        self,
        model: Decoder,
        vocabulary: Vocabulary,
        acceptance: Acceptance,
        greedy: bool = False,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        choice = Choice.LIKELIEST if greedy else choice_for(acceptance, draws=True)
        self.draws = choice is Choice.DRAWN
        layers, heads, head_dim = model.kv_shape
        self.kv: KVSpec | None = KVSpec(layers, heads, head_dim)
        net = _LanguageModel(model, vocabulary)
        self._procedure = Autoregressive(net, Scoring(vocabulary, choice), Entries())

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Receive the KV behind the target's block ids."""
        assert kv is not None, "a draft model needs KV"
        self._procedure.bind(kv)

    def observe(self, rows: PromptRows) -> None:
        """Run prompt tokens for their KV."""
        self._procedure.observe(rows)

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Run the window, then one small pass per level of the tree."""
        return self._procedure.propose(window, shape)


@dataclass(frozen=True, slots=True)
class _LanguageModel:
    """A decoder as a `Net`: it reads tokens only, in its own vocabulary."""

    model: Decoder
    vocabulary: Vocabulary

    def ingest(
        self, tokens: Tensor, features: Tensor | None, meta: Meta, kv: Sequence[LayerKV]
    ) -> Tensor:
        hidden: Tensor = self.model(self.vocabulary.to_draft(tokens), meta, kv)[0]
        return hidden

    def extend(self, tokens: Tensor, above: Tensor, meta: Meta, kv: Sequence[LayerKV]) -> Tensor:
        return self.ingest(tokens, None, meta, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)
