"""Variants: the ways of speculating that a benchmark compares, each as LLM's own speculative_config.

A sweep is a product of drafters, draft lengths and trees. What cannot exist (a named tree for n-gram lookups of a
length it does not have, say) is refused by LLM itself when the variant is opened, not guessed here.

Invariant: a variant is fixed. Where the engine can choose by itself, that is switched off, except in ADAPTIVE ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.speculation import KEYS

PLAIN = "plain"
NGRAM_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
LOOKUPS = ("ngram", "suffix")  # drafters by name, without weights
MEMORY = "suffix_decoding_max_cached_requests"
CHOOSES = "adaptive" in KEYS  # the engine can choose the tree itself


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of speculating.

    Args:
        label: for people, unique in a run.
        speculative: LLM's speculative_config; None = plain decoding.
        drafter: "none", "ngram", "suffix" or the checkpoint's name.
        k: num_speculative_tokens; None where the drafter decides.
        tree: "chain", a name, or the paths as JSON.
        adaptive: the engine chooses the tree in every step.
    """

    label: str
    speculative: Mapping[str, Any] | None = field(default=None, hash=False)
    drafter: str = "none"
    k: int | None = None
    tree: str = "chain"
    adaptive: bool = False

    @property
    def plain(self) -> bool:
        """Nothing is drafted."""
        return self.speculative is None


def plain_variant() -> Variant:
    """Decoding without drafts."""
    return Variant(PLAIN)


def given_variant(speculative: Mapping[str, Any], adaptive: bool = False) -> Variant:
    """What the user asked for, as it is but for who chooses the tree."""
    config = without_memory(speculative)
    adaptive = adaptive and CHOOSES
    tree = config.get("tree")
    method = config.get("method")
    drafter = str(method if method in LOOKUPS else config.get("model") or method)
    k = config.get("num_speculative_tokens")
    named = tree if isinstance(tree, str) else ("chain" if tree is None else json.dumps(tree))
    return Variant(
        label=_label(drafter, k, named, adaptive),
        speculative=_chosen(config, adaptive),
        drafter=drafter,
        k=k,
        tree=named,
        adaptive=adaptive,
    )


def without_memory(speculative: Mapping[str, Any]) -> dict[str, Any]:
    """The config, made to forget past outputs unless it says how many to remember.

    A benchmark asks the same prompts again: a drafter that remembers what was answered would know the answers.
    """
    method = speculative.get("method")
    named = [*method] if isinstance(method, list | tuple) else str(method).split("+")
    remembers = "suffix" in named or "chained" in named or speculative.get("model") == "suffix"
    return {MEMORY: 0, **speculative} if remembers else dict(speculative)


def with_memory(speculative: Mapping[str, Any]) -> dict[str, Any]:
    """The config for real work: past outputs are remembered, unless they were not to be."""
    return {k: v for k, v in speculative.items() if (k, v) != (MEMORY, 0)}


def grid(
    drafters: Sequence[str],
    ks: Sequence[int],
    trees: Sequence[str],
    shared: Mapping[str, Any],
    adaptive: bool = False,
) -> list[Variant]:
    """Every drafter with every length and every tree.

    Args:
        drafters: "ngram", "suffix" or checkpoints.
        ks: draft lengths; () leaves them to the checkpoint.
        trees: "chain", published names, or JSON lists of paths; with a list of paths k is the tree's own.
        shared: further keys of speculative_config for all; those of n-gram lookups only go to n-gram.
        adaptive: add, for every drafter, one variant of the longest k that chooses by itself.

    Raises:
        ValueError: a tree is neither a name nor JSON.
    """
    found: dict[str, Variant] = {}
    for drafter in drafters:
        start = {"method": drafter} if drafter in LOOKUPS else {"model": drafter}
        foreign = [k for k in shared if k in NGRAM_KEYS and drafter != "ngram"]
        foreign += [k for k in shared if k.startswith("suffix_") and drafter != "suffix"]
        own = {k: v for k, v in shared.items() if k not in foreign}
        for tree in trees or ("chain",):
            spec = _read_tree(tree)
            lengths: Sequence[int | None] = (None,) if isinstance(spec, list) or not ks else ks
            for k in lengths:
                config = {**own, **start}
                if spec != "chain":
                    config["tree"] = spec
                if k is not None:
                    config["num_speculative_tokens"] = k
                variant = given_variant(config)
                found[variant.label] = variant
        if adaptive and CHOOSES and ks:
            variant = given_variant({**own, **start, "num_speculative_tokens": max(ks)}, True)
            found[variant.label] = variant
    return list(found.values())


def _read_tree(text: str) -> str | list[Any]:
    if not text.lstrip().startswith("["):
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"tree {text!r} is not JSON ({error}); give paths like [[0],[1],[0,0]]"
        ) from None
    assert isinstance(value, list)
    return value


def _chosen(config: dict[str, Any], adaptive: bool) -> dict[str, Any]:
    """The config with the engine's own choice switched on or off, where it has one."""
    return {**config, "adaptive": adaptive} if CHOOSES else config


def _label(drafter: str, k: int | None, tree: str, adaptive: bool) -> str:
    short = drafter.rstrip("/").rpartition("/")[2]
    said = short if k is None else f"{short} k={k}"
    if adaptive:
        return said.replace(" k=", " adaptive k<=")
    return said if tree == "chain" else f"{said} {tree if len(tree) < 24 else tree[:20] + '...'}"
