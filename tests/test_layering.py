"""The shape of the package: imports point down, and heavy libraries stay where they belong.

    ops <- model <- spec <- runner <- engine <- llm, cli, server, bench, training

The leaves (config, sampling_params, ...) may be imported by anyone and need no torch. The check reads
the source, imports inside functions and under TYPE_CHECKING included: an upward import is wrong
wherever it stands.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "foretell"
LEAVES = ("config", "sampling_params", "speculation", "metrics", "outputs", "structured_outputs")
LAYERS = ("ops", "model", "spec", "runner", "engine")
TOP = len(LAYERS) + 1
ROOT = TOP + 1
VAGUE_NAMES = {"utils", "util", "common", "base", "helpers", "misc"}


class Import(NamedTuple):
    line: int
    module: str  # absolute, e.g. "foretell.ops.meta" or "torch.nn"


def rank(parts: tuple[str, ...]) -> int:
    """Layer of foretell.spec.tree, given as ("spec", "tree"); the package itself is above all."""
    if not parts or parts == ("__init__",):
        return ROOT
    if parts[0] in LEAVES:
        return 0
    return LAYERS.index(parts[0]) + 1 if parts[0] in LAYERS else TOP


def imports(source: str, module: tuple[str, ...]) -> list[Import]:
    """Every import of a source text, made absolute. `module` is its place below the package."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ("foretell", *module)[: -node.level] if node.level else ()
            base = ".".join((*start, *filter(None, [node.module])))
            if base == "foretell":  # `from foretell import ops` names a module, not the package
                found += [Import(node.lineno, f"foretell.{alias.name}") for alias in node.names]
            else:
                found.append(Import(node.lineno, base))
    return found


def faults(source: str, module: tuple[str, ...]) -> list[str]:
    """What is wrong with the imports of one module, one line each."""
    here = rank(module)
    name = ".".join(module)
    wrong = []
    for line, target in imports(source, module):
        top = target.split(".")[0]
        where = f"{name}:{line} imports {target}"
        if top == "foretell":
            if rank(tuple(target.split(".")[1:])) > here:
                wrong.append(f"{where}: a layer above it")
        elif top == "torch" and here == 0:
            wrong.append(f"{where}: a leaf needs no torch")
        elif top == "torch" and module[:1] == ("engine",):
            wrong.append(f"{where}: the engine is plain Python")
        elif top == "triton" and module[:2] != ("ops", "triton"):
            wrong.append(f"{where}: kernels live in ops/triton")
    return wrong


def modules() -> list[tuple[Path, tuple[str, ...]]]:
    # A package's __init__ keeps that part, so that a relative import in it starts at the package.
    return [
        (path, path.relative_to(PACKAGE).with_suffix("").parts)
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def test_imports_point_down_and_heavy_libraries_stay_in_place() -> None:
    found = modules()
    assert len(found) > 10, f"only {len(found)} modules below {PACKAGE}: is this the right folder?"
    wrong = [fault for path, parts in found for fault in faults(path.read_text("utf-8"), parts)]
    assert wrong == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = [
        str(path.relative_to(PACKAGE)) for path, parts in modules() if VAGUE_NAMES & set(parts)
    ]
    assert vague == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops.meta", "from foretell.model import decoder"),
        ("ops.meta", "import foretell.spec.tree"),
        ("ops.meta", "from ..spec import tree"),
        ("spec.tree", "def late():\n    from foretell.runner.step import decode_step"),
        ("engine.engine", "from foretell import LLM"),
        ("engine.engine", "from foretell.llm import LLM"),
        ("engine.blocks", "import torch"),
        ("config", "import torch.nn"),
        ("sampling_params", "from foretell.ops import sample"),
        ("spec.ngram", "import triton.language as tl"),
    ],
)
def test_the_check_itself_sees_a_wrong_import(module: str, source: str) -> None:
    assert len(faults(source, tuple(module.split(".")))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.engine", "from foretell.runner.plan import Plan\nfrom foretell.config import X"),
        ("ops.reference.sample", "from foretell.ops.meta import Meta\nimport torch"),
        ("ops.reference.sample", "from .verify import accept\nfrom ..meta import Meta"),
        ("ops.triton.attention", "import triton"),
        ("cli", "from foretell import LLM"),
    ],
)
def test_the_check_itself_lets_a_right_import_pass(module: str, source: str) -> None:
    assert faults(source, tuple(module.split("."))) == []
