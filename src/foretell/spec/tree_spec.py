"""From a tree as users write it (config.TreeSpec) to one that can be drafted.

Which tree a drafter takes by itself is not decided here, but where its checkpoint is read.
"""

from __future__ import annotations

from foretell.config import Chained, GrownTree, Ngram, Speculation, Suffix, TreeSpec
from foretell.spec.dynamic_tree import Growth
from foretell.spec.presets import cut, preset
from foretell.spec.tree import Tree, chain, from_paths


def read_tree(spec: TreeSpec, tokens: int | None) -> Tree | Growth:
    """The tree that is meant.

    Args:
        tokens: num_speculative_tokens; it gives a chain its length and cuts a published tree to so many levels.

    Raises:
        ValueError: the name is unknown, a path has a gap, a parent is missing, or there are more than 64 nodes.
    """
    if isinstance(spec, GrownTree):
        return Growth(spec.top_k, spec.depth, spec.nodes)
    if isinstance(spec, str):
        if spec == "chain":
            assert tokens is not None, "the configuration asks for it"
            return chain(tokens)
        tree = preset(spec)
        return tree if tokens is None else cut(tree, tokens)
    paths = [entry for entry in spec if isinstance(entry, tuple)]
    if paths:
        return from_paths(paths)
    return Tree(tuple(entry for entry in spec if isinstance(entry, int)))


def static_tree(speculation: Speculation) -> Tree:
    """The tree of a drafter that has no checkpoint to say it: the one given, or a chain.

    Raises:
        ValueError: as `read_tree`; also if the tree grows or nothing says how many tokens to draft.
    """
    drafter, spec = speculation.drafter, speculation.tree
    if drafter is None:
        return chain(0)
    tokens = drafter.num_speculative_tokens
    if spec is None:
        assert tokens is not None, "the loader asks for it"
        return chain(tokens)
    tree = read_tree(spec, tokens)
    if isinstance(tree, Growth):
        match drafter:
            case Ngram():
                name: str | None = "n-gram"
            case Suffix():
                name = "suffix decoding"
            case Chained(then=checkpoint):
                name = checkpoint.model
            case _:
                name = drafter.model
        raise ValueError(f"tree: trees that grow need an EAGLE drafter, not {name}; give paths")
    return tree
