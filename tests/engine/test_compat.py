"""The start-up proof: a pair that belongs together passes, one that does not is told apart and its cause named."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import checkpoints as files
import oracle_files as oracles
import pytest
from tiny_tokenizers import byte_level

from foretell import LLM, SamplingParams
from foretell.spec.compat import CompatReport, SelfTest, compare_names

TARGET_LAYERS = 7
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracles.write_target(tmp_path_factory.mktemp("models") / "cycle")


def start(model: Path, drafter: Path | str | None, **more: object) -> LLM:
    settings: dict[str, object] = {
        "dtype": "float64",
        "device": "cpu",
        "kv_cache_memory_bytes": 32 << 20,
        "max_model_len": 160,
        "max_num_seqs": 4,
    }
    named = None if drafter is None else str(drafter)
    return LLM(str(model), speculate_model=named, **(settings | more))  # type: ignore[arg-type]


def proved(
    caplog: pytest.LogCaptureFixture, model: Path, drafter: Path, **more: object
) -> tuple[LLM, CompatReport, list[str]]:
    """The engine, its report, and the warnings of its start."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "foretell"):
        llm = start(model, drafter, **more)
    assert llm.compat is not None
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return llm, llm.compat, warned


def measured(report: CompatReport) -> SelfTest:
    assert report.self_test is not None
    return report.self_test


