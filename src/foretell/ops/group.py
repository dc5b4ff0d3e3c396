"""The ranks that share a model (tensor parallel): who they are, and what they say to each other inside a step.

Sums, gathers and shared values run in the device's stream (NCCL on GPUs, gloo on CPUs), so a captured graph holds them;
none waits for the device. What host sides agree on goes over gloo. With one rank nothing is said at all.

Invariant: every rank calls the same operations in the same order. Starting the ranks is foretell.parallel's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """One rank's view of the ranks.

    Args:
        rank: 0 is the engine's own process.
        size: how many there are.
        over: torch's process group; None = the default one.
    """

    rank: int = 0
    size: int = 1
    over: Any = None

    @property
    def alone(self) -> bool:
        """Nothing is split."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """This rank adds what is to be added once."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in x's memory; all ranks get the same bits."""
        if self.size > 1:
            dist.all_reduce(x, group=self.over)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape], every rank's x."""
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(out.view(-1), x.view(-1), group=self.over)
        return out

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's x, for every rank: what could differ by a rounding must not."""
        if self.size > 1:
            x = x.contiguous()
            dist.broadcast(x, 0, group=self.over)
        return x

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of every rank's value, for each place; between hosts, outside any step."""
        if self.size == 1:
            return list(values)
        least = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.over)
        return [int(value) for value in least.tolist()]


ALONE = Group()


@dataclass(frozen=True, slots=True)
class Rows:
    """One rank's rows of something that has a row per token: an embedding, a head.

    All ranks but the last ones have `each` rows; a gather pads what is missing.
    """

    group: Group
    total: int
    each: int

    @property
    def start(self) -> int:
        """The token of the first row."""
        return min(self.group.rank * self.each, self.total)

    @property
    def count(self) -> int:
        """How many rows this rank has."""
        return min(self.each, self.total - self.start)

    @property
    def stop(self) -> int:
        """The token after the last row."""
        return self.start + self.count

    def join(self, x: Tensor) -> Tensor:
        """[..., count] of every rank → [..., total]."""
        if self.group.alone:
            return x
        missing = self.each - self.count
        padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
        parts = self.group.gather(padded)  # [size, ..., each]
        whole = parts.movedim(0, -2).reshape(*x.shape[:-1], -1)
        return whole[..., : self.total]

    def best(self, scores: Tensor) -> Tensor:
        """[...] int64, the token with the greatest score over all ranks; -1 where a score is not a number.

        Args:
            scores: [..., count] float, of this rank's tokens; -inf = never.

        Ranks exchange a (score, token) pair for each row, 16 bytes, whatever the vocabulary. Ties go to the lowest id.
        """
        value, index = scores.max(dim=-1)  # a NaN wins
        return self.best_pair(value, index + self.start)

    def best_pair(self, value: Tensor, token: Tensor) -> Tensor:
        """`best`, from the greatest score ([...]) of this rank and its token ([...] int64)."""
        pair = torch.stack((value.to(torch.float64), token.to(torch.float64)))
        values, tokens = self.group.gather(pair).unbind(1)  # [size, ...]
        best = values.amax(dim=0)
        lowest = torch.where(values == best, tokens, float(self.total)).amin(dim=0)
        return torch.where(torch.isfinite(best), lowest, -1.0).to(torch.int64)


def rows_of(total: int, group: Group) -> Rows:
    """How `total` rows are dealt out: in equal parts, large ones in whole tiles of 64 rows."""
    each = -(-total // group.size)
    if not group.alone and each >= 4096:
        each = -(-each // 64) * 64
    return Rows(group, total, each)
