"""One drafter for models that draft token after token: run the newly committed tokens, then grow the tree by levels.

`DraftModel` is a smaller language model, possibly of another vocabulary. Its KV lies in the same blocks as the
target's: the entry of the token at position i is entry i, so it depends on tokens up to i only. The tree's own nodes
are written at entries `length - 1 + node` and are never kept: the next window runs the accepted tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.ops.meta import LayerKV, TreeRows, flat_slots
from foretell.spec import processors
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window
from foretell.spec.nodes import Shape
from foretell.spec.noise import Stream
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary


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
        self._layers: Sequence[LayerKV] = ()
        self._block_size = 0

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Receive the KV behind the target's block ids."""
        assert kv is not None, "a draft model needs KV"
        self._layers, self._block_size = kv.layers, kv.block_size

    def observe(self, rows: PromptRows) -> None:
        """Run prompt tokens for their KV."""
        self.model(self.vocabulary.to_draft(rows.tokens), rows.meta, self._layers)

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Run the window, then one small pass per level of the tree."""
        hidden = self._run_window(window)
        if shape.tree.nodes == 1:
            return Draft(tokens=torch.full_like(window.start.unsqueeze(1), -1))
        last = (window.count - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
        return self._grow(hidden.gather(1, last), window, shape)

    def _run_window(self, window: Window) -> Tensor:
        """[B, W, H]; rows at and after `count` are junk and leave no trace."""
        place = torch.arange(window.tokens.shape[1], device=window.tokens.device)
        positions = window.start.unsqueeze(1) + place
        valid = (place < window.count.unsqueeze(1)) & window.live.unsqueeze(1)
        meta = TreeRows(
            positions=positions,
            kv_slots=flat_slots(window.blocks, positions, self._block_size, valid),
            blocks=window.blocks,
            context=window.start,
            bits=((2 << place) - 1).expand_as(positions),
            tail_positions=positions,
            keys=window.keys,
        )
        hidden, _ = self.model(self.vocabulary.to_draft(window.tokens), meta, self._layers)
        return hidden

    def _grow(self, hidden: Tensor, window: Window, shape: Shape) -> Draft:
        """Fill the tree level by level from the hidden states of the level above ([B, m, H])."""
        rows = window.start.shape[0]
        tokens = torch.full((rows, shape.tree.nodes), -1, dtype=torch.int64, device=hidden.device)
        laws: list[Tensor] = []
        root = window.length.unsqueeze(1) - 1
        for level in shape.levels:
            decided = root + level.depth  # position of the level's own tokens
            scores, law = self._scores(hidden, window, decided)
            ranked = scores.topk(level.width, dim=-1).indices  # [B, m, width]
            chosen = ranked[:, level.parents, level.ranks]
            tokens[:, level.nodes] = self.vocabulary.to_target(chosen)
            if law is not None:
                laws.append(law[:, level.parents])
            if level.expanded.shape[0]:
                hidden = self._run_level(tokens, window, shape, level.expanded)
        return Draft(tokens=tokens, probs=self._node_laws(laws, shape) if laws else None)

    def _scores(
        self, hidden: Tensor, window: Window, positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Scores whose order is the order of the candidates, and under `rejection` the law they are drawn from."""
        logits = self.vocabulary.mask(self.model.logits(hidden).float())
        logits = processors.scale_and_filter(logits, window.law, window.mode)
        law = self.vocabulary.law_over_target(torch.softmax(logits, -1)) if self.draws else None
        if window.mode.sampled:
            stream = Stream.DRAFT if self.draws else Stream.SAMPLE
            positions = positions.expand(-1, logits.shape[1])
            logits = processors.perturb(
                logits, window.law, positions, stream, self.vocabulary.noise_ids
            )
        return logits, law

    def _run_level(self, tokens: Tensor, window: Window, shape: Shape, nodes: Tensor) -> Tensor:
        """[B, m, H] hidden states of a level's nodes that have children."""
        root = window.length.unsqueeze(1) - 1
        indices = root + nodes
        live = window.live.unsqueeze(1).expand_as(indices)
        meta = TreeRows(
            positions=root + shape.depths[:, nodes],
            kv_slots=flat_slots(window.blocks, indices, self._block_size, live),
            blocks=window.blocks,
            context=root.squeeze(1),
            bits=shape.bits[:, nodes].expand_as(indices),
            tail_positions=root + shape.depths,
            keys=window.keys,
        )
        hidden, _ = self.model(self.vocabulary.to_draft(tokens[:, nodes]), meta, self._layers)
        return hidden

    def _node_laws(self, laws: list[Tensor], shape: Shape) -> Tensor:
        """[B, N, V] in the order of the nodes; the root's row is not a law and is zero."""
        by_level = torch.cat(laws, dim=1)
        order = torch.cat([level.nodes for level in shape.levels])
        result = by_level.new_zeros(by_level.shape[0], shape.tree.nodes, by_level.shape[-1])
        return result.index_copy(1, order, by_level)
