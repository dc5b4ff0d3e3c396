"""One request's outputs: ranks of log-probabilities, merging of answers, and snapshots that stay as they are."""

from __future__ import annotations

import pytest
from tiny_tokenizers import byte_level

from foretell.assembly import Assembly, ranked
from foretell.engine.engine import Delta
from foretell.outputs import CompletionOutput, Logprob, RequestMetrics
from foretell.prompts import Prompt
from foretell.runner.plan import LogprobRow
from foretell.sampling_params import RequestOutputKind, SamplingParams
from foretell.text import TokenText

TOKENIZER = byte_level()
TEXT = TokenText(TOKENIZER)
PROMPT = Prompt("ab", tuple(TOKENIZER.encode("ab")))


class Clock:
    """Time that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def assembly(clock: Clock | None = None, **params: object) -> Assembly:
    options = {"max_tokens": None, **params}
    return Assembly("7", PROMPT, SamplingParams(**options), TEXT, clock or Clock())  # type: ignore[arg-type]


def delta(text: str, finish: str | None = None, **more: object) -> Delta:
    return Delta("7", tuple(TOKENIZER.encode(text)), finish_reason=finish, **more)  # type: ignore[arg-type]


A, B, C = TOKENIZER.encode("abc")


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        (LogprobRow(A, -1.0, 1), [1]),
        (LogprobRow(A, -1.0, 40), [40]),  # nothing else was asked for: still its rank
        (LogprobRow(B, -2.0, 2, {A: -1.0, B: -2.0}), [2, 1]),
        (LogprobRow(C, -9.0, 40, {A: -1.0, B: -2.0}), [40, 1, 2]),  # not among the two likeliest
        (LogprobRow(A, -1.0, 1, {B: -1.0, A: -1.0}), [1, 1]),  # a tie
        (LogprobRow(C, -2.0, 3, {B: -1.0, A: -1.0, C: -2.0}), [3, 1, 1]),
        (LogprobRow(B, float("-inf"), 2, {A: 0.0, B: float("-inf")}), [2, 1]),
    ],
)
def test_the_token_comes_first_and_every_rank_counts_the_likelier_tokens(
    row: LogprobRow, ranks: list[int]
) -> None:
    entries = ranked(row, TEXT)
    assert list(entries) == [row.token, *(token for token in row.top if token != row.token)]
    assert [entry.rank for entry in entries.values()] == ranks
    assert entries[row.token] == Logprob(row.logprob, ranks[0], TEXT.alone(row.token))


def test_a_snapshot_never_changes_afterwards() -> None:
    request = assembly(logprobs=0)
    request.take(0, delta("a", logprobs=(LogprobRow(A, -1.0, 1),)))
    early = request.output()
    request.take(0, delta("bc", "stop", logprobs=(LogprobRow(B, -1.0, 1), LogprobRow(C, -1.0, 1))))
    assert early.outputs[0].token_ids == [A]
    assert early.outputs[0].logprobs is not None
    assert len(early.outputs[0].logprobs) == 1
    assert (early.outputs[0].text, early.finished) == ("a", False)


def test_a_log_probability_row_of_another_token_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="log-probabilities of token"):
        assembly(logprobs=0).take(0, delta("a", logprobs=(LogprobRow(B, -1.0, 1),)))


def test_nothing_counts_after_the_end() -> None:
    request = assembly(stop=["b"])
    assert request.take(0, delta("abc")) is True
    assert request.take(0, delta("more", "length")) is False
    output = request.output().outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("a", [A, B], "stop")
    assert request.abort() == []
    assert request.output().outputs[0].finish_reason == "stop"


def test_a_stop_string_completed_by_the_rest_of_the_text_ends_the_reply_with_it() -> None:
    tokenizer = byte_level(
        (("b", "Ã"),)
    )  # a token that ends in the first byte of a two-byte character
    token = tokenizer.get_vocab()["bÃ"]
    request = Assembly("7", PROMPT, SamplingParams(stop="b", max_tokens=1), TokenText(tokenizer))
    request.take(0, Delta("7", (token,), finish_reason="length"))
    output = request.output().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "b")


def test_prompt_rows_of_several_chunks_are_joined_and_one_too_many_is_cut() -> None:
    request = assembly(prompt_logprobs=1)
    request.take(0, delta("", prompt_logprobs=(LogprobRow(B, -1.0, 1),)))
    request.take(0, delta("a", "stop", prompt_logprobs=(LogprobRow(C, -9.0, 3),)))
    rows = request.output().prompt_logprobs
    assert rows == [None, {B: Logprob(-1.0, 1, "b")}]


def test_prompt_rows_come_from_the_first_answer_only() -> None:
    request = assembly(prompt_logprobs=0, n=2)
    for index in (1, 0):
        request.take(index, delta("a", "stop", prompt_logprobs=(LogprobRow(B, -1.0 - index, 7),)))
    rows = request.output().prompt_logprobs
    assert rows is not None
    assert rows[1] == {B: Logprob(-1.0, 7, "b")}


def test_a_request_is_finished_when_its_last_answer_is() -> None:
    request = assembly(n=2)
    request.take(1, delta("ab", "stop"))
    assert (request.finished, request.output().finished) == (False, False)
    assert [o.finished for o in request.output().outputs] == [False, True]
    request.take(0, delta("c", "length"))
    assert request.output().finished
    assert [o.finish_reason for o in request.output().outputs] == ["length", "stop"]
    assert (request.num_prompt_tokens, request.num_generated_tokens) == (2, 3)


def test_aborting_ends_what_runs_and_tells_which() -> None:
    request = assembly(n=3)
    request.take(1, delta("ab", "stop"))
    assert request.abort() == [0, 2]
    assert [o.finish_reason for o in request.output().outputs] == ["abort", "stop", "abort"]


def test_times_are_of_the_first_token_and_of_the_last_end() -> None:
    clock = Clock()
    request = assembly(clock)
    clock.now += 1
    request.take(0, delta(""))
    assert request.output().metrics == RequestMetrics(100.0, None, None)
    clock.now += 1
    request.take(0, delta("a"))
    clock.now += 1
    request.take(0, delta("b", "stop"))
    metrics = request.output().metrics
    assert metrics == RequestMetrics(100.0, 102.0, 103.0)
    assert (metrics.time_to_first_token, metrics.latency) == (2.0, 3.0)


def test_deltas_are_what_is_new_and_an_end_is_news_once() -> None:
    request = assembly(output_kind=RequestOutputKind.DELTA)
    assert request.news() is None
    request.take(0, delta("ab"))
    first = request.news()
    assert first is not None
    assert first.outputs == [CompletionOutput(0, "ab", [A, B])]
    assert request.news() is None
    request.take(0, delta("", "abort"))
    last = request.news()
    assert last is not None
    assert last.outputs == [CompletionOutput(0, "", [], finish_reason="abort")]
    assert request.news() is None
