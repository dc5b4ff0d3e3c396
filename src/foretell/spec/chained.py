"""Chained drafters: a model-free drafter where it fires, a trained one elsewhere, decided row by row on the device.

The trained drafter always runs: it must ingest every window, or its KV would fall behind, and a step has no branches.
So a chain costs what its second drafter costs, and gains where copied text is longer than what heads foresee.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.spec.drafter import Draft, Drafter, KVSpec, KVView, PromptRows, Window
from foretell.spec.nodes import Shape


class ChainedDrafter:
    """Drafts with `free` in the rows where it has something to say, with `trained` in the others.

    Args:
        free: needs no KV and no features, and fills the tree's spine alone.
        trained: any drafter.
        grows: `trained` brings its own parents.
    """

    def __init__(self, free: Drafter, trained: Drafter, grows: bool = False) -> None:
        assert free.kv is None, "the first drafter of a chain has no KV"
        assert not free.features, "the first drafter of a chain reads no features"
        self.free, self.trained, self.grows = free, trained, grows
        self.kv: KVSpec | None = trained.kv
        self.features: tuple[int, ...] = trained.features

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Both are bound; the KV is the second one's."""
        self.free.bind(target, None)
        self.trained.bind(target, kv)

    def observe(self, rows: PromptRows) -> None:
        """Both ingest."""
        self.free.observe(rows)
        self.trained.observe(rows)

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Both draft; a row is the first one's if that fills the first node of the spine."""
        theirs = self.trained.propose(window, shape)
        if True not in shape.tree.spine[1:]:
            return theirs
        ours = self.free.propose(window, shape).tokens
        first = shape.tree.spine.index(True, 1)
        fires = (ours[:, first] >= 0).unsqueeze(1)  # [B, 1]
        probs = theirs.probs
        if probs is not None:
            # A point mass says so; what is drawn beside it would follow a law that it no longer has.
            point = torch.zeros_like(probs).scatter_(2, ours.clamp(min=0).unsqueeze(2), 1.0)
            probs = torch.where(fires.unsqueeze(2), point, probs)
        elif not self.grows:
            ours = _beside(ours, theirs.tokens, shape)
        return Draft(
            tokens=torch.where(fires, ours, theirs.tokens),
            parents=None
            if theirs.parents is None
            else torch.where(fires, shape.parents, theirs.parents),
            probs=probs,
        )


def _beside(ours: Tensor, theirs: Tensor, shape: Shape) -> Tensor:
    """The first drafter's spine with the second one's other nodes: their places in the tree are paid for anyway."""
    return torch.where(shape.spine & (shape.depths > 0), ours, theirs)
