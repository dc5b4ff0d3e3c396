"""The draft tree: which tokens are verified together, and who follows whom.

A tree is a tuple of parents, parents first. Node 0 is the root, the last committed token; every other node is one
drafted token. `chain(3) == Tree((-1, 0, 1, 2))`, and plain decoding is `Tree((-1,))`. Everything else (depths, levels,
ancestor masks) is derived here, once. No tensors live here.

Invariant: `parents[i] < i` for every i > 0, and at most 64 nodes, so that an ancestor set fits one signed 64-bit word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

MAX_NODES = 64


@dataclass(frozen=True)
class Tree:
    """A static draft tree.

    Args:
        parents: parent of each node; -1 for the root, which is node 0.
        ranks: which candidate of its parent each node takes (0 = the most likely). Left out, siblings take 0, 1, 2 in
            order; published sparse trees may skip a rank, so they say it.

    Raises:
        ValueError: the tuple is empty, does not start with -1, has a forward or missing parent, or over 64 nodes.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check()
        if not self.ranks:
            object.__setattr__(self, "ranks", self._ranks_in_order())
        if len(self.ranks) != len(self.parents):
            raise ValueError(f"tree: {len(self.parents)} parents but {len(self.ranks)} ranks")

    def _check(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError(
                f"tree: the first parent must be -1 (the root), got {self.parents[:4]}"
            )
        if len(self.parents) > MAX_NODES:
            raise ValueError(
                f"tree: at most {MAX_NODES} nodes (the root included), got {len(self.parents)}"
            )
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"tree: node {node} has parent {parent}; parents must come first and exist"
                )

    @property
    def nodes(self) -> int:
        """N, the number of nodes, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has depth 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """D, the depth of the deepest node: a step emits at most D + 1 tokens."""
        return max(self.depths)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each node, the set of its ancestors and itself as bits of a signed 64-bit integer."""
        sets = [1]
        for node, parent in enumerate(self.parents[1:], start=1):
            sets.append(sets[parent] | 1 << node)
        return tuple(bits - (1 << 64) if bits >> 63 else bits for bits in sets)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes by depth: `levels[d]` are the nodes of depth d, in ascending order."""
        levels: list[list[int]] = [[] for _ in range(self.depth + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return tuple(tuple(level) for level in levels)

    def _ranks_in_order(self) -> tuple[int, ...]:
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return tuple(ranks)

    @cached_property
    def spine(self) -> tuple[bool, ...]:
        """Which nodes are the best candidate of the best candidate, and so on up to the root."""
        spine = [True]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            spine.append(spine[parent] and rank == 0)
        return tuple(spine)

    def begins(self, other: Tree) -> bool:
        """Its nodes are the first ones of `other`, so a draft of that one, cut, is a draft of this one."""
        count = self.nodes
        return self.parents == other.parents[:count] and self.ranks == other.ranks[:count]

    @property
    def is_chain(self) -> bool:
        """True when every node has at most one child."""
        return self.parents == tuple(range(-1, self.nodes - 1))


def chain(k: int) -> Tree:
    """The tree of a linear draft of k tokens: `chain(2) == Tree((-1, 0, 1))`.

    Raises:
        ValueError: k is negative or over 63.
    """
    if not 0 <= k < MAX_NODES:
        raise ValueError(f"num_speculative_tokens must be between 0 and {MAX_NODES - 1}, got {k}")
    return Tree(tuple(range(-1, k)))


def from_paths(paths: Sequence[Sequence[int]]) -> Tree:
    """The tree whose nodes are the given rank paths, as Medusa and EAGLE publish them.

    `[0]` is the best token after the root, `[0, 2]` the third best after it:
    `from_paths([[0], [1], [0, 2]]) == Tree((-1, 0, 0, 1), ranks=(0, 0, 1, 2))`.

    Raises:
        ValueError: a path is empty, negative or repeated, or its own prefix is not in the tree.
    """
    places: dict[tuple[int, ...], int] = {(): 0}
    parents, ranks = [-1], [0]
    for path in sorted((tuple(p) for p in paths), key=lambda p: (len(p), p)):
        if not path or path in places or min(path) < 0:
            raise ValueError(f"tree: path {list(path)} is empty, negative or given twice")
        if path[:-1] not in places:
            raise ValueError(
                f"tree: path {list(path)} has a gap: {list(path[:-1])} is not in the tree"
            )
        places[path] = len(parents)
        parents.append(places[path[:-1]])
        ranks.append(path[-1])
    return Tree(tuple(parents), tuple(ranks))
