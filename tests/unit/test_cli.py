"""The command line with a made engine: what is printed where, exit codes, Ctrl-C, bad input.

Not a test of generation: the engine here answers from a list.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretell import cli, demo
from foretell.config import EngineConfig
from foretell.metrics import Metrics
from foretell.options import EngineOptions, SamplingOptions
from foretell.outputs import CompletionOutput, RequestMetrics, RequestOutput
from foretell.sampling_params import SamplingParams

WORDS = ["The", " capital", " is", " Paris", "."]


def output(request_id: str, prompt: str, words: Sequence[str], finish: str | None) -> RequestOutput:
    answer = CompletionOutput(0, "".join(words), list(range(len(words))), finish_reason=finish)
    times = RequestMetrics(arrival_time=0.0)
    return RequestOutput(request_id, prompt, [1, 2], None, [answer], finish is not None, times)


class FakeLLM:
    """Answers WORDS to everything, one word a step; drafts pay two accepted tokens an answer."""

    def __init__(self, drafts: bool = False, stop_after: int | None = None) -> None:
        self.drafts = drafts
        self.stop_after = stop_after  # Ctrl-C after that many outputs
        self.words = WORDS
        self.closed = False
        self.seen: list[tuple[Any, SamplingParams]] = []
        self.metrics = Metrics()

    def stream(self, prompts: Any, params: SamplingParams) -> Generator[RequestOutput]:
        self.seen.append((prompts, params))
        sent = 0
        try:
            for count in range(1, len(self.words) + 1):
                for place in reversed(range(len(prompts))):
                    if sent == self.stop_after:
                        raise KeyboardInterrupt
                    sent += 1
                    finish = "stop" if count == len(self.words) else None
                    yield output(str(place), prompts[place], self.words[:count], finish)
            self.count()
        finally:
            self.closed = True

    def stream_chat(self, messages: Any, params: SamplingParams) -> Generator[RequestOutput]:
        self.seen.append(([dict(m) for m in messages], params))
        yield from self.stream([messages[-1]["content"]], params)

    def chat(self, messages: Any, params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.seen.append((messages, params))
        self.count()
        return [output("0", messages[-1]["content"], self.words, "stop")]

    def count(self) -> None:
        if self.drafts:
            self.metrics = replace(
                self.metrics,
                num_drafts=self.metrics.num_drafts + 1,
                num_draft_tokens=self.metrics.num_draft_tokens + 4,
                num_accepted_tokens=self.metrics.num_accepted_tokens + 2,
                num_verified_tokens=self.metrics.num_verified_tokens + 3,
            )

    def get_metrics(self) -> Metrics:
        return self.metrics


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Invoke the command line; `llm` is what opening a model gives."""

    def invoke(*arguments: str, llm: FakeLLM | None = None, stdin: str | None = None) -> Any:
        opened = llm or FakeLLM()

        def open_llm(engine: EngineOptions) -> FakeLLM:
            engine.arguments()
            opened.drafts = engine.drafts or opened.drafts
            return opened

        monkeypatch.setattr(cli, "open_llm", open_llm)
        return CliRunner().invoke(cli.app, list(arguments), input=stdin)

    return invoke


def test_generate_prints_the_text_alone_on_stdout(run: Callable[..., Any]) -> None:
    result = run("generate", "What?")
    assert result.exit_code == 0
    assert result.stdout == "The capital is Paris.\n"
    assert "5 tokens" in result.stderr


def test_generate_streams_every_piece_as_it_lands() -> None:
    pieces: list[str] = []
    show = cli.StreamedText(pieces.append)
    for count in range(1, 6):
        show(output("0", "What?", WORDS[:count], "stop" if count == 5 else None))
    assert pieces == ["The", " capital", " is", " Paris", ".\n"]


def test_generate_json_is_one_object_and_nothing_else(run: Callable[..., Any]) -> None:
    result = run("generate", "What?", "--json", llm=FakeLLM(drafts=True))
    record = json.loads(result.stdout)
    assert record["requests"][0]["outputs"][0] == {
        "text": "The capital is Paris.",
        "token_ids": [0, 1, 2, 3, 4],
        "finish_reason": "stop",
    }
    assert record["completion_tokens"] == 5
    assert record["speculation"]["accepted"] == 2
    assert record["speculation"]["mean_acceptance_length"] == 3.0


def test_generate_reads_the_prompt_from_stdin(run: Callable[..., Any]) -> None:
    llm = FakeLLM()
    assert run("generate", llm=llm, stdin="from a pipe").exit_code == 0
    assert llm.seen[0][0] == ["from a pipe"]


def test_several_prompts_come_back_in_the_order_given(run: Callable[..., Any]) -> None:
    record = json.loads(run("generate", "one", "two", "three", "--json").stdout)
    assert [r["prompt"] for r in record["requests"]] == ["one", "two", "three"]


