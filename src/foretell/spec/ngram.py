"""NgramDrafter: what followed the last time these tokens stood here (prompt lookup decoding).

The longest suffix of the text, between `prompt_lookup_min` and `prompt_lookup_max` tokens, is looked up in the text
itself; of several places the most recent one wins, and the tokens after it are the draft. No weights, no state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
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
        text = window.text[window.slots, : window.keys]
        start = suffix_match(text, window.length, self.shortest, self.longest)
        index = start.unsqueeze(1) + shape.depths - 1
        known = (
            (start >= 0).unsqueeze(1) & (index < window.length.unsqueeze(1)) & (shape.depths > 0)
        )
        tokens = text.gather(1, index.clamp(0, text.shape[1] - 1)).to(torch.int64)
        return Draft(tokens=torch.where(known & shape.spine, tokens, -1))


def suffix_match(text: Tensor, length: Tensor, shortest: int, longest: int) -> Tensor:
    """Where the text goes on after the most recent earlier occurrence of its longest matching suffix.

    Args:
        text: [B, L] int32, committed tokens.
        length: [B] int64.
        shortest, longest: bounds on the number of tokens that must match.

    Returns:
        [B] int64, index of the token after the match; -1 where nothing matches.

    Example: for "a b c a b" and 1..3 the suffix "a b" matches at 0, so the result is 2 (the token "c").
    """
    rows, width = text.shape
    place = torch.arange(width, device=text.device)
    best = torch.full((rows,), -1, dtype=torch.int64, device=text.device)
    matching = (place < length.unsqueeze(1) - 1).expand(
        rows, -1
    )  # ends of candidate matches, the suffix itself apart
    for size in range(1, longest + 1):
        suffix = text.gather(1, (length - size).clamp(min=0).unsqueeze(1))
        shifted = (
            text if size == 1 else torch.nn.functional.pad(text, (size - 1, 0), value=-1)[:, :width]
        )
        matching = matching & (shifted == suffix) & (length >= size).unsqueeze(1)
        if size >= shortest:
            last = torch.where(matching, place, -1).amax(-1)
            best = torch.where(last >= 0, last + 1, best)
    return best
