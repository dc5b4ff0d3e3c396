"""Suffix decoding: what followed the longest earlier context like this one, in the request's own text and in past
outputs (SuffixDecoding, arXiv 2411.04975). No weights, no KV.

Candidates are the places whose context agrees with the end of the text for the most tokens; the draft is the
continuation that most of them share, cut where too few do. The own text is scanned as it is (it is in the slots), past
outputs lie in a Corpus. Both look-ups have fixed shapes and read nothing back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.spec.corpus import Corpus
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window, nothing
from foretell.spec.nodes import Shape

_OWN = 8  # places in the own text that are looked at


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """How far to look, and how much to draft.

    Args:
        shortest: fewest tokens that must agree.
        depth: most tokens that are compared.
        factor: drafted tokens are at most the tokens that agree times this.
        probability: least share of the candidates that must go on as the draft does.
        texts: past outputs kept; 0 = the own text alone.
        tokens: room for them.
    """

    shortest: int = 3
    depth: int = 24
    factor: float = 1.0
    probability: float = 0.1
    texts: int = 10_000
    tokens: int = 1 << 18

    @property
    def lengths(self) -> tuple[int, ...]:
        """Context lengths that are hashed: the shortest, doubled as long as it is not over `depth`."""
        lengths = [min(self.shortest, self.depth)]
        while 2 * lengths[-1] <= self.depth:
            lengths.append(2 * lengths[-1])
        return tuple(lengths)


class SuffixDrafter:
    """Drafts a chain along the tree's spine."""

    kv: KVSpec | None = None
    features: tuple[int, ...] = ()

    def __init__(self, limits: SuffixLimits) -> None:
        self.limits = limits
        self.corpus: Corpus | None = None

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Make room for past outputs."""
        limits = self.limits
        if limits.texts:
            self.corpus = Corpus(
                limits.tokens, limits.texts, limits.lengths, limits.depth, target.device
            )

    def observe(self, rows: PromptRows) -> None:
        """Nothing to ingest: the text is in the slots."""

    def learn(self, text: Tensor) -> None:
        """Remember the text of a request that ended; called between steps."""
        if self.corpus is not None:
            self.corpus.learn(text)

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Fill the tree's spine with the likeliest continuation; other nodes stay empty."""
        ahead = shape.tree.depth
        if ahead == 0:
            return nothing(window.start.shape[0], shape)
        text = window.text[window.slots, : window.keys]
        ends = last_tokens(text, window.length, self.limits.depth)
        runs, matched = self._own(text, window.length, ends, ahead)
        if self.corpus is not None:
            others, lengths = self.corpus.look_up(ends, ahead)
            runs, matched = torch.cat((runs, others), 1), torch.cat((matched, lengths), 1)
        least = window.least_match if window.mode.lookups else None
        drafted = choose(runs, matched, self.limits, least)
        by_depth = torch.nn.functional.pad(drafted, (1, 0), value=-1)  # [B, D + 1]
        tokens = by_depth.gather(1, shape.depths.expand(by_depth.shape[0], -1))
        return Draft(tokens=torch.where(shape.spine, tokens, -1))

    def _own(self, text: Tensor, length: Tensor, ends: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """As Corpus.look_up, in the text itself: of the longest matches the latest ones."""
        width = text.shape[1]
        place = torch.arange(width, device=text.device)
        matching = (place < length.unsqueeze(1) - 1).expand(text.shape[0], -1)
        score = torch.zeros_like(matching, dtype=torch.int64)
        # Enough to rank places; those that are taken are compared to the full depth.
        for size in range(min(2 * self.limits.shortest, self.limits.depth)):
            there = text if size == 0 else torch.nn.functional.pad(text, (size, 0), value=-1)
            matching = matching & (there[:, :width] == ends[:, size : size + 1])
            score = score + matching
        best = (score * width + place).topk(min(_OWN, width), dim=1).indices  # [B, C]
        back = best.unsqueeze(2) - torch.arange(self.limits.depth, device=text.device)
        same = _at(text, back) == ends.unsqueeze(1)
        same = same & (back >= 0) & (ends >= 0).unsqueeze(1)
        same = same & (best < length.unsqueeze(1) - 1).unsqueeze(2)
        matched = same.to(torch.int64).cumprod(-1).sum(-1)
        after = best.unsqueeze(2) + torch.arange(1, ahead + 1, device=text.device)
        known = after < length.view(-1, 1, 1)
        return torch.where(known, _at(text, after), -1), matched


def last_tokens(text: Tensor, length: Tensor, count: int) -> Tensor:
    """[B, count] int64, the last tokens of each text, the latest first; -2 before its start."""
    index = length.unsqueeze(1) - 1 - torch.arange(count, device=text.device)
    tokens = text.gather(1, index.clamp(min=0)).to(torch.int64)
    return torch.where(index >= 0, tokens, -2)


def choose(
    runs: Tensor, matched: Tensor, limits: SuffixLimits, least: Tensor | None = None
) -> Tensor:
    """The continuation to draft.

    Args:
        runs: [B, C, D] int64, continuations; negative = none. Of equals the first one is preferred.
        matched: [B, C] int64, tokens of context that agree.
        least: [B] int64, how many must, where a row wants more than the limits say.

    Returns:
        [B, D] int64, -1 where nothing is drafted.

    Of the candidates with the longest match, each token of each continuation is as probable as the share of
    candidates that go the same way so far; the continuation with the greatest sum, its expected accepted length, wins.
    """
    longest = matched.amax(1, keepdim=True)  # [B, 1]
    alive = (matched == longest) & (longest >= min(limits.shortest, limits.depth))
    if least is not None:
        alive = alive & (longest >= least.clamp(max=limits.depth).unsqueeze(1))
    pair = (alive.unsqueeze(2) & alive.unsqueeze(1)).unsqueeze(3)  # [B, C, C, 1]
    same = (runs.unsqueeze(2) == runs.unsqueeze(1)) & (runs >= 0).unsqueeze(2) & pair
    agree = same.to(torch.int64).cumprod(3).sum(2)  # [B, C, D]
    order = torch.arange(runs.shape[1], device=runs.device)
    score = agree.sum(2) * runs.shape[1] - order
    winner = score.argmax(1).view(-1, 1, 1).expand(-1, 1, runs.shape[2])
    tokens, votes = runs.gather(1, winner).squeeze(1), agree.gather(1, winner).squeeze(1)
    share = votes / alive.sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(1, runs.shape[2] + 1, device=runs.device)
    kept = (votes > 0) & (share >= limits.probability) & (place <= longest * limits.factor)
    return torch.where(kept.to(torch.int64).cumprod(1) > 0, tokens, -1)


def _at(text: Tensor, index: Tensor) -> Tensor:
    """[B, C, n] int64 entries of text [B, L] at an index that may be out of range."""
    flat = index.clamp(0, text.shape[1] - 1).flatten(1)
    return text.gather(1, flat).view(index.shape).to(torch.int64)
