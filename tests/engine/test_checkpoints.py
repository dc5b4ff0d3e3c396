"""From `LLM(model=..., speculate_model=...)` to text, for every drafter checkpoint: found out, exact, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import checkpoints as files
import oracle_files as oracles
import pytest
import torch
from oracles import V as CYCLE
from tiny_tokenizers import byte_level

from foretell import LLM, RequestOutput, SamplingParams
from foretell.metrics import Metrics

TARGET_LAYERS = 7
PROMPTS = [{"prompt_token_ids": list(range(5 + 7 * i, 17 + 9 * i))} for i in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=14)


def write_model(folder: Path, layers: int = 1, **more: object) -> Path:
    """A small language model with its tokenizer."""
    byte_level().save_pretrained(folder)
    settings: dict[str, object] = {"max_position_embeddings": 512, "eos_token_id": 2}
    config = files.llama_config(layers, **(settings | more))
    return files.write(folder, files.language_model(layers), config, "model.safetensors")


def write_drafter(folder: Path, name: str) -> Path:
    if name == "draft model":
        return write_model(folder)
    return files.write(folder, *files.FORMATS[name]())


def start(model: Path | str, drafter: Path | str | None = None, **more: object) -> LLM:
    settings: dict[str, object] = {
        "dtype": "float64",
        "device": "cpu",
        "kv_cache_memory_bytes": 32 << 20,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
    }
    named = None if drafter is None else str(drafter)
    if named is not None or "speculative_config" in more:  # what is drafted, not what is worth it
        given = more.get("speculative_config") or {}
        assert isinstance(given, dict)
        more["speculative_config"] = {"adaptive": False} | given
    return LLM(str(model), speculate_model=named, **(settings | more))  # type: ignore[arg-type]


def texts(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def refused(*arguments: Path | str, **more: object) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the callers compare the text)
        start(*arguments, **more)
    return str(caught.value)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "target", TARGET_LAYERS)


@pytest.fixture(scope="module")
def plain(target: Path) -> dict[str, list[list[int]]]:
    llm = start(target)
    return {"greedy": texts(llm, GREEDY), "sampled": texts(llm, SAMPLED)}


FAMILIES = {name: name.split()[0] for name in files.FORMATS} | {
    "speculators": "eagle3",
    "draft model": "draft_model",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_checkpoint_is_found_out_and_the_text_is_that_of_plain_decoding(
    name: str,
    tmp_path: Path,
    target: Path,
    plain: dict[str, list[list[int]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write_drafter(tmp_path / "drafter", name)
    count = {"num_speculative_tokens": 3} if name == "draft model" else {}
    with caplog.at_level(logging.INFO, "foretell"):
        llm = start(target, folder, **count)
    told = [r.getMessage() for r in caplog.records]
    assert sum(f"drafter: {FAMILIES[name]}, by " in line for line in told) == 1, told
    assert sum("tree: " in line for line in told) == 1, told
    assert texts(llm, GREEDY) == plain["greedy"]
    assert texts(llm, SAMPLED) == plain["sampled"]
    assert llm.get_metrics().num_drafts > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_guides_two_words_are_enough_for_every_checkpoint(
    name: str, tmp_path: Path, target: Path, plain: dict[str, list[list[int]]]
) -> None:
    folder = write_drafter(tmp_path / "drafter", name)
    llm = start(
        target, folder, num_speculative_tokens=3, speculative_config={"acceptance": "rejection"}
    )
    assert texts(llm, GREEDY) == plain["greedy"]
    counted = llm.get_metrics()
    assert counted.num_drafts > 0
    if not name.startswith("medusa") or name in ("medusa vllm", "medusa token map"):
        assert counted.num_draft_tokens <= 3 * counted.num_drafts, "a chain of three"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("medusa pt", {"tree": "mc_sim_7b_63"}),
        ("medusa pt", {"tree": "vicuna_7b_stage2", "num_speculative_tokens": 2}),
        ("medusa pt", {"tree": [[0], [1], [0, 0]], "method": "medusa"}),
        ("eagle bin", {"tree": "eagle", "method": "eagle1"}),
        ("eagle bin", {"tree": {"top_k": 4, "depth": 3, "nodes": 10}, "method": "eagle2"}),
        ("eagle3", {"tree": {"top_k": 10, "depth": 7, "nodes": 60}}),
        ("eagle3", {"tree": "chain", "num_speculative_tokens": 5, "method": "eagle3"}),
        ("mtp mimo", {"method": "mimo_mtp", "num_speculative_tokens": 2}),
        ("pard", {"tree": [-1, 0, 0, 1]}),
        ("pard", {"method": "draft_model", "num_speculative_tokens": 3}),
        ("draft model", {"tree": [-1, 0, 0, 1], "draft_sample_method": "greedy"}),
        ("draft model", {"tree": "eagle"}),
    ],
)
def test_any_tree_gives_the_text_of_plain_decoding(
    name: str,
    config: dict[str, object],
    tmp_path: Path,
    target: Path,
    plain: dict[str, list[list[int]]],
) -> None:
    folder = write_drafter(tmp_path / "drafter", name)
    if name == "pard":
        byte_level().save_pretrained(folder)
    llm = start(target, folder, speculative_config=config)
    assert texts(llm, GREEDY) == plain["greedy"]
    assert texts(llm, SAMPLED) == plain["sampled"]
    assert llm.get_metrics().num_drafts > 0


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("first", ["suffix", "ngram"])
def test_every_checkpoint_may_stand_second_in_a_chain(
    name: str, first: str, tmp_path: Path, target: Path, plain: dict[str, list[list[int]]]
) -> None:
    folder = write_drafter(tmp_path / "drafter", name)
    config: dict[str, object] = {"method": [first, FAMILIES[name]], "num_speculative_tokens": 3}
    if first == "ngram":
        config |= {"prompt_lookup_min": 1}
    llm = start(target, folder, speculative_config=config)
    for _ in range(2):  # the second time, suffix decoding has seen all of it
        assert texts(llm, GREEDY) == plain["greedy"]
        assert texts(llm, SAMPLED) == plain["sampled"]
    assert llm.get_metrics().num_accepted_tokens > 0


def test_suffix_decoding_needs_no_checkpoint(
    target: Path, plain: dict[str, list[list[int]]]
) -> None:
    llm = start(target, "suffix")
    assert texts(llm, GREEDY) == plain["greedy"]
    before = llm.get_metrics()
    assert texts(llm, GREEDY) == plain["greedy"]
    again = llm.get_metrics().since(before)
    assert again.mean_acceptance_length > 2, "past outputs are foreseen"


def test_past_outputs_are_not_drafted_from_where_the_draft_is_judged_by_their_noise(
    target: Path, plain: dict[str, list[list[int]]]
) -> None:
    """Under rejection a request of the same seed would be judged by the numbers that made its draft."""
    llm = start(target, "suffix", speculative_config={"acceptance": "rejection"})
    first = texts(llm, SAMPLED)
    before = llm.get_metrics()
    assert texts(llm, SAMPLED) == first, "the same seed gives the same text, whatever ran before"
    assert llm.get_metrics().since(before).num_drafts == before.num_drafts
    assert texts(llm, GREEDY) == plain["greedy"]


# Exact drafters, from files.


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracles.write_target(tmp_path_factory.mktemp("models") / "cycle")


def count_up(llm: LLM, tokens: int = 61) -> Metrics:
    """Checks that the text counts up, and returns what was counted."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    output: RequestOutput = llm.generate({"prompt_token_ids": [3, 9, 4]}, params, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == [(5 + i) % CYCLE for i in range(tokens)]
    return llm.get_metrics()


