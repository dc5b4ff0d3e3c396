"""Variants: the product of drafters, lengths and trees, each as LLM takes it."""

from __future__ import annotations

import pytest

from foretell.bench.variants import CHOOSES, given_variant, grid, plain_variant, with_memory
from foretell.speculation import resolve_speculation


def test_a_grid_is_the_product_and_labels_are_unique() -> None:
    found = grid(["ngram", "models/draft"], [2, 4], ["chain"], {})
    assert [(v.drafter, v.k) for v in found] == [
        ("ngram", 2),
        ("ngram", 4),
        ("models/draft", 2),
        ("models/draft", 4),
    ]
    assert len({v.label for v in found}) == 4


def test_every_variant_of_a_grid_is_one_that_llm_takes() -> None:
    shared = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    for variant in grid(["ngram", "suffix", "models/draft"], [3], ["chain"], shared):
        speculation = resolve_speculation(speculative_config=variant.speculative)
        assert speculation.drafter is not None
        assert speculation.drafter.num_speculative_tokens == 3


def test_lookup_keys_go_to_lookups_alone() -> None:
    ngram, other = grid(["ngram", "models/draft"], [3], ["chain"], {"prompt_lookup_max": 4})
    assert ngram.speculative is not None
    assert other.speculative is not None
    assert ngram.speculative["prompt_lookup_max"] == 4
    assert "prompt_lookup_max" not in other.speculative


def test_a_tree_of_paths_brings_its_own_length() -> None:
    found = grid(["ngram"], [2, 4], ["[[0],[1],[0,0]]"], {})
    assert [v.k for v in found] == [None]
    assert found[0].speculative is not None
    assert found[0].speculative["tree"] == [[0], [1], [0, 0]]
    with pytest.raises(ValueError, match="is not JSON"):
        grid(["ngram"], [2], ["[[0],"], {})


def test_a_fixed_variant_does_not_let_the_engine_choose() -> None:
    if not CHOOSES:
        pytest.skip("the engine has no choice of its own yet")
    fixed, chosen = grid(["ngram"], [4], ["chain"], {}, adaptive=True)
    assert fixed.speculative is not None
    assert chosen.speculative is not None
    assert fixed.speculative["adaptive"] is False
    assert chosen.speculative["adaptive"] is True
    assert chosen.adaptive


def test_a_drafter_with_a_memory_forgets_between_runs_unless_told_otherwise() -> None:
    key = "suffix_decoding_max_cached_requests"
    for config in ({"method": "suffix"}, {"method": "suffix+eagle3", "model": "e"}):
        found = given_variant({**config, "num_speculative_tokens": 3}).speculative
        assert found is not None
        assert found[key] == 0
        assert key not in with_memory(found)
        assert resolve_speculation(speculative_config=found).drafter is not None
    told = given_variant({"method": "suffix", "num_speculative_tokens": 3, key: 7}).speculative
    assert told is not None
    assert told[key] == with_memory(told)[key] == 7
    ngram = given_variant({"method": "ngram", "num_speculative_tokens": 3}).speculative
    assert ngram is not None
    assert key not in ngram


def test_plain_drafts_nothing() -> None:
    assert plain_variant().plain
    assert not given_variant({"method": "ngram", "num_speculative_tokens": 2}).plain
