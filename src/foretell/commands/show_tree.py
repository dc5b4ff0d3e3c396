"""`foretell show-tree`: a draft tree as a picture; of a trace, with what was accepted at every node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from foretell.config import TreeSpec, as_tree
from foretell.spec.presets import NAMES
from foretell.spec.tree import Tree
from foretell.trace import Place, read_trace, summarise
from foretell.trace_drawing import Drawing, draw_summary, draw_tree, save_drawing


def show_tree(
    tree: Annotated[
        str,
        Argument(help=f"A trace (.jsonl), paths or parents as JSON, or one of {', '.join(NAMES)}."),
    ],
    out: Annotated[
        Path, Option("--out", "-o", help="Where to draw it: .svg, or .png with matplotlib.")
    ] = Path("tree.svg"),
    least: Annotated[
        int, Option("--least", min=1, help="Of a trace: leave out places drafted fewer times.")
    ] = 1,
) -> None:
    """Draw a draft tree; from a trace, each node says what percentage of its drafts was accepted."""
    drawing = _drawing(tree, least)
    save_drawing(drawing, out)
    print(f"{out}: {drawing.title}")


def _drawing(tree: str, least: int) -> Drawing:
    path = Path(tree)
    if path.suffix == ".jsonl" or path.is_file():
        if not path.is_file():
            raise ValueError(f"trace {tree!r} does not exist; give a file that trace= wrote")
        return draw_summary(summarise(read_trace(path)), path.name, least)
    spec = _spec(tree)
    if spec == "chain":
        raise ValueError("a chain has no branches to draw; give a tree, or the trace of a chain")
    from foretell.spec.tree_spec import read_tree  # loads torch, which --help does not need

    shape = read_tree(spec, None)
    assert isinstance(shape, Tree), "JSON lists and names are trees that do not grow"
    places: list[Place] = [()]  # by rank: a published tree may skip one
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
        places.append((*places[parent], rank))
    nodes, depth = shape.nodes - 1, shape.depth
    name = tree if tree in NAMES else "tree"
    return draw_tree(places, f"{name}: {nodes} drafted tokens, {depth} levels")


def _spec(text: str) -> TreeSpec:
    """A name, or a tree as JSON, checked as the engine checks it."""
    if not text.lstrip().startswith("["):
        return text
    try:
        return as_tree(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"tree is not JSON ({error}): {text!r}; write [[0], [1], [0, 0]]"
        ) from None