@pytest.mark.parametrize(
    ("write", "config", "length"),
    [
        (lambda f: oracles.write_medusa(f, 4), {}, 5),
        (lambda f: oracles.write_medusa(f, 5), {"num_speculative_tokens": 5}, 5),
        (lambda f: oracles.write_medusa(f, 5), {"num_speculative_tokens": 2}, 3),
        (lambda f: oracles.write_medusa(f, 5), {"num_speculative_tokens": 5, "tree": "chain"}, 6),
        (oracles.write_eagle1, {"method": "eagle1"}, 6),
        (oracles.write_eagle1, {"method": "eagle2"}, 7),
        (oracles.write_eagle1, {"num_speculative_tokens": 4}, 5),
        (oracles.write_eagle3, {}, 9),
        (oracles.write_eagle3, {"num_speculative_tokens": 7}, 8),
        (oracles.write_eagle3, {"tree": {"top_k": 3, "depth": 4, "nodes": 12}}, 5),
        (
            oracles.write_eagle3,
            {"target_layers": [2, 3, 4], "tree": "chain", "num_speculative_tokens": 3},
            4,
        ),
        (
            lambda f: oracles.write_eagle3(f, eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
            {"num_speculative_tokens": 3},
            4,
        ),
        (
            lambda f: oracles.write_eagle3(f, eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
            {"num_speculative_tokens": 3, "target_layers_convention": "after"},
            4,
        ),
    ],
)
def test_an_exact_checkpoint_reaches_its_full_depth(
    write: Callable[[Path], Path],
    config: dict[str, object],
    length: int,
    tmp_path: Path,
    cycle: Path,
) -> None:
    llm = start(cycle, write(tmp_path / "drafter"), speculative_config=config)
    assert count_up(llm, 1 + 12 * length).mean_acceptance_length == pytest.approx(length)


@pytest.mark.parametrize("count", [None, 1, 3, 5])
@pytest.mark.parametrize("named", [False, True])
def test_an_exact_mtp_layer_inside_its_target_reaches_its_full_depth(
    named: bool, count: int | None, tmp_path: Path
) -> None:
    """MiMo's own checkpoint drafts for itself; its one layer is used again for every further token."""
    folder = oracles.write_mimo(tmp_path / "mimo")
    config: dict[str, object] = {"method": "mtp"} if named else {"model": str(folder)}
    if count is not None:
        config["num_speculative_tokens"] = count
    length = 1 + (count or 1)
    llm = start(folder, speculative_config=config)
    assert llm.resolved.method == "mtp"
    # The first draft stands on a prompt that does not count up: its feature is not that of the token before.
    counted = count_up(llm, 2 + 12 * length)
    assert counted.num_verified_tokens == 1 + 12 * length
    assert counted.num_drafts == 13
    assert llm.compat is not None
    assert llm.compat.ok


def test_the_wrong_convention_of_target_layers_accepts_almost_nothing(
    tmp_path: Path, cycle: Path
) -> None:
    folder = oracles.write_eagle3(tmp_path / "d", eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    assert count_up(start(cycle, folder, num_speculative_tokens=3)).mean_acceptance_length < 1.5


# Drafters that come with the target.


def test_a_speculators_drafter_given_as_the_model_serves_its_target(
    tmp_path: Path, target: Path, plain: dict[str, list[list[int]]]
) -> None:
    config = files.speculators_config()
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)  # type: ignore[index]
    folder = files.write(
        tmp_path / "drafter", files.eagle3(first="layers.0."), config, "model.safetensors"
    )
    for given, depth in (({}, 3), ({"num_speculative_tokens": 5}, 5)):
        llm = start(folder, speculative_config=given)
        assert texts(llm, GREEDY) == plain["greedy"]
        counted = llm.get_metrics()
        assert counted.num_draft_tokens <= depth * counted.num_drafts
        assert counted.num_draft_tokens > (depth - 1) * counted.num_drafts
    assert "another drafter was given too" in refused(folder, target, num_speculative_tokens=2)
    config["speculators_config"]["verifier"] = {}  # type: ignore[index]
    files.write(folder, {}, config, "other.safetensors")
    assert "names no verifier" in refused(folder)


def test_mtp_needs_no_model_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "mimo"
    byte_level().save_pretrained(folder)
    config = files.mimo_mtp_config(num_hidden_layers=1, eos_token_id=2)
    files.write(folder, files.mimo_mtp(), config, "model.safetensors")
    without = start(folder)
    llm = start(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    for params in (GREEDY, SAMPLED):
        assert texts(llm, params) == texts(without, params)
    assert llm.get_metrics().num_drafts > 0
    same = start(folder, folder)
    assert texts(same, GREEDY) == texts(without, GREEDY)
    assert same.get_metrics().num_drafts > 0


def test_heads_in_a_full_medusa_model_need_no_model_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "medusa"
    byte_level().save_pretrained(folder)
    tensors = files.language_model(2) | files.medusa(prefix="medusa_head.")
    config = files.llama_config(2, medusa_num_heads=5, medusa_num_layers=1, eos_token_id=2)
    files.write(folder, tensors, config, "model.safetensors")
    without = start(folder)
    for given in ({"method": "medusa"}, {"model": str(folder), "num_speculative_tokens": 3}):
        llm = start(folder, speculative_config=given)
        assert texts(llm, SAMPLED) == texts(without, SAMPLED)
        assert llm.get_metrics().num_drafts > 0


def test_the_targets_without_heads_say_so(target: Path) -> None:
    for method in ("mtp", "medusa"):
        said = refused(target, speculative_config={"method": method})
        assert f"method '{method}' was given, but target is a checkpoint of 'draft_model'" in said


# What is refused.


def test_R36_a_method_that_the_checkpoint_is_not_is_refused_with_both(
    tmp_path: Path, target: Path
) -> None:
    eagle3 = write_drafter(tmp_path / "a", "eagle3")
    said = refused(target, eagle3, speculative_config={"method": "eagle"})
    assert "'eagle' was given, but a is a checkpoint of 'eagle3'" in said
    model = write_model(tmp_path / "my-eagle-draft")
    said = refused(target, model, speculative_config={"method": "medusa"})
    assert "'medusa' was given, but my-eagle-draft is a checkpoint of 'draft_model'" in said
    named = {"method": "draft_model", "num_speculative_tokens": 2}
    assert texts(start(target, model, speculative_config=named), GREEDY)


def test_R36_a_drafter_that_is_not_there_is_refused(tmp_path: Path, target: Path) -> None:
    said = refused(target, tmp_path / "nowhere", num_speculative_tokens=3)
    assert said.startswith("speculative model ")
    assert "nowhere" in said
    assert "does not exist" in said


def test_paths_and_dtypes_may_be_objects(target: Path, plain: dict[str, list[list[int]]]) -> None:
    llm = LLM(
        target,
        speculate_model=target,
        num_speculative_tokens=2,
        tokenizer=target,
        dtype=torch.float64,
        max_model_len=160,
        kv_cache_memory_bytes=32 << 20,
    )
    assert llm.config.dtype == "float64"
    assert texts(llm, GREEDY) == plain["greedy"]


def test_what_is_wrong_is_said_of_the_right_file(target: Path, tmp_path: Path) -> None:
    assert "tokenizer: model '/nowhere' does not exist" in refused(target, tokenizer="/nowhere")
    assert "there is no config.json; is it a model's directory?" in refused(tmp_path)
    assert "chat_template must be Jinja text" in refused(target, chat_template=5)
    assert "dtype must be one of" in refused(target, dtype=torch.int8)


def test_an_end_token_that_the_model_does_not_have_ends_nothing(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", eos_token_id=[2, 10**6])
    params = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=6)
    assert all(len(tokens) >= 4 for tokens in texts(start(folder), params))


def test_more_than_one_device_is_refused_and_not_ignored(target: Path) -> None:
    assert "tensor_parallel_size=2 is not supported" in refused(target, tensor_parallel_size=2)


def test_a_text_longer_than_the_model_was_made_for_is_refused(target: Path) -> None:
    said = refused(target, max_model_len=513)
    assert (
        "User-specified max_model_len (513) is greater than the derived max_model_len (512)" in said
    )
    assert len(start(target, max_model_len=512).generate("a", GREEDY, use_tqdm=False)) == 1


def test_a_model_that_leaves_no_memory_for_text_is_refused_with_the_numbers(target: Path) -> None:
    said = refused(target, kv_cache_memory_bytes=1000)
    assert "max_model_len=160 needs 0.3 MiB of KV cache, but 0.0 MiB are left beside" in said
    said = refused(target, kv_cache_memory_bytes=1000, max_model_len=None)
    assert "max_model_len=1 needs" in said


def test_a_draft_model_needs_a_number_of_tokens(tmp_path: Path, target: Path) -> None:
    said = refused(target, write_model(tmp_path / "draft"))
    assert said.startswith("num_speculative_tokens must be provided with speculative model unless")


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "eagle3",
            {"target_layer": [1]},
            "has no key 'target_layer'; did you mean 'target_layers'",
        ),
        ("eagle3", {"tree": "eagel"}, "tree preset 'eagel' is unknown; known are eagle, mc_sim"),
        ("eagle3", {"tree": [[0], [1, 0]]}, "has a gap: [1] is not in the tree"),
        ("eagle3", {"tree": {"depth": 70}}, "tree: depth must be between 1 and 63, got 70"),
        ("eagle3", {"target_layers": [2, 3, 9]}, "within the target's 7 layers"),
        ("eagle3", {"use_heterogeneous_vocab": True}, "belongs to 'draft_model', but d is"),
        ("medusa pt", {"target_layers": [1]}, "target_layers belongs to 'eagle3', but d is"),
        ("medusa pt", {"num_speculative_tokens": 6}, "needs 6 Medusa heads, the checkpoint has 5"),
        ("medusa pt", {"tree": [-1, 0, 1, 2, 3, 4, 5]}, "needs 6 Medusa heads"),
        ("medusa pt", {"tree": {"depth": 3}}, "need an EAGLE drafter, d is medusa"),
        ("mlp_speculator", {"num_speculative_tokens": 4}, "more than the n_predict=3"),
        ("draft model", {"tree": {"depth": 3}}, "trees that grow need an EAGLE drafter"),
    ],
)
def test_what_does_not_apply_is_refused_by_name(
    name: str, config: dict[str, object], message: str, tmp_path: Path, target: Path
) -> None:
    folder = write_drafter(tmp_path / "d", name)
    assert message in refused(target, folder, speculative_config=config)


