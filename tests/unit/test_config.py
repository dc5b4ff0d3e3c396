"""Configuration: what the words of the API mean, and what is refused, by name and with a remedy."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from foretell import arguments
from foretell.config import (
    MAX_DRAFT_TOKENS,
    Chained,
    DraftCheckpoint,
    EngineConfig,
    GrownTree,
    Ngram,
    Speculation,
    Suffix,
)
from foretell.speculation import ALIASES, KEYS, METHODS, MISSING, resolve_speculation


def test_nothing_said_means_plain_decoding() -> None:
    assert resolve_speculation() == Speculation(None, "match", None)
    assert resolve_speculation(None, None, {}) == Speculation()
    assert EngineConfig().drafter is None


def test_the_guides_words_make_a_checkpoint_that_says_itself_what_it_is() -> None:
    found = resolve_speculation("google/gemma-2b", 5)
    assert found == Speculation(DraftCheckpoint(model="google/gemma-2b", num_speculative_tokens=5))
    assert resolve_speculation("google/gemma-2b").drafter == DraftCheckpoint(
        model="google/gemma-2b"
    )


@pytest.mark.parametrize(
    "config",
    [
        {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
        },
        {
            "model": "[ngram]",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
        },
        {
            "model": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
        },
    ],
)
def test_ngram_by_method_or_by_name(config: dict[str, object]) -> None:
    expected = Ngram(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=5)
    assert resolve_speculation(speculative_config=config).drafter == expected


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [({}, 5, 5), ({"prompt_lookup_min": 2}, 2, 2), ({"prompt_lookup_max": 3}, 3, 3)],
)
def test_a_missing_lookup_bound_mirrors_the_given_one(
    given: dict[str, int], low: int, high: int
) -> None:
    drafter = resolve_speculation("ngram", 4, given).drafter
    assert isinstance(drafter, Ngram)
    assert (drafter.prompt_lookup_min, drafter.prompt_lookup_max) == (low, high)


def test_all_keys_of_a_draft_model_arrive() -> None:
    config = {
        "method": "draft_model",
        "model": "draft",
        "num_speculative_tokens": 3,
        "revision": "main",
        "draft_tensor_parallel_size": 1,
        "max_model_len": 512,
        "use_heterogeneous_vocab": True,
        "draft_sample_method": "greedy",
        "acceptance": "typical",
    }
    assert resolve_speculation(speculative_config=config) == Speculation(
        DraftCheckpoint(
            model="draft",
            method="draft_model",
            num_speculative_tokens=3,
            revision="main",
            tensor_parallel_size=1,
            max_model_len=512,
            use_heterogeneous_vocab=True,
            sampling="greedy",
        ),
        "typical",
    )


def test_all_keys_of_eagle3_arrive() -> None:
    given = {
        "method": "eagle3",
        "model": "heads",
        "target_layers": [1, 2, 3],
        "target_layers_convention": "output",
        "norm_before_residual": True,
    }
    assert resolve_speculation(speculative_config=given).drafter == DraftCheckpoint(
        model="heads",
        method="eagle3",
        target_layers=(1, 2, 3),
        target_layers_convention="output",
        norm_before_residual=True,
    )
    del given["method"]
    assert resolve_speculation(speculative_config=given).drafter is not None


@pytest.mark.parametrize("alias", ALIASES)
def test_names_that_vllm_has_mean_ours(alias: str) -> None:
    given = {"method": alias, "model": "m", "num_speculative_tokens": 2}
    drafter = resolve_speculation(speculative_config=given).drafter
    assert isinstance(drafter, DraftCheckpoint)
    assert drafter.method == ALIASES[alias]
    assert ALIASES[alias] in METHODS


@pytest.mark.parametrize("method", ["mtp", "medusa"])
def test_heads_inside_the_target_need_no_model(method: str) -> None:
    drafter = resolve_speculation(speculative_config={"method": method}).drafter
    assert isinstance(drafter, DraftCheckpoint)
    assert (drafter.model, drafter.method) == (None, method)


def test_R36_a_word_in_a_models_name_decides_nothing() -> None:
    for name in ("my-eagle-draft", "medusa-ngram", "eagle3"):
        unnamed = resolve_speculation(name, 2).drafter
        assert unnamed == DraftCheckpoint(model=name, num_speculative_tokens=2)
        given = {"method": "draft_model", "model": name, "num_speculative_tokens": 2}
        named = resolve_speculation(speculative_config=given).drafter
        assert isinstance(named, DraftCheckpoint)
        assert named.method == "draft_model"


def test_vllms_rejection_sampling_is_the_rejection_rule() -> None:
    given = {"rejection_sample_method": "standard"}
    assert resolve_speculation("draft", 2, given).acceptance == "rejection"
    assert (
        resolve_speculation("draft", 2, given | {"acceptance": "rejection"}).acceptance
        == "rejection"
    )
    assert resolve_speculation("draft", 2).acceptance == "match"
    with pytest.raises(ValueError, match="acceptance='match' contradicts rejection_sample_method"):
        resolve_speculation("draft", 2, given | {"acceptance": "match"})


def test_a_tree_by_paths_or_parents_says_how_many_tokens_are_drafted() -> None:
    paths = resolve_speculation("draft", None, {"tree": [[0], [1], [0, 2]]})
    assert paths.tree == ((0,), (1,), (0, 2))
    looked_up = resolve_speculation("ngram", None, {"tree": [[0], [1], [0, 2]]})
    assert looked_up.drafter is not None
    assert looked_up.drafter.num_speculative_tokens == 3
    parents = resolve_speculation("draft", 3, {"tree": [-1, 0, 0, 1]})
    assert parents.tree == (-1, 0, 0, 1)
    with pytest.raises(ValueError, match="num_speculative_tokens=5 but the tree drafts 3 tokens"):
        resolve_speculation("draft", 5, {"tree": [-1, 0, 0, 1]})


def test_a_tree_by_name_or_by_how_it_grows() -> None:
    assert resolve_speculation("d", 3, {"tree": "mc_sim_7b_63"}).tree == "mc_sim_7b_63"
    assert resolve_speculation("d", 3, {"tree": "chain"}).tree == "chain"
    grown = resolve_speculation("d", None, {"tree": {"top_k": 4, "depth": 3, "nodes": 9}})
    assert grown.tree == GrownTree(4, 3, 9)
    assert resolve_speculation("d", None, {"tree": {"depth": 5}}).tree == GrownTree(10, 5, 60)
    with pytest.raises(ValueError, match="tree='chain' needs num_speculative_tokens"):
        resolve_speculation("d", None, {"tree": "chain"})
    with pytest.raises(ValueError, match="tree has no key 'topk'; did you mean 'top_k'"):
        resolve_speculation("d", None, {"tree": {"topk": 4}})
    with pytest.raises(ValueError, match="tree: depth must be a positive integer, got 0"):
        resolve_speculation("d", None, {"tree": {"depth": 0}})
    with pytest.raises(ValueError, match="num_speculative_tokens=5 but the tree drafts 8 tokens"):
        resolve_speculation("d", 5, {"tree": {"top_k": 4, "depth": 3, "nodes": 9}})


@pytest.mark.parametrize("tree", ["", [], 5, [[]], [[0], 1], [0.5], [[True]], {"a": 1}])
def test_a_tree_of_another_form_is_refused(tree: object) -> None:
    with pytest.raises(ValueError, match="tree"):
        resolve_speculation("draft", 2, {"tree": tree})


@pytest.mark.parametrize(
    ("model", "count", "config", "message"),
    [
        (
            "draft",
            None,
            {"method": "draft_model"},
            "num_speculative_tokens must be provided with speculative model unless the draft model config contains an "
            "n_predict parameter.",
        ),
        (None, 5, None, "num_speculative_tokens was provided but without speculative model."),
        ("draft", 0, None, "Expected num_speculative_tokens to be greater than zero (0)."),
        ("draft", -3, None, "Expected num_speculative_tokens to be greater than zero (-3)."),
        ("draft", 64, None, "num_speculative_tokens must be at most 63, got 64"),
        ("draft", True, None, "num_speculative_tokens must be an integer, got True"),
        ("draft", 2.0, None, "num_speculative_tokens must be an integer, got 2.0"),
        (
            "ngram",
            2,
            {"prompt_lookup_min": 5, "prompt_lookup_max": 2},
            "prompt_lookup_min=5 must be <= prompt_lookup_max=2",
        ),
        ("ngram", 2, {"prompt_lookup_min": 0}, "prompt_lookup_min=0 must be > 0"),
        (
            "draft",
            2,
            {"tensor_parallel_size": 2},
            "'tensor_parallel_size' is not a valid argument in the speculative_config. Please pass "
            "'draft_tensor_parallel_size' instead.",
        ),
        (
            "draft",
            2,
            {"acceptance": "exact"},
            "acceptance must be one of 'match', 'rejection', 'typical', got 'exact'",
        ),
        (
            "draft",
            2,
            {"rejection_sample_method": "synthetic"},
            "rejection_sample_method='synthetic' is not supported",
        ),
        ("draft", 2, {"draft_sample_method": "beam"}, "draft_sample_method must be one of"),
        (
            "draft",
            2,
            {"max_model_len": 0},
            "max_model_len (of the draft model) must be a positive integer, got 0",
        ),
        (
            "draft",
            2,
            {"prompt_lookup_max": 3},
            "'prompt_lookup_max' does not belong to a checkpoint",
        ),
        (
            "draft",
            2,
            {"method": "eagle3", "use_heterogeneous_vocab": True},
            "'use_heterogeneous_vocab' does not belong to method 'eagle3'",
        ),
        (
            "draft",
            2,
            {"method": "medusa", "target_layers": [1]},
            "'target_layers' does not belong to method 'medusa'",
        ),
        ("draft", 2, {"target_layers": "1,2"}, "target_layers must be a list of layer numbers"),
        (
            "draft",
            2,
            {"target_layers_convention": "before"},
            "target_layers_convention must be one of 'after', 'output', got 'before'",
        ),
        (
            None,
            None,
            {"method": "eagle", "num_speculative_tokens": 2},
            "method 'eagle' needs a model",
        ),
        (
            "ngram",
            2,
            {"use_heterogeneous_vocab": True},
            "'use_heterogeneous_vocab' does not belong to method 'ngram'",
        ),
        (
            "other",
            2,
            {"model": "draft"},
            "speculate_model='other' but speculative_config has model='draft'",
        ),
        (
            "draft",
            2,
            {"num_speculative_tokens": 3},
            "num_speculative_tokens=2 but speculative_config has",
        ),
        (
            None,
            None,
            {"method": "draft_model", "num_speculative_tokens": 2},
            "method 'draft_model' needs a model",
        ),
        ("draft", 2, {"method": "ngram"}, "method 'ngram' needs no model, got 'draft'"),
        (None, None, {"acceptance": "match"}, "names neither a method nor a model"),
        (
            "draft",
            2,
            {"methode": "ngram"},
            "speculative_config has no key 'methode'; did you mean 'method'?",
        ),
        ("draft", 2, {"lookup_max": 3}, "did you mean 'prompt_lookup_max'?"),
        (" ", 2, None, "speculative model must be a directory, a GGUF file or a hub name, got ' '"),
    ],
)
def test_bad_speculation_is_refused_with_its_reason(
    model: str | None, count: int | None, config: dict[str, object] | None, message: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        resolve_speculation(model, count, config)
    assert message in str(caught.value)


def test_suffix_decoding_has_vllms_keys_and_defaults() -> None:
    assert resolve_speculation("suffix").drafter == Suffix()
    given = {
        "method": "suffix",
        "num_speculative_tokens": 12,
        "suffix_decoding_max_tree_depth": 32,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.2,
        "suffix_decoding_min_match": 2,
        "suffix_decoding_corpus_tokens": 1000,
    }
    assert resolve_speculation(speculative_config=given).drafter == Suffix(
        num_speculative_tokens=12,
        max_tree_depth=32,
        max_cached_requests=0,
        max_spec_factor=2.0,
        min_token_prob=0.2,
        min_match=2,
        corpus_tokens=1000,
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_tree_depth", 0, "must be an integer of at least 1, got 0"),
        ("max_cached_requests", -1, "must be an integer of at least 0, got -1"),
        ("max_spec_factor", -0.5, "must be >= 0, got -0.5"),
        ("min_token_prob", 1.5, "must be in [0, 1], got 1.5"),
        ("min_match", 0, "must be an integer of at least 1, got 0"),
        ("corpus_tokens", 0, "must be a positive integer, got 0"),
    ],
)
def test_bad_numbers_of_suffix_decoding_are_refused(key: str, value: float, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        resolve_speculation(
            speculative_config={"method": "suffix", f"suffix_decoding_{key}": value}
        )
    assert str(caught.value) == f"suffix_decoding_{key} {message}"


@pytest.mark.parametrize("method", [["suffix", "eagle3"], "suffix+eagle3", ("suffix", "eagle3")])
def test_two_methods_are_a_chain(method: object) -> None:
    given = {"method": method, "model": "d", "num_speculative_tokens": 5}
    then = DraftCheckpoint(model="d", method="eagle3", num_speculative_tokens=5)
    assert resolve_speculation(speculative_config=given).drafter == Chained(
        Suffix(num_speculative_tokens=5), then
    )
    any_ = resolve_speculation(speculative_config={"method": "chained", "model": "d"}).drafter
    assert any_ == Chained(Suffix(), DraftCheckpoint(model="d"))
    both = {"method": "ngram+draft", "prompt_lookup_min": 2, "model": "d", "revision": "r"}
    found = resolve_speculation(None, 3, both).drafter
    assert found == Chained(
        Ngram(num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=2),
        DraftCheckpoint(model="d", method="draft_model", num_speculative_tokens=3, revision="r"),
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": ["eagle3", "ngram"]}, "a chain is one of 'ngram', 'suffix', then the method"),
        ({"method": ["suffix"]}, "a chain is one of"),
        ({"method": "ngram+suffix"}, "a chain is one of"),
        ({"method": ["suffix", "eagle3"]}, "method 'eagle3' needs a model"),
        ({"method": "suffix+medusa", "prompt_lookup_min": 2}, "'suffix' and method 'medusa'"),
        ({"method": "suffix", "model": "m"}, "method 'suffix' needs no model, got 'm'"),
        ({"method": "ngram", "suffix_decoding_min_match": 2}, "does not belong to method 'ngram'"),
    ],
)
def test_chains_that_make_no_sense_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is compared)
        resolve_speculation(None, 2, config)
    assert message in str(caught.value)


def test_compat_and_trace_are_checked() -> None:
    assert EngineConfig().compat == "full"
    assert EngineConfig(trace=True).trace == "foretell-trace.jsonl"
    assert EngineConfig(trace=False).trace is None
    assert EngineConfig(trace="a.jsonl").trace == "a.jsonl"
    for wrong in ({"compat": "on"}, {"trace": 3}, {"trace": " "}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            EngineConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["dflash", "nonsense"])
def test_methods_that_do_not_exist_say_so(method: str) -> None:
    given = {"method": method, "model": "m", "num_speculative_tokens": 2}
    with pytest.raises(NotImplementedError, match=f"Unsupported speculative method: '{method}'"):
        resolve_speculation(speculative_config=given)


@pytest.mark.parametrize("key", sorted(MISSING))
def test_a_key_without_a_feature_is_refused_by_name_unless_it_is_off(key: str) -> None:
    with pytest.raises(ValueError, match=f"speculative_config key '{key}' is not supported"):
        resolve_speculation("draft", 2, {key: "something"})
    plain = resolve_speculation("draft", 2)
    assert all(resolve_speculation("draft", 2, {key: off}) == plain for off in MISSING[key].off)
    assert key not in KEYS


@pytest.mark.parametrize("name", sorted(arguments.MISSING))
def test_an_argument_without_a_feature_is_refused_by_name_unless_it_is_off(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='something' is not supported. "):
        arguments.refuse({name: "something"}, ["model"])
    for off in arguments.MISSING[name].off:
        arguments.refuse({name: off}, ["model"])


def test_an_unknown_argument_names_the_nearest_known_one() -> None:
    with pytest.raises(
        ValueError, match="LLM has no key 'max_model_length'; did you mean 'max_model_len'"
    ):
        arguments.refuse({"max_model_length": 5}, ["model", "max_model_len"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", 5),
        ("dtype", "int8"),
        ("device", "gpu"),
        ("device", "cpu:1"),
        ("device", "cuda:x"),
        ("seed", 1.5),
        ("max_model_len", 0),
        ("max_model_len", 100.0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("block_size", 24),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("kv_cache_memory_bytes", 0),
        ("enable_prefix_caching", "yes"),
        ("tensor_parallel_size", 0),
        ("scheduling_policy", "random"),
        ("max_logprobs", -2),
        ("acceptance", "greedy"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig.from_mapping({name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({1: 2}, "speculative_config has no key 1; known: "),
        ({"revision": 5}, "revision must be a branch, a tag or a commit, got 5"),
        ({"use_heterogeneous_vocab": "yes"}, "use_heterogeneous_vocab must be True or False"),
        ({"norm_before_residual": 1}, "norm_before_residual must be True or False, got 1"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused(given: dict[object, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_speculation("d", 2, given)  # type: ignore[arg-type]


def test_unknown_keys_name_the_nearest_known_one() -> None:
    with pytest.raises(
        ValueError, match="EngineConfig has no key 'max_seqs'; did you mean 'max_num_seqs'"
    ):
        EngineConfig.from_mapping({"max_seqs": 5})


def test_configurations_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().seed = 5  # type: ignore[misc]


def test_a_tree_given_as_lists_is_kept_as_tuples() -> None:
    config = EngineConfig(drafter=Ngram(num_speculative_tokens=2), tree=[-1, 0, 0])  # type: ignore[arg-type]
    assert config.tree == (-1, 0, 0)
    assert config.speculation == Speculation(config.drafter, "match", (-1, 0, 0))
    hash(config)


def test_a_tree_without_a_drafter_is_refused() -> None:
    with pytest.raises(ValueError, match="tree was given without a drafter"):
        EngineConfig(tree=(-1, 0))


def test_R28_the_draft_runs_on_one_device_or_on_all_of_the_targets() -> None:
    draft = DraftCheckpoint(model="d", num_speculative_tokens=2, tensor_parallel_size=2)
    assert EngineConfig(drafter=draft, tensor_parallel_size=2).drafter == draft
    with pytest.raises(
        ValueError, match="cannot be other than 1 or target model tensor_parallel_size=4"
    ):
        EngineConfig(drafter=draft, tensor_parallel_size=4)


def test_the_drafts_length_may_not_exceed_either_models() -> None:
    draft = DraftCheckpoint(model="d", num_speculative_tokens=2, max_model_len=100)
    assert draft.length_limit(200, 100) == 100
    assert DraftCheckpoint(model="d", num_speculative_tokens=2).length_limit(70, 100) == 70
    with pytest.raises(
        ValueError,
        match="speculative_max_model_len=100 cannot be larger than draft_max_model_len=50",
    ):
        draft.length_limit(50, 200)
    with pytest.raises(ValueError, match="cannot be larger than target_max_model_len=64"):
        EngineConfig(drafter=draft, max_model_len=64)


def test_a_drafter_with_weights_checks_what_it_is_given() -> None:
    made = DraftCheckpoint(model="m", num_speculative_tokens=MAX_DRAFT_TOKENS)
    assert made.num_speculative_tokens == 63
    with pytest.raises(ValueError, match="greater than zero"):
        DraftCheckpoint(model="m", num_speculative_tokens=0)
    with pytest.raises(ValueError, match="speculative model"):
        DraftCheckpoint(model="", num_speculative_tokens=1)
    with pytest.raises(ValueError, match="method must be one of"):
        DraftCheckpoint(model="m", method="eagel")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a model"):
        DraftCheckpoint()
