"""--config: what is in the file reaches LLM, and what stands on the line wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.configfile import read_config, write_config
from foretell.options import EngineOptions

ARGUMENTS = {
    "model": "models/target",
    "dtype": "bfloat16",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "tree": [[0], [1]]},
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "deep" / "engine.yaml"
    write_config(path, ARGUMENTS, comments="speed-up 1.4\n\nsecond line")
    return str(path)


def test_what_is_written_is_read_back(file: str) -> None:
    assert read_config(file) == ARGUMENTS
    assert Path(file).read_text("utf-8").startswith("# speed-up 1.4\n#\n# second line\n")
    assert EngineOptions(config=file).arguments() == ARGUMENTS


def test_options_on_the_line_win(file: str) -> None:
    options = EngineOptions(config=file, dtype="float32", max_num_seqs=4)
    assert options.arguments() == {**ARGUMENTS, "dtype": "float32", "max_num_seqs": 4}


def test_a_draft_length_on_the_line_keeps_the_drafter_of_the_file(file: str) -> None:
    found = EngineOptions(config=file, num_speculative_tokens=5).arguments()
    assert found["speculative_config"] == {
        **ARGUMENTS["speculative_config"],  # type: ignore[dict-item]
        "num_speculative_tokens": 5,
    }
    assert "num_speculative_tokens" not in found


def test_a_drafter_on_the_line_replaces_all_speculation_of_the_file(file: str) -> None:
    found = EngineOptions(config=file, speculate_model="draft").arguments()
    assert found == {"model": "models/target", "dtype": "bfloat16", "speculate_model": "draft"}


def test_plain_drops_the_drafter_of_the_file_too(file: str) -> None:
    options = EngineOptions(config=file)
    assert options.drafts
    assert options.method == "ngram"
    assert options.without_drafts().arguments() == {"model": "models/target", "dtype": "bfloat16"}
    assert not options.without_drafts().drafts


def test_keys_may_have_dashes(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max-num-seqs: 4\n")
    assert read_config(str(path)) == {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "must map"), ("a: [1\n", "is not YAML"), ("1: 2\n", "must map")],
)
def test_a_file_that_is_no_config_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_config(str(path))
    assert str(path) in str(error.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml: there is no such file"):
        EngineOptions(config="nowhere.yaml").arguments()


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert read_config(str(path)) == {}