def test_the_guides_trouble_with_medusa_num_heads_has_a_remedy(
    tmp_path: Path, target: Path
) -> None:
    folder = write_drafter(tmp_path / "d", "medusa pt")
    config = files.medusa_config()
    del config["medusa_num_heads"]
    files.write(folder, files.medusa(), config, "medusa_lm_head.pt")
    said = refused(target, folder, num_speculative_tokens=5)
    assert "no medusa_num_heads" in said
    assert 'add "medusa_num_heads": 5' in said


def test_heads_for_another_target_are_refused_before_they_draft(
    tmp_path: Path, target: Path
) -> None:
    folder = files.write(
        tmp_path / "d", files.medusa(hidden=48), files.medusa_config(), "medusa_lm_head.pt"
    )
    assert "hidden size 48 cannot draft for a target of hidden size 32" in refused(target, folder)


# Texts longer than the drafter was made for.


def test_drafts_stop_where_the_drafter_ends_and_the_request_goes_on(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    byte_level().save_pretrained(tmp_path / "short")
    config = files.llama_config(1, max_position_embeddings=40)
    short = files.write(tmp_path / "short", files.language_model(), config, "model.safetensors")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    with caplog.at_level(logging.INFO, "foretell"):
        llm = start(target, short, num_speculative_tokens=4)
    assert any("drafts stop at 40 tokens of text" in r.getMessage() for r in caplog.records)
    assert texts(llm, params) == texts(start(target), params)
    counted = llm.get_metrics()
    longest = sum(max(0, 40 - len(p["prompt_token_ids"])) for p in PROMPTS)
    assert 0 < counted.num_drafts <= longest
    said = refused(
        target, short, num_speculative_tokens=4, speculative_config={"max_model_len": 50}
    )
    assert "speculative_max_model_len=50 cannot be larger than draft_max_model_len=40" in said


def test_the_likeliest_drafts_change_no_text(
    tmp_path: Path, target: Path, plain: dict[str, list[list[int]]]
) -> None:
    draft = write_model(tmp_path / "draft")
    config = {"draft_sample_method": "greedy", "acceptance": "rejection"}
    llm = start(target, draft, num_speculative_tokens=3, speculative_config=config)
    assert texts(llm, GREEDY) == plain["greedy"]
    assert llm.get_metrics().num_drafts > 0


def test_the_library_shows_nothing_while_it_loads(
    tmp_path: Path, target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start(target, write_drafter(tmp_path / "d", "eagle3"))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
