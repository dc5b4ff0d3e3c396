"""Options of foretell serve: vLLM's names, one file for server and engine, foreign options refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretell.cli import app
from foretell.commands.serve import ServeOptions, named_model, settings_of
from foretell.configfile import read_config
from foretell.server.settings import ServerSettings


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nhost: a\napi-key: k\nmax-queue: 7\nmodel: m\ndtype: float32\n")
    said = ServeOptions(port=2).merged(read_config(str(file)))
    assert (said["port"], said["host"], said["api_key"], said["max_queue"]) == (2, "a", ["k"], 7)
    settings = settings_of(said, "m")
    assert settings == ServerSettings(model_names=("m",), api_keys=("k",), max_queue=7)


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert settings_of({}, "m").api_keys == ("v",)
    monkeypatch.setenv("FORETELL_API_KEY", "f")
    assert settings_of({}, "m").api_keys == ("f",)
    assert settings_of({"api_key": ["o"]}, "m").api_keys == ("o",)


def test_the_model_stands_among_foreign_options() -> None:
    assert named_model([]) is None
    assert named_model(["m"]) == "m"
    assert named_model(["m", "--swap-space", "0"]) == "m"
    assert named_model(["--enable-chunked-prefill", "m"]) == "m"
    assert named_model(["m", "--kv-cache-dtype=auto", "--disable-log-stats"]) == "m"
    assert named_model(["--enable-server-load-tracking", "m", "--stream-interval", "1"]) == "m"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--swap-space", "4"], "--swap-space 4 is not supported"),
        (["--trust-remote-code"], "No code is loaded"),
        (["--enable-lora", "m"], "Merge the adapter"),
        (["--pipeline-parallel-size=2"], "--pipeline-parallel-size 2 is not supported"),
        (["--no-async-scheduling"], "plans ahead"),
        (["--porrt", "3"], "did you mean 'port'"),
        (["--max-log-len", "3"], "Prompts are not logged"),
        (["--per-request-spec-decode-metrics", "summary"], "speculation_metrics"),
        (["a", "b"], "one model"),
    ],
)
def test_foreign_options_are_refused_with_what_to_do(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        named_model(words)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_queue": -1}, "max_queue"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"request_timeout": 0.0}, "request_timeout"),
        ({"metrics_prefix": "x:"}, "metrics_prefix"),
        ({"tool_call_parser": "xml"}, "tool_parser"),
        ({"reasoning_parser": "x"}, "reasoning_parser"),
        ({"api_key": [""]}, "api_key"),
        ({"served_model_name": [""]}, "served_model_name"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings_of(wrong, "m")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    ran = CliRunner().invoke(app, ["serve", "nothing"])
    assert ran.exit_code == 1
    assert "pip install 'foretell[serve]'" in ran.stderr
    assert "fastapi is missing" in ran.stderr
