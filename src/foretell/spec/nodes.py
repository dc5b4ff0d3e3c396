"""The nodes under verification, as tensors: one row per request, one column per node of its draft tree.

Shapes are made once per tree, outside the step (or, for dynamic trees, from the parents that came with the draft).
Not a place for decisions: acceptance is in verify.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.spec.tree import Tree


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a static tree, as a drafter fills it: `nodes[j]` takes candidate `ranks[j]` of its parent, which is
    entry `parents[j]` of the level above's `expanded` nodes; `expanded` are this level's nodes that have children, and
    `above` says the same of their parents. `ordinals` count siblings without the gaps that ranks may have."""

    depth: int
    nodes: Tensor  # [n] int64
    parents: Tensor  # [n] int64
    ranks: Tensor  # [n] int64
    ordinals: Tensor  # [n] int64
    width: int  # candidates needed of each parent
    expanded: Tensor  # [m] int64
    above: Tensor  # [m] int64
    bits: Tensor  # [1, m] int64, ancestors and selves of the expanded nodes
    alone: bool  # one node below one node, all that its level has: nothing to pick


@dataclass(frozen=True, slots=True)
class Shape:
    """Parents, depths and ancestor sets; a leading 1 stands for "the same tree in every row"."""

    tree: Tree  # the static tree; for dynamic trees its node count and depth are the bounds
    parents: Tensor  # [B or 1, N] int64, the root's is 0 (itself)
    depths: Tensor  # [B or 1, N] int64
    bits: Tensor  # [B or 1, N] int64, ancestors and self
    ranks: Tensor  # [B or 1, N] int64, place among siblings
    spine: Tensor  # [N] bool, best candidate of the best candidate ...; of the bounding tree if dynamic
    levels: tuple[Level, ...]  # of depth 1 and on; empty if dynamic

    def ancestor_matrix(self) -> Tensor:
        """[B or 1, N, N] bool: entry (i, j) says that j is an ancestor of i or i itself."""
        nodes = torch.arange(self.tree.nodes, device=self.bits.device)
        return (self.bits.unsqueeze(-1) >> nodes) & 1 > 0


@dataclass(frozen=True, slots=True)
class Nodes:
    """What a verification works on."""

    shape: Shape
    tokens: Tensor  # [B, N] int64; node 0 is the last committed token, -1 a missing draft
    positions: Tensor  # [B, N] int64, length - 1 + depth: where the node's own token stands


def static_shape(tree: Tree, device: torch.device) -> Shape:
    """The shape shared by all rows that verify `tree`."""

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    elder = [tree.parents[:node].count(parent) for node, parent in enumerate(tree.parents)]
    return Shape(
        tree=tree,
        parents=ints((0, *tree.parents[1:])).unsqueeze(0),
        depths=ints(tree.depths).unsqueeze(0),
        bits=ints(tree.ancestors).unsqueeze(0),
        ranks=ints(elder).unsqueeze(0),
        spine=torch.tensor(tree.spine, dtype=torch.bool, device=device),
        levels=_levels(tree, device),
    )


def _levels(tree: Tree, device: torch.device) -> tuple[Level, ...]:
    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    with_children = set(tree.parents)
    levels, above = [], [0]
    for depth, nodes in enumerate(tree.levels[1:], start=1):
        expanded = [node for node in nodes if node in with_children]
        siblings = [[n for n in nodes if tree.parents[n] == tree.parents[node]] for node in nodes]
        levels.append(
            Level(
                depth=depth,
                nodes=ints(list(nodes)),
                parents=ints([above.index(tree.parents[node]) for node in nodes]),
                ranks=ints([tree.ranks[node] for node in nodes]),
                ordinals=ints([s.index(node) for s, node in zip(siblings, nodes, strict=True)]),
                width=max(max(tree.ranks[node] + 1 for node in nodes), *map(len, siblings)),
                expanded=ints(expanded),
                above=ints([above.index(tree.parents[node]) for node in expanded]),
                bits=ints([tree.ancestors[node] for node in expanded]).unsqueeze(0),
                alone=len(nodes) == len(above) == 1 and tree.ranks[nodes[0]] == 0,
            )
        )
        above = expanded
    return tuple(levels)


def dynamic_shape(bound: Shape, parents: Tensor) -> Shape:
    """The shape of trees that differ from row to row.

    Args:
        bound: shape of any tree with as many nodes, and at least as deep, as the rows' own trees.
        parents: [B, N] int64, parents first; the root's entry is ignored.
    """
    place = torch.arange(bound.tree.nodes, device=parents.device)
    parents = torch.where(place == 0, 0, parents)
    own = torch.ones_like(parents) << place
    bits, depths, up = own, torch.zeros_like(parents), parents
    for _ in range(bound.tree.depth):
        bits = bits | own.gather(1, up)
        up = parents.gather(1, up)
    up = place.expand_as(parents)
    for _ in range(bound.tree.depth):
        depths = depths + (up > 0)
        up = parents.gather(1, up)
    same = parents.unsqueeze(2) == parents.unsqueeze(1)  # [B, N, N]
    elder = same & (place < place.unsqueeze(1)) & (place > 0)
    return Shape(
        tree=bound.tree,
        parents=parents,
        depths=depths,
        bits=bits,
        ranks=elder.sum(-1),
        spine=bound.spine,
        levels=(),
    )
