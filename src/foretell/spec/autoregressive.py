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
from foretell.ops.meta import LayerKV, Meta, TreeRows, flat_slots
from foretell.spec import processors
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window
from foretell.spec.nodes import Shape
from foretell.spec.noise import Stream
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
class Scoring:
    """From a network's logits to candidates.

    Args:
        vocabulary: what the network's tokens are for the target.
        draws: under `rejection` candidates are drawn from their own stream and their law is handed over; otherwise
            they share the target's noise.
    """

    vocabulary: Vocabulary
    draws: bool

    def scores(
        self, logits: Tensor, window: Window, positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Scores whose order is the order of the candidates, and the law they are drawn from, if they are.

        Args:
            logits: [B, m, Vd], raw.
            positions: [B, m or 1] int64, of the tokens decided.

        Returns:
            ([B, m, Vd], [B, m, V] or None).
        """
        logits = self.vocabulary.mask(logits.float())
        logits = processors.scale_and_filter(logits, window.law, window.mode)
        law = self.vocabulary.law_over_target(torch.softmax(logits, -1)) if self.draws else None
        if window.mode.sampled:
            stream = Stream.DRAFT if self.draws else Stream.SAMPLE
            positions = positions.expand(-1, logits.shape[1])
            noise_ids = self.vocabulary.noise_ids
            logits = processors.perturb(logits, window.law, positions, stream, noise_ids)
        return logits, law


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
        entries = window.start.unsqueeze(1) + place
        positions = entries - self.entries.rotary_shift
        valid = (place < window.count.unsqueeze(1)) & window.live.unsqueeze(1)
        meta = TreeRows(
            positions=positions,
            kv_slots=flat_slots(window.blocks, entries, self._block_size, valid),
            blocks=window.blocks,
            context=window.start,
            bits=((2 << place) - 1).expand_as(positions),
            tail_positions=positions,
            keys=window.keys,
            first_key=self.entries.first_key,
        )
        hidden = self.net.ingest(window.tokens, window.features, meta, self._kv)
        last = (window.count - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
        return hidden.gather(1, last)

    def run_nodes(
        self, tokens: Tensor, above: Tensor, window: Window, place: Tensor, shape: Shape
    ) -> Tensor:
        """Run drafted nodes that will have children.

        Args:
            tokens: [B, m] int64.
            above: [B, m, H], the network's output at each one's parent.
            place: [m] int64, the nodes' places in `shape`.
            shape: the tree the nodes are part of, as far as it is grown.
        """
        root = window.length.unsqueeze(1) - 1
        indices = root + place
        live = window.live.unsqueeze(1).expand_as(indices)
        shift = self.entries.rotary_shift
        meta = TreeRows(
            positions=root + shape.depths[:, place] - shift,
            kv_slots=flat_slots(window.blocks, indices, self._block_size, live),
            blocks=window.blocks,
            context=root.squeeze(1),
            bits=shape.bits[:, place].expand_as(indices),
            tail_positions=root + shape.depths - shift,
            keys=window.keys,
            first_key=self.entries.first_key,
        )
        return self.net.extend(tokens, above, meta, self._kv)

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Run the window, then one small pass per level of the static tree."""
        hidden = self.run_window(window)
        rows, nodes = window.start.shape[0], shape.tree.nodes
        tokens = torch.full((rows, nodes), -1, dtype=torch.int64, device=hidden.device)
        laws: list[Tensor] = []
        root = window.length.unsqueeze(1) - 1
        for level in shape.levels:
            logits = self.net.logits(hidden)
            scores, law = self.scoring.scores(logits, window, root + level.depth)
            ranked = scores.topk(level.width, dim=-1).indices  # [B, m, width]
            # Drawn siblings are tried in the order they were drawn, without a gap: else their law is another one.
            ranks = level.ranks if law is None else level.ordinals
            chosen = ranked[:, level.parents, ranks]
            tokens[:, level.nodes] = self.scoring.vocabulary.to_target(chosen)
            if law is not None:
                laws.append(law[:, level.parents])
            if level.expanded.shape[0]:
                above, place = hidden[:, level.above], level.expanded
                hidden = self.run_nodes(tokens[:, place], above, window, place, shape)
        return Draft(tokens=tokens, probs=node_laws(laws, shape) if laws else None)


def node_laws(laws: Sequence[Tensor], shape: Shape) -> Tensor:
    """[B, N, V] in the order of the nodes, from one [B, n, V] per level; the root's row is no law and is zero."""
    by_level = torch.cat(tuple(laws), dim=1)
    order = torch.cat([level.nodes for level in shape.levels])
    result = by_level.new_zeros(by_level.shape[0], shape.tree.nodes, by_level.shape[-1])
    return result.index_copy(1, order, by_level)


class DraftModelDrafter:
    """Drafts with a language model.

    Args:
        model: the draft model.
        vocabulary: how its tokens and the target's correspond.
        acceptance: under `match` drafts share the target's noise; under `rejection` they are drawn from their own
            stream and their law is handed over.
    """

    features: tuple[int, ...] = ()

    def __init__(self, model: Decoder, vocabulary: Vocabulary, acceptance: Acceptance) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.draws = acceptance is Acceptance.REJECTION
        layers, heads, head_dim = model.kv_shape
        self.kv: KVSpec | None = KVSpec(layers, heads, head_dim)
        net = _LanguageModel(model, vocabulary)
        self._procedure = Autoregressive(net, Scoring(vocabulary, self.draws), Entries())

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
