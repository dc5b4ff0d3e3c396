"""The ladder: the few trees that a controller chooses from, between plain decoding and what the user asked for.

Invariant: the first tree has one node, the last is the user's own, and no tree asks more of a drafter than that one:
none is deeper or has more nodes.
"""

from __future__ import annotations

from foretell.spec.acceptance import FALLOFF
from foretell.spec.tree import Tree, chain

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # of chains between
BUDGETS = (4, 8, 16, 32)  # nodes of smaller trees
FADE = 0.6  # how much less a node is worth than its parent, when trees are cut to a budget


def ladder(tree: Tree, grows: bool = False) -> tuple[Tree, ...]:
    """Plain decoding, the trees between, and `tree`, by size.

    Args:
        grows: `tree` is the bound of trees that grow; the smaller ones are bounds, too.

    Example: of a chain of 5 they are the chains of 0, 1, 2, 3, 4 and 5.
    """
    if tree.nodes == 1:
        return (tree,)
    if grows:
        between = [_bound(tree, nodes) for nodes in BUDGETS if nodes < tree.nodes]
    elif tree.is_chain:
        between = [chain(k) for k in LENGTHS if k < tree.depth]
    else:
        chains = [chain(k) for k in (1, 2, 4) if k < tree.depth]
        between = [*chains, *(prune(tree, n) for n in BUDGETS[1:] if n < tree.nodes)]
    found = dict.fromkeys((chain(0), *sorted(between, key=lambda t: t.nodes), tree))
    return tuple(found)


def prune(tree: Tree, nodes: int) -> Tree:
    """The tree cut to so many nodes, the likeliest ones by rank and depth; every kept node keeps its parent."""
    worth = [1.0]
    for node in range(1, tree.nodes):
        fall = FALLOFF[min(tree.ranks[node], len(FALLOFF) - 1)]
        worth.append(worth[tree.parents[node]] * fall * FADE)
    kept = sorted(sorted(range(tree.nodes), key=lambda node: (-worth[node], node))[:nodes])
    place = {node: i for i, node in enumerate(kept)}
    parents = (-1, *(place[tree.parents[node]] for node in kept[1:]))
    return Tree(parents, tuple(tree.ranks[node] for node in kept))


def _bound(tree: Tree, nodes: int) -> Tree:
    """A bound of half as many levels as nodes, at most the tree's own."""
    depth = min(tree.depth, nodes // 2)
    return Tree((*range(-1, depth), *[0] * (nodes - 1 - depth)))
