"""Published trees: node counts as published, and what the originals choose."""

from __future__ import annotations

import pytest

from foretell.spec.presets import NAMES, cut, medusa_preset, preset
from foretell.spec.tree import Tree, chain, from_paths

PUBLISHED = {
    "eagle": ([4, 8, 8, 3, 2], 15),
    "mc_sim_7b_63": ([10, 28, 23, 2], 42),
    "vicuna_7b_stage2": ([10, 23, 23, 7], 42),
    "vicuna_7b_stage1": ([10, 32, 20, 1], 44),
    "vicuna_7b_stage1_ablation": ([10, 21, 25, 7], 42),
    "vicuna_13b_stage2": ([10, 19, 25, 9], 42),
    "vicuna_13b_stage1": ([10, 29, 23, 1], 44),
    "vicuna_33b_stage2": ([10, 24, 24, 5], 43),
    "vicuna_33b_stage1": ([10, 34, 19], 46),
    "zephyr_stage2": ([10, 27, 23, 3], 44),
}


def test_every_published_tree_is_there() -> None:
    assert set(NAMES) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_nodes_per_depth_and_paths(name: str) -> None:
    tree = preset(name)
    counts, leaves = PUBLISHED[name]
    assert [len(level) for level in tree.levels[1:]] == counts
    assert tree.nodes - len(set(tree.parents) - {-1}) == leaves


def test_a_preset_keeps_the_paths_of_its_list() -> None:
    """The few nodes of the last level of mc_sim_7b_63, and EAGLE's tree whole."""
    paths = [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    paths += [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 2),
        (0, 1, 0),
        (0, 1, 1),
        (0, 2, 0),
        (0, 2, 1),
        (1, 0, 0),
    ]
    paths += [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)]
    assert preset("eagle") == from_paths(paths)
    medusa = preset("mc_sim_7b_63")
    assert [medusa.ranks[node] for node in medusa.levels[4]] == [0, 1]
    assert medusa.depths[medusa.parents[medusa.levels[4][0]]] == 3


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("lmsys/vicuna-7b-v1.3", "vicuna_7b_stage2"),
        ("medusa-1.0-vicuna-13b-v1.5", "vicuna_13b_stage2"),
        ("FasterDecoding/medusa-vicuna-33b-v1.3", "vicuna_33b_stage2"),
        ("medusa-1.0-zephyr-7b-beta", "zephyr_stage2"),
        ("meta-llama/Llama-2-7b", "mc_sim_7b_63"),
    ],
)
def test_the_tree_is_chosen_as_medusa_does(model: str, name: str) -> None:
    assert medusa_preset(model) == name


def test_a_tree_is_cut_to_the_heads_there_are() -> None:
    assert cut(Tree((-1, 0, 0, 1, 3)), 2) == Tree((-1, 0, 0, 1))
    assert cut(preset("mc_sim_7b_63"), 1).nodes == 11
    assert cut(chain(3), 0) == chain(0)
    with pytest.raises(ValueError, match="-1"):
        cut(chain(3), -1)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"vicuna_7b.*mc_sim_7b_63"):
        preset("vicuna_7b")
