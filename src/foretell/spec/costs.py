"""StepCosts: seconds of a step by (rows, tree), measured on this device with this model. Torch-free plain numbers.

A step of a tree is: draft it, then verify it. Cells are kept by bucket of rows. What was not measured is estimated from
what was (`seconds`), so that a controller, a tuner and a simulation ask the same question and get the same answer. It
is not about tokens: how many a step emits is acceptance.py's.

Invariant: every estimate is positive and finite once anything was measured, and a measured cell is returned as it is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, Self

from foretell.spec.tree import Tree

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
KEPT = 7  # newest samples a cell's median is of: one hiccup moves nothing, a drift moves it in four steps


def bucket_of(rows: int) -> int:
    """The bucket of so many rows: the smallest one that holds them; above the largest, a multiple of it."""
    assert rows > 0, rows
    place = bisect_left(BUCKETS, rows)
    return BUCKETS[place] if place < len(BUCKETS) else -(-rows // BUCKETS[-1]) * BUCKETS[-1]


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured of one (bucket, tree).

    Args:
        samples: seconds of the newest steps, drafting included.
        count: how many there were in all.
        draft: seconds of the drafting among them, where it was timed apart; 0 = not known.
    """

    samples: tuple[float, ...] = ()
    count: int = 0
    draft: float = 0.0

    @property
    def seconds(self) -> float:
        """Median of the newest steps."""
        return median(self.samples)

    def plus(self, seconds: float, draft: float) -> Cell:
        """With one more step."""
        known = draft if self.draft == 0.0 else self.draft + (draft - self.draft) / KEPT
        return Cell((*self.samples, seconds)[-KEPT:], self.count + 1, known)

    def scaled(self, factor: float) -> Cell:
        """On a device that is so many times slower."""
        return replace(
            self,
            samples=tuple(sample * factor for sample in self.samples),
            draft=self.draft * factor,
        )


@dataclass(slots=True)
class StepCosts:
    """The table. `trees` are the engine's own, in its order; one of them has a single node (plain decoding)."""

    trees: tuple[Tree, ...]
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)  # by (bucket, tree)

    @property
    def plain(self) -> int:
        """The tree with the fewest nodes."""
        return min(range(len(self.trees)), key=lambda tree: self.trees[tree].nodes)

    def add(self, rows: int, tree: int, seconds: float, draft: float = 0.0) -> None:
        """One step was measured.

        Args:
            rows: requests that decoded.
            seconds: of the whole step, drafting included.
            draft: of the drafting alone, where that is known.
        """
        assert 0 <= draft <= seconds != 0, (rows, tree, seconds, draft)
        key = bucket_of(rows), tree
        self.cells[key] = self.cells.get(key, Cell()).plus(seconds, draft)

    def measured(self, rows: int, tree: int) -> int:
        """Steps measured of the tree in the bucket of `rows`."""
        cell = self.cells.get((bucket_of(rows), tree))
        return 0 if cell is None else cell.count

    def draft_seconds(self, rows: int, tree: int) -> float:
        """Of drafting alone, in the nearest bucket that has it; 0 where nothing was timed apart."""
        known = [b for b in self._buckets(tree) if self.cells[b, tree].draft > 0]
        if not known:
            return 0.0
        nearest = min(known, key=lambda b: abs(math.log(b / bucket_of(rows))))
        return self.cells[nearest, tree].draft

    def seconds(self, rows: int, tree: int) -> float:
        """Seconds of a step of `rows` requests under a tree, measured or estimated.

        An estimate is, in this order: between the buckets on both sides; what the tree costs beside another one in the
        nearest bucket where both were measured, times what that one costs here; the least that other trees here allow
        (rather too low, so that whoever chooses tries it once); what the tree costs in the nearest bucket, or
        on along the line of the last two.

        Raises:
            ValueError: nothing was measured at all.
        """
        if not self.cells:
            raise ValueError("no step was measured yet: run some, or read costs that were saved")
        bucket = bucket_of(rows)
        cell = self.cells.get((bucket, tree))
        if cell is not None:
            return cell.seconds
        for guess in (self._between, self._by_ratio, self._by_smaller, self._by_nearest):
            found = guess(bucket, tree)
            if found is not None:
                return found
        return min(cell.seconds for cell in self.cells.values())

    def as_json(self) -> dict[str, Any]:
        """The table as JSON; `read` takes it back."""
        rows = [
            {
                "rows": bucket,
                "tree": tree,
                "seconds": cell.seconds,
                "count": cell.count,
                "draft": cell.draft,
                "samples": list(cell.samples),
            }
            for (bucket, tree), cell in sorted(self.cells.items())
        ]
        trees = [{"parents": list(t.parents), "ranks": list(t.ranks)} for t in self.trees]
        return {"trees": trees, "cells": rows}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """From JSON.

        Raises:
            ValueError: it is not a table of step costs.
        """
        try:
            trees = tuple(Tree(tuple(t["parents"]), tuple(t["ranks"])) for t in data["trees"])
            cells = {
                (int(row["rows"]), int(row["tree"])): Cell(
                    tuple(float(s) for s in row.get("samples") or [row["seconds"]]),
                    int(row.get("count", 1)),
                    float(row.get("draft", 0.0)),
                )
                for row in data["cells"]
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"step costs: {error} is missing or of the wrong kind") from None
        wrong = [tree for _, tree in cells if not 0 <= tree < len(trees)]
        if wrong:
            raise ValueError(f"step costs name tree {wrong[0]}, but there are {len(trees)} trees")
        return cls(trees, cells)

    # Estimates. Each returns None where it has nothing to go by.

    def _buckets(self, tree: int) -> list[int]:
        return sorted(bucket for bucket, other in self.cells if other == tree)

    def _between(self, bucket: int, tree: int) -> float | None:
        for low, high in pairwise(self._buckets(tree)):
            if low < bucket < high:
                cheap, dear = self.cells[low, tree].seconds, self.cells[high, tree].seconds
                return cheap + (dear - cheap) * (bucket - low) / (high - low)
        return None

    def _by_ratio(self, bucket: int, tree: int) -> float | None:
        here = [other for b, other in self.cells if b == bucket]
        pairs = [
            (b, other) for other in here for b in self._buckets(tree) if (b, other) in self.cells
        ]
        if not pairs:
            return None
        nodes = self.trees[tree].nodes
        b, other = min(
            pairs, key=lambda p: (abs(math.log(p[0] / bucket)), abs(self.trees[p[1]].nodes - nodes))
        )
        ratio = self.cells[b, tree].seconds / self.cells[b, other].seconds
        return ratio * self.cells[bucket, other].seconds

    def _by_smaller(self, bucket: int, tree: int) -> float | None:
        """The least that it can be: what the next smaller tree costs, and its share of what a larger one does."""
        nodes = self.trees[tree].nodes
        here = [(self.trees[t].nodes, c.seconds) for (b, t), c in self.cells.items() if b == bucket]
        least = [s if n <= nodes else s * nodes / n for n, s in here]
        return max(least, default=None)

    def _by_nearest(self, bucket: int, tree: int) -> float | None:
        known = self._buckets(tree)
        if not known:
            return None
        if (
            len(known) > 1 and bucket > known[-1]
        ):  # beyond what was measured: on along the last line
            low, high = known[-2:]
            cheap, dear = self.cells[low, tree].seconds, self.cells[high, tree].seconds
            return dear + max(0.0, (dear - cheap) * (bucket - high) / (high - low))
        nearest = min(known, key=lambda b: abs(math.log(b / bucket)))
        return self.cells[nearest, tree].seconds
