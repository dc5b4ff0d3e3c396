"""NgramDrafter: what followed the last time these tokens stood here (prompt lookup decoding).

The longest suffix of the text, between `prompt_lookup_min` and `prompt_lookup_max` tokens, is looked up in the text
itself; of several places the most recent one wins, and the tokens after it are the draft. No weights, no state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.ops.reference.ngram import suffix_match
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window
from foretell.spec.nodes import Shape


class NgramDrafter:
    """Drafts a chain by suffix match over the committed text.

    Args:
        shortest: fewest tokens that must match.
        longest: most tokens compared.
    """

    kv: KVSpec | None = None
    features: tuple[int, ...] = ()

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Nothing to bind."""

    def observe(self, rows: PromptRows) -> None:
        """Nothing to ingest: the text is in the slots."""

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Fill the tree's spine with the tokens after the match; other nodes stay empty."""
        tokens = window.ops.ngram(
            window.text,
            window.slots,
            window.length,
            window.keys,
            shape.depths,
            shape.spine,
            self.shortest,
            self.longest,
        )
        if window.mode.lookups and window.least_match is not None:
            wanted = window.least_match.clamp(max=self.longest)
            tokens = torch.where((self._matched(window) >= wanted).unsqueeze(1), tokens, -1)
        return Draft(tokens=tokens)

    def _matched(self, window: Window) -> Tensor:
        """[B] how many tokens the match has."""
        text = window.text[window.slots, : window.keys]
        start = suffix_match(text, window.length, self.shortest, self.longest)
        back = torch.arange(self.longest, device=text.device)
        there = start.unsqueeze(1) - 1 - back
        here = (window.length.unsqueeze(1) - 1 - back).clamp(min=0)
        same = text.gather(1, there.clamp(min=0)) == text.gather(1, here)
        return (same & (there >= 0)).to(torch.int64).cumprod(1).sum(1)
