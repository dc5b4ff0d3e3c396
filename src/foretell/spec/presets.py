"""Published draft trees: Medusa's sparse ones (arXiv 2401.10774, section 2.3.3) and EAGLE's (2401.15077, figure 7).

Each tree is written as the number of children of every node, level by level, nodes in the order of their rank paths,
trailing zeros left out. That says everything, since no published tree skips a rank. Node sets are those of the
projects' own lists.
"""

from __future__ import annotations

from collections.abc import Mapping

from foretell.spec.tree import Tree, from_paths

_CHILDREN: Mapping[str, tuple[str, ...]] = {
    "eagle": ("4", "3 2 2 1", "3 2 2 1", "3", "2"),
    "mc_sim_7b_63": (
        "10",
        "10 7 3 2 1 1 1 1 1 1",
        "10 3 2 1 1 1 1 1 0 0 2 0 0 0 0 0 0 1",
        "2",
    ),
    "vicuna_7b_stage1": (
        "10",
        "10 7 4 3 2 2 1 1 1 1",
        "9 3 2 1 1 1 0 0 0 0 2 0 0 0 0 0 0 1",
        "1",
    ),
    "vicuna_7b_stage1_ablation": (
        "10",
        "10 4 2 2 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1",
        "4 1 1 0 0 0 0 0 0 0 1",
    ),
    "vicuna_7b_stage2": (
        "10",
        "10 5 2 2 1 1 1 1",
        "9 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1",
        "4 1 1 0 0 0 0 0 0 1",
    ),
    "vicuna_13b_stage1": (
        "10",
        "10 7 4 2 2 1 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 0 1",
        "1",
    ),
    "vicuna_13b_stage2": (
        "10",
        "10 4 2 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1",
        "4 2 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1",
    ),
    "vicuna_33b_stage1": (
        "10",
        "10 8 5 3 2 2 1 1 1 1",
        "9 3 2 1 1 0 0 0 0 0 2 0 0 0 0 0 0 0 1",
    ),
    "vicuna_33b_stage2": (
        "10",
        "10 5 3 2 1 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1",
        "3 1 0 0 0 0 0 0 0 0 1",
    ),
    "zephyr_stage2": (
        "10",
        "10 6 4 2 2 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 1",
        "2 1",
    ),
}
NAMES = tuple(_CHILDREN)


def preset(name: str) -> Tree:
    """A published tree: `eagle` has 25 drafted nodes and depth 5, every Medusa tree 63 nodes.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _CHILDREN:
        raise ValueError(f"tree preset {name!r} is unknown; known are {', '.join(NAMES)}")
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for line in _CHILDREN[name]:
        counts = [int(word) for word in line.split()]
        counts += [0] * (len(level) - len(counts))
        level = [
            (*path, rank)
            for path, count in zip(level, counts, strict=True)
            for rank in range(count)
        ]
        paths += level
    return from_paths(paths)


def medusa_preset(model: str) -> str:
    """Which tree Medusa's own code takes for a model: by words in the name of the base model or the checkpoint."""
    name = model.lower()
    if "vicuna" in name:
        for size in ("7b", "13b", "33b"):
            if size in name:
                return f"vicuna_{size}_stage2"
    return "zephyr_stage2" if "zephyr" in name else "mc_sim_7b_63"


def cut(tree: Tree, depth: int) -> Tree:
    """The tree without the nodes deeper than `depth`: what so many Medusa heads can fill.

    Raises:
        ValueError: depth is negative.
    """
    if depth < 0:
        raise ValueError(f"a tree cannot be cut to depth {depth}; give 0 or more")
    kept = [node for node in range(tree.nodes) if tree.depths[node] <= depth]
    place = {node: i for i, node in enumerate(kept)}
    parents = (-1, *(place[tree.parents[node]] for node in kept[1:]))
    return Tree(parents, tuple(tree.ranks[node] for node in kept))