def test_options_reach_sampling_params(run: Callable[..., Any]) -> None:
    llm = FakeLLM()
    flags = (
        "-t 0.7 --top-p 0.9 --top-k 40 --min-p 0.05 --max-tokens 12 --seed 3 --stop END --stop X"
    )
    assert run("generate", "What?", *flags.split(), llm=llm).exit_code == 0
    params = llm.seen[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 40, 0.05)
    assert (params.max_tokens, params.seed, params.stop_strings) == (12, 3, ("END", "X"))


def test_options_reach_llm_and_what_is_left_out_is_not_passed() -> None:
    assert EngineOptions().arguments() == {}
    given = EngineOptions(model="m", speculate_model="d", num_speculative_tokens=5, max_num_seqs=2)
    assert given.arguments() == {
        "model": "m",
        "speculate_model": "d",
        "num_speculative_tokens": 5,
        "max_num_seqs": 2,
    }


def test_every_engine_option_is_a_field_of_the_engine_config() -> None:
    known = {f.name for f in fields(EngineConfig)}
    words = {"speculate_model", "num_speculative_tokens", "spec_method", "speculative_config"}
    words |= {"config", "plain"}
    assert {f.name for f in fields(EngineOptions)} - words <= known


def test_every_sampling_option_is_a_field_of_sampling_params_with_a_sane_default() -> None:
    known = {f.name for f in fields(SamplingParams)}
    assert {f.name for f in fields(SamplingOptions)} <= known
    assert SamplingOptions().params().greedy


def test_spec_method_is_a_short_form_of_speculative_config() -> None:
    short = EngineOptions(spec_method="ngram", num_speculative_tokens=4)
    long = EngineOptions(speculative_config='{"method": "ngram", "num_speculative_tokens": 4}')
    assert short.arguments() == long.arguments()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature", "-1"], "temperature must be non-negative, got -1.0."),
        (["--top-p", "0"], "top_p must be in (0, 1], got 0.0."),
        (["--max-tokens", "0"], "max_tokens must be at least 1, got 0."),
        (["--stop", ""], "stop cannot contain an empty string."),
        (["--speculative-config", "{method: ngram}"], "--speculative-config is not JSON"),
        (["--speculative-config", "[1]"], "--speculative-config must be a JSON object"),
        (["--spec-method", "ngram", "-sc", '{"method": "eagle"}'], "disagree"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Callable[..., Any], flags: list[str], said: str
) -> None:
    result = run("generate", "What?", *flags)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("foretell: error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_empty_prompt_is_refused(run: Callable[..., Any]) -> None:
    result = run("generate", "")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "the prompt is empty" in result.stderr


def test_an_unknown_option_is_exit_code_2(run: Callable[..., Any]) -> None:
    assert run("generate", "What?", "--no-such-option").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("model: no such\n  thing"), 2),
        (FileNotFoundError("no file m.gguf"), 2),
        (NotImplementedError("Unsupported speculative method: 'x'"), 2),
        (RuntimeError("out of memory"), 1),
        (MemoryError(), 1),
    ],
)
def test_errors_are_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def broken(engine: EngineOptions) -> None:
        raise error

    monkeypatch.setattr(cli, "open_llm", broken)
    result = CliRunner().invoke(cli.app, ["generate", "What?"])
    assert result.exit_code == code
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_a_character_that_the_terminal_lacks_is_no_error(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    narrow = shown.open("w", encoding="ascii")
    with narrow, redirect_stdout(narrow), cli.errors_as_lines():
        cli.StreamedText()(output("0", "say it", ["naïve 👍"], "stop"))
    assert shown.read_text("ascii") == "na?ve ?\n"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, foretell.cli; sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: EngineOptions) -> None:
        raise AssertionError((1, 2))

    monkeypatch.setattr(cli, "open_llm", broken)
    result = CliRunner().invoke(cli.app, ["generate", "What?"])
    assert isinstance(result.exception, AssertionError)


def test_ctrl_c_keeps_the_text_so_far_and_exits_130(run: Callable[..., Any]) -> None:
    llm = FakeLLM(stop_after=3)
    result = run("generate", "What?", llm=llm)
    assert result.exit_code == 130
    assert result.stdout == "The capital is\n"
    assert llm.closed


def test_ctrl_c_in_json_reports_the_text_so_far_as_aborted(run: Callable[..., Any]) -> None:
    result = run("generate", "What?", "--json", llm=FakeLLM(stop_after=2))
    record = json.loads(result.stdout)
    assert (result.exit_code, record["interrupted"]) == (130, True)
    answer = record["requests"][0]["outputs"][0]
    assert (answer["text"], answer["finish_reason"]) == ("The capital", "abort")


