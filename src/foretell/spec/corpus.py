"""Corpus: texts of finished requests on the device, found again by how they go on (the global half of suffix decoding).

A ring of tokens, and beside it hash chains as in LZ77: `heads` holds, per context length and hash, the latest place
where such a context ends, `previous` the one before it. A look-up is a few gathers of fixed shape, so it runs inside
a step; texts come in between steps, copied without waiting. Whatever a hash says is compared token by token before it
is believed. Memory is fixed when the corpus is made: new texts overwrite the oldest.

Not a place where a draft is chosen: that is suffix.py. Invariant: entries below `oldest` are never used.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

SEPARATOR = -1  # between texts; equals no token
_CHAIN = 8  # places followed per context length, the latest first
_PRIME = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed 64-bit word


class Corpus:
    """The ring.

    Args:
        tokens: room, rounded up to a power of two.
        texts: most texts kept; the oldest go first.
        lengths: context lengths that are hashed, ascending.
        depth: most tokens of a context that are compared.
    """

    def __init__(
        self, tokens: int, texts: int, lengths: tuple[int, ...], depth: int, device: torch.device
    ) -> None:
        self.size = 1 << max(tokens - 1, 1).bit_length()
        self.texts, self.lengths, self.depth = texts, lengths, depth
        self.written = 0  # tokens ever written: the serial number of the next
        self._starts: deque[int] = deque()  # serial numbers of the first tokens of the texts kept
        self._ring = torch.full((self.size,), SEPARATOR, dtype=torch.int32, device=device)
        # One bucket more than hashes: a place to write what is not wanted.
        self._heads = torch.full((len(lengths), self.size + 1), -1, device=device)
        self._previous = torch.full((len(lengths), self.size), -1, device=device)
        self._oldest = torch.zeros((), dtype=torch.int64, device=device)
        self._weights = _powers(depth, device)
        self._ends = torch.tensor(lengths, device=device) - 1

    @property
    def kept(self) -> int:
        """Texts it holds."""
        return len(self._starts)

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return sum(t.nbytes for t in (self._ring, self._heads, self._previous))

    @property
    def candidates(self) -> int:
        """Places that a look-up returns."""
        return len(self.lengths) * _CHAIN

    def learn(self, text: Tensor) -> None:
        """Add a text ([R] integers, on any device); of one beyond half the ring only the end. Never waits."""
        text = text[-(self.size // 2) + 1 :].to(torch.int32)
        start, count = self.written, text.shape[0]
        if self.texts == 0 or count == 0:
            return
        if text.device != self._ring.device:
            text = text.pin_memory().to(self._ring.device, non_blocking=True)
        serials = torch.arange(start, start + count + 1, device=self._ring.device)
        places = serials & (self.size - 1)
        self._ring[places] = torch.nn.functional.pad(text, (0, 1), value=SEPARATOR)
        self.written = start + count + 1
        self._evict(start)
        padded = torch.nn.functional.pad(text.to(torch.int64), (self.depth - 1, 0))
        hashes = self._hashes(padded.unfold(0, self.depth, 1).flip(1))  # [R, M]
        for row, length in enumerate(self.lengths):
            if length <= count:
                self._link(row, hashes[length - 1 :, row], serials[length - 1 : count])

    def _evict(self, start: int) -> None:
        self._starts.append(start)
        while len(self._starts) > self.texts or self._starts[0] < self.written - self.size:
            self._starts.popleft()
        self._oldest.fill_(self._starts[0])

    def _link(self, row: int, buckets: Tensor, serials: Tensor) -> None:
        """Chain the places of one context length; a bucket that comes twice in a text is chained through itself."""
        buckets, order = torch.sort(buckets, stable=True)
        serials = serials[order]
        again = torch.nn.functional.pad(buckets[1:] == buckets[:-1], (1, 0))
        before = torch.where(again, torch.roll(serials, 1), self._heads[row, buckets])
        self._previous[row, serials & (self.size - 1)] = before
        last = torch.nn.functional.pad(~again[1:], (0, 1), value=True)
        self._heads[row, torch.where(last, buckets, self.size)] = serials

    def _hashes(self, suffixes: Tensor) -> Tensor:
        """[..., depth] tokens, the latest first → [..., M] buckets, one per context length."""
        sums = ((suffixes + 1) * self._weights).cumsum(-1)[..., self._ends]
        mixed = (sums ^ (sums >> 31)) * _PRIME
        return (mixed >> 24) & (self.size - 1)

    def look_up(self, suffixes: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """Where texts like these went on.

        Args:
            suffixes: [B, depth] int64, the last tokens of each text, the latest first; negative = before its start.
            ahead: how many tokens of each continuation to return.

        Returns:
            (continuations [B, C, ahead] int64, negative where a text ended; match length [B, C] int64, 0 = none).
        """
        rows = suffixes.shape[0]
        chain = torch.arange(len(self.lengths), device=suffixes.device)
        place = self._heads[chain, self._hashes(suffixes)]  # [B, M]
        found = [place]
        for _ in range(_CHAIN - 1):
            place = torch.where(
                place >= self._oldest, self._previous[chain, place & (self.size - 1)], -1
            )
            found.append(place)
        ends = torch.stack(found, dim=2).view(rows, -1)  # [B, C]
        back = ends.unsqueeze(2) - torch.arange(self.depth, device=ends.device)
        same = self._ring[back & (self.size - 1)] == suffixes.unsqueeze(1)
        same = same & (back >= self._oldest) & (suffixes >= 0).unsqueeze(1)
        matched = same.to(torch.int64).cumprod(-1).sum(-1)
        matched = torch.where(_repeats(ends), 0, matched)
        after = ends.unsqueeze(2) + torch.arange(1, ahead + 1, device=ends.device)
        return self._ring[after & (self.size - 1)].to(torch.int64), matched


def _repeats(places: Tensor) -> Tensor:
    """[B, C] bool: the same place stands further to the left."""
    count = torch.arange(places.shape[1], device=places.device)
    earlier = count.unsqueeze(1) > count
    return ((places.unsqueeze(2) == places.unsqueeze(1)) & earlier).any(-1)


def _powers(count: int, device: torch.device) -> Tensor:
    """[count] powers of an odd number, modulo 2^64, as signed words."""
    values, value = [], 1
    for _ in range(count):
        value = value * 6364136223846793005 % (1 << 64)
        values.append(value - (1 << 64) if value >> 63 else value)
    return torch.tensor(values, dtype=torch.int64, device=device)