EXACT: dict[str, tuple[Callable[[Path], Path], dict[str, object]]] = {
    "medusa": (lambda f: oracles.write_medusa(f, 4), {}),
    "eagle1": (oracles.write_eagle1, {"method": "eagle1"}),
    "eagle2": (oracles.write_eagle1, {"method": "eagle2"}),
    "eagle3": (oracles.write_eagle3, {}),
    "eagle3 chain": (oracles.write_eagle3, {"num_speculative_tokens": 2}),
    "behind suffix decoding": (oracles.write_eagle3, {"method": "chained"}),
    "rope": (lambda f: oracles.write_looking_back(f, 3e4, 3e4), {"num_speculative_tokens": 4}),
}


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("name", EXACT)
def test_an_exact_drafter_passes(
    name: str, acceptance: str, tmp_path: Path, cycle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write, config = EXACT[name]
    given = config | {"acceptance": acceptance}
    llm, report, warned = proved(caplog, cycle, write(tmp_path / "d"), speculative_config=given)
    test = measured(report)
    assert report.ok
    assert warned == []
    assert report.causes == ()
    assert test.drafts == (12 if name == "rope" else 8), "as few as are needed"
    if name != "rope":  # which foresees nothing before three tokens of the cycle stand in the text
        assert test.accepted_length == pytest.approx(1 + test.depth)
    assert test.control is not None
    if name != "rope":  # which reads the text, not the features
        assert test.control < 1.5
    told = [r.getMessage() for r in caplog.records if "self-test" in r.getMessage()]
    assert len(told) == 1
    output = llm.generate({"prompt_token_ids": [3, 9, 4]}, GREEDY, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == [5 + i for i in range(12)]
    assert llm.get_metrics().prompt_tokens == 3, "the self-test is in no counter"
    json.dumps(report.as_dict())


def test_wrong_layers_are_named_with_the_right_ones(
    tmp_path: Path, cycle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = oracles.write_eagle3(tmp_path / "d", eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    _, report, warned = proved(caplog, cycle, folder, num_speculative_tokens=3)
    assert not report.ok
    assert measured(report).accepted_length < 1.15
    assert report.causes[0].startswith("wrong layers: 4.00 tokens a step if you pass target_layers")
    assert "[2, 3, 4]" in report.causes[0]
    (said,) = warned
    assert "does not seem to belong to this target" in said
    assert report.causes[0] in said
    fixed = {"target_layers": [2, 3, 4], "num_speculative_tokens": 3}
    assert proved(caplog, cycle, folder, speculative_config=fixed)[1].ok


def test_a_wrong_rope_base_is_named_with_the_right_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The published trap: a config without rope_theta is read as 10000, whatever the target has."""
    target = oracles.write_target(tmp_path / "target", rope_theta=500000.0)
    folder = oracles.write_looking_back(tmp_path / "d", None, 500000.0)
    _, report, warned = proved(caplog, target, folder, num_speculative_tokens=3)
    assert report.causes[0].startswith("wrong rope base: ")
    assert "rope_theta 500000" in report.causes[0]
    assert len(warned) == 1
    rope = next(check for check in report.checks if check.name == "rope")
    assert rope.detail == "base 10000, default (the target's is 500000, default)"
    right = oracles.write_looking_back(tmp_path / "e", 500000.0, 500000.0)
    assert proved(caplog, target, right, num_speculative_tokens=3)[1].ok


def test_heads_of_another_target_are_told_so(
    tmp_path: Path, cycle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = oracles.write_medusa(tmp_path / "d", 4, off=5)
    llm, report, warned = proved(caplog, cycle, folder)
    assert measured(report).accepted_length == 1.0
    assert report.causes[0].startswith("wrong target: the drafter was trained for another model")
    assert "trained for lmsys/vicuna-7b-v1.3" in report.causes[0]
    assert any("wrong template" in cause for cause in report.causes)
    assert len(warned) == 1
    output = llm.generate({"prompt_token_ids": [3, 9, 4]}, GREEDY, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == [5 + i for i in range(12)], "the text is right"


def test_another_tokenizer_is_named_with_both_strings(
    tmp_path: Path, cycle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = oracles.write_eagle3(tmp_path / "d")
    byte_level().save_pretrained(folder)
    _, report, _ = proved(caplog, cycle, folder, num_speculative_tokens=2)
    assert report.ok
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    names = {token: string for string, token in vocabulary.items()}
    vocabulary[names[7]], vocabulary[names[8]] = 8, 7
    path.write_text(json.dumps(content))
    _, report, warned = proved(caplog, cycle, folder, num_speculative_tokens=2)
    assert not report.ok
    (check,) = [check for check in report.checks if not check.holds]
    assert f"id 7 is {names[7]!r} in the target and {names[8]!r} in the drafter" in check.detail
    assert len(warned) == 1


@pytest.mark.parametrize("compat", ["off", "shapes", "full"])
def test_the_proof_is_as_long_as_was_asked_for(
    compat: str, tmp_path: Path, cycle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = oracles.write_medusa(tmp_path / "d", 4, off=5)
    with caplog.at_level(logging.INFO, "foretell"):
        llm = start(cycle, folder, compat=compat)
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warned) == (compat == "full")
    if compat == "off":
        assert llm.compat is None
        return
    assert llm.compat is not None
    assert (llm.compat.self_test is not None) == (compat == "full")
    names = [check.name for check in llm.compat.checks]
    assert names == ["shapes", "vocabulary", "tokenizer", "layers", "target"]


def test_what_needs_no_proof_has_none(cycle: Path) -> None:
    assert start(cycle, None).compat is None
    assert start(cycle, "ngram", num_speculative_tokens=3).compat is None
    assert start(cycle, "suffix").compat is None


def test_what_drafts_is_there_to_be_read(tmp_path: Path, cycle: Path) -> None:
    folder = oracles.write_eagle3(tmp_path / "d")
    given = {"method": "suffix+eagle3", "num_speculative_tokens": 3, "model": str(folder)}
    found = start(cycle, None, speculative_config=given).resolved
    assert (found.method, found.first) == ("eagle3", "suffix")
    assert found.checkpoint == str(folder)
    assert found.evidence == "a hidden_norm in the first layer"
    assert found.target_features == (2, 3, 4)
    assert found.tree.parents == (-1, 0, 1, 2)
    said = found.as_dict()
    assert said["method"] == "suffix+eagle3"
    assert any("target layers [2, 3, 4]" in note for note in found.notes)
    json.dumps(said)
    grown = start(cycle, folder).resolved
    assert grown.growth is not None
    assert grown.as_dict()["tree"]["kind"] == "grown"  # type: ignore[index]
    assert start(cycle, None).resolved.method == "none"
    assert start(cycle, "ngram", num_speculative_tokens=3).resolved.method == "ngram"


def test_a_draft_model_is_proved_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, sign in (("target", 1), ("other", -1)):
        byte_level().save_pretrained(tmp_path / name)
        config = files.llama_config(2, max_position_embeddings=512, eos_token_id=2)
        tensors = files.language_model(2)
        tensors["lm_head.weight"] = sign * tensors["lm_head.weight"]
        files.write(tmp_path / name, tensors, config, "model.safetensors")
    target = tmp_path / "target"
    _, report, warned = proved(caplog, target, target, num_speculative_tokens=4)
    assert report.ok
    assert measured(report).accepted_length == 4.0
    assert measured(report).control is None
    assert warned == []
    _, report, warned = proved(caplog, target, tmp_path / "other", num_speculative_tokens=4)
    assert not report.ok
    assert report.causes[0].startswith("wrong target")


def test_names_are_compared_by_what_they_say() -> None:
    assert compare_names(None, "x") is None
    same = compare_names("meta-llama/Llama-3.1-8B-Instruct", "/models/llama-3.1-8b-instruct/")
    assert same is not None
    assert "make sure" not in same.detail
    other = compare_names("lmsys/vicuna-7b-v1.3", "HuggingFaceTB/SmolLM2-135M")
    assert other is not None
    assert "this target is called HuggingFaceTB/SmolLM2-135M, make sure" in other.detail