def test_ctrl_c_with_several_prompts_prints_the_unfinished_ones(run: Callable[..., Any]) -> None:
    result = run("generate", "one", "two", llm=FakeLLM(stop_after=3))
    assert result.exit_code == 130
    assert "=== one\nThe\n" in result.stdout
    assert "=== two\nThe capital\n" in result.stdout


def test_chat_remembers_the_conversation_until_reset(run: Callable[..., Any]) -> None:
    llm = FakeLLM()
    result = run(
        "chat", "--system", "Be brief.", llm=llm, stdin="one\n\ntwo\n/reset\nthree\n/exit\n"
    )
    assert result.exit_code == 0
    assert result.stdout == "The capital is Paris.\n" * 3
    talks = [seen for seen, _ in llm.seen if isinstance(seen[0], dict)]
    roles = ["".join(m["role"][0] for m in talk) for talk in talks]
    assert roles == ["su", "suau", "su"]
    assert talks[1][2]["content"] == "The capital is Paris."


def test_a_message_that_does_not_fit_is_refused_and_the_conversation_goes_on(
    run: Callable[..., Any],
) -> None:
    class Narrow(FakeLLM):
        def stream_chat(self, messages: Any, params: SamplingParams) -> Generator[RequestOutput]:
            if len(messages[-1]["content"]) > 20:
                raise ValueError("This model's maximum context length is 20 tokens")
            return super().stream_chat(messages, params)

    llm = Narrow()
    result = run("chat", llm=llm, stdin="hello\n" + "long " * 9 + "\nbye\n")
    assert result.exit_code == 0
    assert result.stderr.count("foretell: error: This model's maximum context length is 20") == 1
    talks = [seen for seen, _ in llm.seen if isinstance(seen[0], dict)]
    assert [m["content"] for m in talks[-1] if m["role"] == "user"] == ["hello", "bye"]
    assert run("chat", "long " * 9, llm=Narrow()).exit_code == 2


def test_chat_with_a_message_answers_once(run: Callable[..., Any]) -> None:
    result = run("chat", "one", "--json")
    assert json.loads(result.stdout)["requests"][0]["prompt"] == "one"


def test_demo_ends_with_the_json_line(run: Callable[..., Any]) -> None:
    result = run("demo")
    assert result.exit_code == 0
    last = json.loads(result.stdout.rstrip("\n").rsplit("\n", 1)[-1])
    assert last["method"] == "smollm2-135m-instruct-eagle3"  # the default model's own head
    assert last["same_text"] is True
    assert last["acceptance_length"] == 3.0
    assert last["speedup"] == pytest.approx(
        last["speculative_tokens_per_s"] / last["plain_tokens_per_s"], rel=0.02
    )
    assert {task["kind"] for task in last["tasks"]} == {task.kind for task in demo.TASKS}


def test_demo_json_prints_the_json_line_alone(run: Callable[..., Any]) -> None:
    result = run("demo", "--json")
    assert json.loads(result.stdout)["method"] == "smollm2-135m-instruct-eagle3"


def test_demo_says_so_when_the_texts_differ() -> None:
    plain, drafted = FakeLLM(), FakeLLM(drafts=True)
    drafted.words = [*WORDS[:-1], "!", "?"]
    pairs = demo.compare(plain, drafted, demo.TASKS[:1], SamplingParams(), lambda _: None)  # type: ignore[arg-type]
    assert demo.record("m", "ngram", pairs)["same_text"] is False


def test_demo_does_not_count_the_warm_up() -> None:
    drafted = FakeLLM(drafts=True)
    pairs = demo.compare(FakeLLM(), drafted, demo.TASKS[:1], SamplingParams(), lambda _: None)  # type: ignore[arg-type]
    assert drafted.metrics.num_drafts == 2
    assert pairs[0].speculative.counted.num_drafts == 1


def test_version_names_the_package_and_the_libraries(run: Callable[..., Any]) -> None:
    assert run("version").stdout.startswith("foretell ")
    assert {"foretell", "torch", "python"} <= set(json.loads(run("version", "--json").stdout))


def test_what_the_library_notes_while_it_loads_is_shown_on_stderr_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("foretell")
    with cli.notes_on_stderr():
        logger.info("speculative model d: eagle3, by a hidden_norm in the first layer")
    logger.info("later")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "foretell: speculative model d: eagle3, by a hidden_norm in the first layer\n"


def test_a_drafter_without_a_method_is_named_by_its_checkpoint() -> None:
    assert EngineOptions(speculate_model="heads").method == "heads"
    assert EngineOptions(spec_method="ngram", num_speculative_tokens=2).method == "ngram"
    assert EngineOptions().method == "none"
