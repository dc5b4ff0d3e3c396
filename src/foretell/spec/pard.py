"""PARD: a language model that drafts all tokens in one pass, over mask tokens (arXiv 2504.18583, section 3).

Behind the pending token stand D - 1 copies of a token that the model was trained to read as "and then?"; the pending
token's row and the masks' rows give the D levels of the draft. Masks lie in scratch entries and are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.ops.meta import LayerKV, TreeRows, flat_slots
from foretell.spec.candidates import Choice, Scoring, choice_for, fill_depths
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window, nothing
from foretell.spec.nodes import Shape
from foretell.spec.tree import MAX_NODES, Tree
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary


class PardDrafter:
    """Drafts with a parallel draft model.

    Args:
        model: the draft model.
        mask: its mask token, a draft id.
        vocabulary, acceptance: as for DraftModelDrafter.
        draws: under `rejection` hand over the law of drawn candidates.
    """

    features: tuple[int, ...] = ()

    def __init__(
        self,
        model: Decoder,
        mask: int,
        vocabulary: Vocabulary,
        acceptance: Acceptance,
        draws: bool = True,
    ) -> None:
        if not 0 <= mask < model.config.vocab_size:
            raise ValueError(
                f"pard_token={mask} is not a token of the draft model, which has {model.config.vocab_size}; correct "
                "its config"
            )
        self.model, self.mask = model, mask
        self.scoring = Scoring(vocabulary, choice_for(acceptance, draws))
        self.draws = self.scoring.choice is Choice.DRAWN
        layers, heads, head_dim = model.kv_shape
        self.kv: KVSpec | None = KVSpec(layers, heads, head_dim)
        self._layers: Sequence[LayerKV] = ()
        self._block_size = 0

    def check_tree(self, tree: Tree) -> None:
        """Refuse a tree that one pass cannot fill.

        Raises:
            ValueError: window and masks together exceed one ancestor set.
        """
        if 2 * tree.depth > MAX_NODES:
            raise ValueError(
                f"tree: a parallel draft model drafts at most {MAX_NODES // 2} levels in one pass, got {tree.depth}; "
                "lower num_speculative_tokens"
            )

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Receive the KV behind the target's block ids."""
        assert kv is not None, "a draft model needs KV"
        self._layers, self._block_size = kv.layers, kv.block_size

    def observe(self, rows: PromptRows) -> None:
        """Run prompt tokens for their KV."""
        self.model(self.scoring.vocabulary.to_draft(rows.tokens), rows.meta, self._layers)

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Window and masks in one pass."""
        masks = max(shape.tree.depth - 1, 0)
        hidden = self._run(window, masks)
        if shape.tree.depth == 0:
            return nothing(window.tokens.shape[0], shape)
        last = (window.count - 1).clamp(min=0).unsqueeze(1)
        width = window.tokens.shape[1]
        behind = torch.arange(width, width + masks, device=last.device).expand(last.shape[0], -1)
        rows = torch.cat((last, behind), dim=1).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        return fill_depths(self.scoring, window, shape, self.model.logits(hidden.gather(1, rows)))

    def _run(self, window: Window, masks: int) -> Tensor:
        """[B, W + masks, H]; window rows at and after `count` are junk and leave no trace."""
        width = window.tokens.shape[1]
        place = torch.arange(width, device=window.tokens.device)
        ahead = torch.arange(masks, device=window.tokens.device)
        valid = (place < window.count.unsqueeze(1)) & window.live.unsqueeze(1)
        # Which entry, counted from the window's first, each row is: masks follow the last valid row.
        entry = torch.cat((place.expand_as(valid), window.count.unsqueeze(1) + ahead), dim=1)
        valid = torch.cat((valid, window.live.unsqueeze(1).expand(-1, masks)), dim=1)
        positions = window.start.unsqueeze(1) + entry
        tail = torch.arange(width + masks, device=place.device)
        tokens = self.scoring.vocabulary.to_draft(window.tokens)
        filler = torch.full_like(tokens[:, :1], self.mask).expand(-1, masks)
        meta = TreeRows(
            positions=positions,
            kv_slots=flat_slots(window.blocks, positions, self._block_size, valid),
            blocks=window.blocks,
            context=window.start,
            bits=(2 << entry) - 1,
            tail_positions=window.start.unsqueeze(1) + tail,
            keys=window.keys,
        )
        hidden: Tensor = self.model(torch.cat((tokens, filler), dim=1), meta, self._layers)[0]
        return hidden
