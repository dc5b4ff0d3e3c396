"""What holds when no SamplingParams are given: the model's own defaults, where it brings some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.defaults import sampling_defaults
from foretell.sampling_params import SamplingParams


def write(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text, "utf-8")
    return folder


def test_without_a_file_the_plain_defaults_hold(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingParams()
    assert sampling_defaults(tmp_path / "model.gguf") == SamplingParams()


def test_the_models_values_are_taken_and_the_rest_is_left(tmp_path: Path) -> None:
    given = {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_new_tokens": 99,
        "do_sample": True,
        "eos_token_id": [1, 2],
        "min_p": None,
    }
    expected = SamplingParams(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, max_tokens=99
    )
    assert sampling_defaults(write(tmp_path, json.dumps(given))) == expected


@pytest.mark.parametrize("text", ["{", "[]", '{"top_p": 7}', '{"temperature": "hot"}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be used"):
        sampling_defaults(write(tmp_path, text))
