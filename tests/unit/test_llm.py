"""The offline API around a scripted engine: what goes in, what comes out, and what happens to what ends early."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_engine import Added, FakeEngine
from tiny_tokenizers import REPLY, TEMPLATE, byte_level, ids_of, sentencepiece_like

from foretell import LLM, EngineConfig, RequestOutput, RequestOutputKind, SamplingParams
from foretell.seeds import child_seed, request_seed

TOKENIZER = byte_level()
EOS, END = 1, 2
LONG = SamplingParams(max_tokens=None)


def said(text: str, *more: int) -> list[int]:
    return [*TOKENIZER.encode(text), *more]


def make(
    script: Callable[[Added], Sequence[int]] | str = "hello", **options: object
) -> tuple[LLM, FakeEngine]:
    settings = {
        key: options.pop(key)
        for key in ("seed", "scheduling_policy", "max_logprobs")
        if key in options
    }
    say = (lambda _: said(script, EOS)) if isinstance(script, str) else script
    engine = FakeEngine(say, **options)  # type: ignore[arg-type]
    return LLM.around(EngineConfig(**settings), engine, TOKENIZER), engine  # type: ignore[arg-type]


def echo(added: Added) -> list[int]:
    """The prompt backwards, then the end token."""
    return [*reversed(added.prompt), EOS]


# Prompts.


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", [("ab", "ab")]),
        (["ab", "c"], [("ab", "ab"), ("c", "c")]),
        ({"prompt": "ab"}, [("ab", "ab")]),
        ({"prompt_token_ids": said("ab")}, [(None, "ab")]),
        ({"prompt": "shown", "prompt_token_ids": said("ab")}, [("shown", "ab")]),
        (said("ab"), [(None, "ab")]),
        (np.array(said("ab")), [(None, "ab")]),
        (np.array([said("ab"), said("cd")]), [(None, "ab"), (None, "cd")]),
        (torch.tensor([said("ab"), said("cd")]), [(None, "ab"), (None, "cd")]),
        ([{"prompt": "ab", "multi_modal_data": None, "cache_salt": None}], [("ab", "ab")]),
        ([said("ab"), said("c")], [(None, "ab"), (None, "c")]),
        (["ab", said("c"), {"prompt": "d"}], [("ab", "ab"), (None, "c"), ("d", "d")]),
        ([], []),
    ],
)
def test_every_form_of_a_prompt_is_understood(
    prompts: object, expected: list[tuple[str | None, str]]
) -> None:
    llm, _ = make(echo)
    outputs = llm.generate(prompts, LONG)  # type: ignore[arg-type]
    assert [output.prompt for output in outputs] == [text for text, _ in expected]
    assert [output.prompt_token_ids for output in outputs] == [said(ids) for _, ids in expected]
    assert [output.outputs[0].text for output in outputs] == [ids[::-1] for _, ids in expected]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "The decoder prompt cannot be empty (prompt 0)"),
        (["a", ""], "The decoder prompt cannot be empty (prompt 1)"),
        ([[1], []], "The decoder prompt cannot be empty (prompt 1)"),
        ({"prompt_token_ids": []}, "The decoder prompt cannot be empty (prompt 0)"),
        (["a", [5, 300]], "Token id 300 is out of vocabulary (prompt 1): ids must be in [0, 300)"),
        ([[-1]], "Token id -1 is out of vocabulary (prompt 0)"),
        (
            ["a", "x" * 64],
            "This model's maximum context length is 64 tokens, but prompt 1 has 64 tokens",
        ),
        (
            ["a", "x" * 65],
            "This model's maximum context length is 64 tokens, but prompt 1 has 65 tokens",
        ),
        (["a", None], "prompt 1 must be text, token ids or a dict, got None"),
        (["a", [1.5]], "prompt 1: token ids must be integers, got 1.5"),
        (["a", [True]], "prompt 1: token ids must be integers, got True"),
        (["a", b"b"], "prompt 1 must be text"),
        (5, "prompts must be text, token ids, a dict or a list of these, got 5"),
        ([{"prompt": 5}], "prompt 0: 'prompt' must be text, got 5"),
        ([{}], "prompt 0 has neither 'prompt' nor 'prompt_token_ids'"),
        (
            [{"prompt": "a", "multi_modal_data": {}}],
            "prompt 0 has key 'multi_modal_data', which is not supported",
        ),
        (
            [{"prompt_token_ids": "abc"}],
            "prompt 0: token ids must be a list of integers, got 'abc'",
        ),
        (["a", "b\ud83d"], "prompt 1: the text has half a surrogate pair at character 1"),
        ({"prompt": "\udc00"}, "prompt 0: the text has half a surrogate pair at character 0"),
        (np.zeros((2, 2, 2), dtype=int), "prompt 0: token ids must be integers"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_is_queued(prompts: object, message: str) -> None:
    llm, engine = make()
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is compared)
            call(prompts)  # type: ignore[operator]
        assert message in str(caught.value)
    assert engine.added == []
    assert llm.generate("fine", LONG)[0].outputs[0].text == "hello"


def test_no_text_is_an_empty_prompt_although_the_tokenizer_adds_a_token() -> None:
    pieces = sentencepiece_like()
    assert pieces.encode("") != []
    llm = LLM.around(EngineConfig(), FakeEngine(lambda _: [2], eos_token_ids=(2,)), pieces)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="The decoder prompt cannot be empty"):
        llm.generate("")


def test_the_longest_prompt_that_fits_leaves_room_for_one_token() -> None:
    llm, _ = make(lambda _: said("yz"))
    output = llm.generate("x" * 63, LONG)[0].outputs[0]
    assert (output.text, output.finish_reason) == ("y", "length")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([LONG], "The lengths of prompts (2) and sampling_params (1) must be the same"),
        ([LONG] * 3, "The lengths of prompts (2) and sampling_params (3) must be the same"),
        ([LONG, {}], "sampling_params must be SamplingParams or a list of them"),
        ({"temperature": 0}, "sampling_params must be SamplingParams or a list of them"),
        (
            [LONG, SamplingParams(logprobs=21)],
            "Requested sample logprobs of 21, which is greater than max allowed: 20",
        ),
        ([LONG, SamplingParams(prompt_logprobs=-1)], "Requested prompt logprobs of 300"),
        (
            [LONG, SamplingParams(stop_token_ids=[300])],
            "stop_token_ids contain out-of-vocab token ids",
        ),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_queued(params: object, message: str) -> None:
    llm, engine = make()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is compared)
        llm.generate(["a", "b"], params)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert engine.added == []


def test_a_list_of_parameters_belongs_to_the_prompts_in_order() -> None:
    llm, engine = make(lambda _: said("abcdefgh"))
    params = [SamplingParams(max_tokens=k, temperature=0.0) for k in (3, 1, 2)]
    outputs = llm.generate(["x", "y", "z"], params)
    assert [output.outputs[0].text for output in outputs] == ["abc", "a", "ab"]
    assert [added.params for added in engine.added] == params


def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first() -> None:
    llm, _ = make(echo, size=1)
    prompts = ["aaaaaa", "b", "cccc", "dd"]
    outputs = llm.generate(prompts, LONG)
    assert [output.outputs[0].text for output in outputs] == prompts
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]


def test_priorities_reach_the_engine_only_under_priority_scheduling() -> None:
    llm, engine = make(scheduling_policy="priority")
    llm.generate(["a", "b"], LONG, priority=[2, 1])
    assert [added.priority for added in engine.added] == [2, 1]
    with pytest.raises(
        ValueError, match=r"The lengths of prompts \(1\) and priority \(2\) must be the same"
    ):
        llm.generate("a", LONG, priority=[2, 1])
    plain, _ = make()
    with pytest.raises(ValueError, match="priority scheduling is not enabled"):
        plain.generate(["a", "b"], LONG, priority=[2, 1])
    plain.generate("a", LONG, priority=[0])


def test_no_parameters_means_the_defaults() -> None:
    llm, engine = make(lambda _: said("x" * 40))
    assert llm.get_default_sampling_params() == SamplingParams()
    assert len(llm.generate("a")[0].outputs[0].token_ids) == 16
    assert engine.added[0].params == SamplingParams()


def test_bad_words_go_to_the_engine_as_tokens_with_and_without_a_space() -> None:
    llm, engine = make()
    llm.generate("a", SamplingParams(bad_words=["no", " so"], max_tokens=9))
    expected = [tuple(said(word)) for word in ("no", " no", "so", " so")]
    assert engine.added[0].bad_words == tuple(expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["b\ud800"], "bad_words: 'b\\ud800': the text has half a surrogate pair at character 1"),
        (["x" * 65], "is 65 tokens long, at most 64 are supported"),
        ([f"{i}" for i in range(600)], "1200 spellings (with and without a space in front)"),
    ],
)
def test_bad_words_that_every_step_would_pay_for_are_refused(
    words: list[str], message: str
) -> None:
    llm, engine = make()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is compared)
        llm.generate(["a", "b"], [LONG, SamplingParams(bad_words=words)])
    assert message in str(caught.value)
    assert engine.running == {}
    assert llm.generate("fine", LONG)[0].outputs[0].text == "hello"


# Texts, stops and ends.


@pytest.mark.parametrize("size", range(1, 8))
def test_R42_streamed_and_whole_text_are_equal_for_every_step_size(size: int) -> None:
    llm, _ = make(REPLY, size=size)
    whole = llm.generate("a", LONG)[0].outputs[0]
    assert whole.text == REPLY
    cumulative = [output.outputs[0].text for output in llm.stream("a", LONG)]
    assert all(later.startswith(sooner) for sooner, later in pairwise(cumulative))
    assert cumulative[-1] == REPLY
    parts = list(
        llm.stream("a", SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA))
    )
    assert "".join(part.outputs[0].text for part in parts) == REPLY
    assert (
        [t for part in parts for t in part.outputs[0].token_ids]
        == whole.token_ids
        == said(REPLY, EOS)
    )
    assert [part.outputs[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert not any("\ufffd" in part.outputs[0].text for part in parts)


@pytest.mark.parametrize("size", range(1, 8))
def test_a_stop_string_ends_text_tokens_and_the_engines_request(size: int) -> None:
    llm, engine = make("go STOP and on and on", size=size)
    output = llm.generate("a", SamplingParams(stop=["and", "STOP"], max_tokens=None))[0].outputs[0]
    assert output.text == "go "
    assert output.token_ids == said("go STOP")
    assert (output.finish_reason, output.stop_reason) == ("stop", "STOP")
    assert engine.aborted == ["0"]
    assert not engine.running


def test_the_stop_string_can_stay_in_the_text() -> None:
    llm, _ = make("go STOP and on")
    params = SamplingParams(stop="STOP", max_tokens=None, include_stop_str_in_output=True)
    assert llm.generate("a", params)[0].outputs[0].text == "go STOP"


def test_a_stop_string_in_the_last_step_wins_over_what_ended_it() -> None:
    for script, limit in (("ab", None), ("abcdef", 3)):
        llm, engine = make(script, size=4)
        output = llm.generate("x", SamplingParams(stop="b", max_tokens=limit))[0].outputs[0]
        assert (output.text, output.token_ids) == ("a", said("ab"))
        assert (output.finish_reason, output.stop_reason) == ("stop", "b")
        assert engine.aborted == []  # it was over in the engine


def test_stop_strings_wait_for_min_tokens() -> None:
    llm, _ = make("aXbXc")
    output = llm.generate("x", SamplingParams(stop="X", min_tokens=3, max_tokens=None))[0].outputs[
        0
    ]
    assert (output.text, output.token_ids) == ("aXb", said("aXbX"))


def test_streamed_text_never_shows_what_may_be_a_stop_string() -> None:
    llm, _ = make("go STO STOP", size=1)
    shown = [
        o.outputs[0].text for o in llm.stream("a", SamplingParams(stop="STOP", max_tokens=None))
    ]
    assert list(dict.fromkeys(shown)) == ["g", "go", "go ", "go STO "]


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({}, "hi", None),
        ({"stop_token_ids": [END], "ignore_eos": True}, "hi", END),
        ({"skip_special_tokens": False}, "hi", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hi</s>", None),
    ],
)
def test_the_token_that_ended_it_is_a_token_but_no_text(
    params: dict[str, object], text: str, reason: int | None
) -> None:
    last = END if "stop_token_ids" in params else EOS
    llm, _ = make(lambda _: said("hi", last, *said("never")))
    output = llm.generate("a", SamplingParams(max_tokens=None, **params))[0].outputs[0]  # type: ignore[arg-type]
    assert output.token_ids == said("hi", last)
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", reason)


def test_a_stop_token_that_is_ordinary_text_is_not_shown_and_id_zero_is_a_reason() -> None:
    letter = said("!")[0]
    llm, _ = make(lambda _: said("hi!"))
    output = llm.generate("a", SamplingParams(stop_token_ids=[letter], max_tokens=None))[0].outputs[
        0
    ]
    assert (output.text, output.stop_reason) == ("hi", letter)
    llm, _ = make(lambda _: said("hi", 0))
    output = llm.generate("a", SamplingParams(stop_token_ids=[0], max_tokens=None))[0].outputs[0]
    assert output.stop_reason == 0


@pytest.mark.parametrize("limit", range(1, 13))
def test_R52_the_tokens_delivered_are_the_tokens_asked_for(limit: int) -> None:
    llm, _ = make("x" * 30, size=6)
    output = llm.generate("a", SamplingParams(max_tokens=limit))[0].outputs[0]
    assert (len(output.token_ids), len(output.text), output.finish_reason) == (
        limit,
        limit,
        "length",
    )


def test_without_detokenising_there_are_tokens_and_no_text() -> None:
    llm, _ = make("hi")
    output = llm.generate("a", SamplingParams(detokenize=False))[0].outputs[0]
    assert (output.text, output.token_ids) == ("", said("hi", EOS))


def test_the_text_follows_the_prompt_as_one_text() -> None:
    pieces = sentencepiece_like()
    engine = FakeEngine(lambda _: [*ids_of(pieces, "▁city", "s"), 2], eos_token_ids=(2,))
    llm = LLM.around(EngineConfig(), engine, pieces)  # type: ignore[arg-type]
    given = {"prompt_token_ids": ids_of(pieces, "<s>", "▁Paris", "▁is", "▁a")}
    assert llm.generate(given)[0].outputs[0].text == " citys"


# Log-probabilities.


def test_log_probabilities_come_with_rank_and_text_one_entry_per_token() -> None:
    llm, _ = make(lambda _: [*said("h"), 3, EOS])
    output = llm.generate("ab", SamplingParams(logprobs=2, prompt_logprobs=0))[0]
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 3
    first, second = answer.logprobs[0], answer.logprobs[1]
    assert list(first) == [said("h")[0], 3, 4]
    assert [(p.logprob, p.rank) for p in first.values()] == [(-1.0, 9), (-0.5, 1), (-1.0, 2)]
    assert first[said("h")[0]].decoded_token == "h"
    assert [(token, p.rank) for token, p in second.items()] == [(3, 1), (4, 2)]
    assert answer.cumulative_logprob == sum(
        row[t].logprob for t, row in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1] is not None
    of_prompt = output.prompt_logprobs[1][said("b")[0]]
    assert (of_prompt.logprob, of_prompt.rank) == (-2.0, 5)
    assert len(output.prompt_logprobs) == 2


def test_log_probabilities_end_with_the_token_of_the_stop_string() -> None:
    llm, _ = make("go STOP and on", size=7)
    output = llm.generate("a", SamplingParams(stop="O", logprobs=0, max_tokens=None))[0].outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == 6
    assert output.cumulative_logprob == -6.0


def test_no_log_probabilities_unless_asked_for() -> None:
    llm, _ = make()
    output = llm.generate("a", LONG)[0]
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


# n, seeds and ids.


def test_n_answers_are_one_output_in_order_of_index() -> None:
    def by_index(added: Added) -> list[int]:
        return said("abc"[int(added.id.split("_")[0])] * 5, EOS)

    llm, engine = make(by_index)
    output = llm.generate("x", SamplingParams(n=3, seed=7, max_tokens=None))[0]
    assert [(answer.index, answer.text) for answer in output.outputs] == [
        (0, "aaaaa"),
        (1, "bbbbb"),
        (2, "ccccc"),
    ]
    assert [added.id for added in engine.added] == ["0_0", "1_0", "2_0"]
    seeds = [added.seed for added in engine.added]
    assert seeds == [child_seed(7, index) for index in range(3)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


def test_a_request_without_a_seed_gets_one_that_a_second_run_gets_too() -> None:
    def seeds(engine_seed: int) -> list[int]:
        llm, engine = make(seed=engine_seed)
        llm.generate(["a", "b"], LONG)
        llm.generate("c", SamplingParams(seed=5, max_tokens=None))
        llm.generate("a", SamplingParams(n=2, max_tokens=None))
        return [added.seed for added in engine.added]

    assert seeds(0) == seeds(0)
    assert seeds(0)[2] == 5
    assert len(set(seeds(0)) | set(seeds(1))) == 9  # all differ but the one that was given
    assert seeds(0)[0] == request_seed(0, 0)


def test_seeds_fit_the_noise_key() -> None:
    made = [request_seed(s, c) for s in (0, 1, -5, 2**62) for c in range(50)]
    made += [child_seed(s, i) for s in (0, 7, -(2**63), 2**63 - 1) for i in range(1, 50)]
    assert all(0 <= seed < 2**63 for seed in made)
    assert len(set(made)) == len(made)


# Streams.


def test_a_stream_yields_as_tokens_come_and_several_requests_interleave() -> None:
    llm, _ = make(echo, size=1)
    seen = [(o.request_id, o.outputs[0].text) for o in llm.stream(["ab", "xyz"], LONG)]
    assert seen[:4] == [("0", "b"), ("1", "z"), ("0", "ba"), ("1", "zy")]
    assert seen[-1] == ("1", "zyx")


def test_final_only_yields_each_request_once() -> None:
    llm, _ = make(echo, size=1)
    params = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.FINAL_ONLY)
    seen = [(o.request_id, o.outputs[0].text, o.finished) for o in llm.stream(["abc", "x"], params)]
    assert seen == [("1", "x", True), ("0", "cba", True)]


def test_deltas_of_n_answers_hold_only_those_with_news() -> None:
    llm, _ = make(lambda a: said("ab" if a.id.startswith("0") else "abcdef", EOS), size=2)
    params = SamplingParams(
        n=2, max_tokens=None, output_kind=RequestOutputKind.DELTA, logprobs=0, prompt_logprobs=0
    )
    seen = list(llm.stream("xy", params))
    assert [[o.index for o in output.outputs] for output in seen] == [[0, 1], [0, 1], [1], [1]]
    texts = [
        "".join(o.text for output in seen for o in output.outputs if o.index == i) for i in (0, 1)
    ]
    assert texts == ["ab", "abcdef"]
    assert all(
        o.logprobs is not None and len(o.logprobs) == len(o.token_ids)
        for output in seen
        for o in output.outputs
    )
    assert [output.prompt_logprobs is not None for output in seen] == [True, False, False, False]
    assert [output.finished for output in seen] == [False, False, False, True]


def test_nothing_is_queued_before_the_first_next() -> None:
    llm, engine = make()
    stream = llm.stream("a", LONG)
    assert engine.added == []
    next(stream)
    assert len(engine.added) == 1


def test_closing_a_stream_aborts_what_runs_and_the_llm_goes_on() -> None:
    llm, engine = make(echo, size=1)
    stream = llm.stream(["abcdef", "x"], LONG)
    for _ in range(4):
        next(stream)
    stream.close()
    assert engine.aborted == ["0"]
    assert not engine.running
    assert llm.get_metrics() is not None
    assert llm.generate("ab", LONG)[0].outputs[0].text == "ba"


def test_two_streams_and_a_batch_share_the_engine() -> None:
    llm, _ = make(echo, size=1)
    first, second = llm.stream("abc", LONG), llm.stream("xyz", LONG)
    next(first), next(second)
    assert llm.generate("hello", LONG)[0].outputs[0].text == "olleh"
    assert [o.outputs[0].text for o in first][-1] == "cba"
    assert [o.outputs[0].text for o in second][-1] == "zyx"


def test_threads_share_the_engine_and_enter_it_one_at_a_time() -> None:
    inside: list[int] = []

    def step() -> None:
        inside.append(1)
        time.sleep(0.0005)
        assert inside == [1], "two threads in one engine"
        inside.pop()

    llm, engine = make(lambda added: [*added.prompt * 4, EOS], size=1)
    engine.before_step = step
    params = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)

    def one(letter: str) -> str:
        texts = [llm.generate([letter, letter * 2], params, use_tqdm=False)[1].outputs[0].text]
        texts.append("".join(o.outputs[0].text for o in llm.stream(letter * 2, params)))
        assert texts[0] == texts[1]
        return texts[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, "abcdefgh")) == [letter * 8 for letter in "abcdefgh"]
    assert engine.running == {}
    assert len({added.id for added in engine.added}) == 24


def test_a_stream_that_the_garbage_collector_closes_in_a_step_ends_after_it() -> None:
    llm, engine = make(lambda _: said("x" * 50), size=1)
    stream = llm.stream("a", LONG)
    next(stream)
    forgotten = [stream]
    del stream
    states: list[bool] = []

    def step() -> None:
        forgotten.clear()  # closes it, as a collection in the middle of a step would
        states.append("0" in engine.running)

    engine.before_step = step
    assert len(llm.generate("b", SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2
    assert states == [True, False]
    assert engine.aborted == ["0"]


def test_an_aborted_request_ends_with_what_it_has() -> None:
    llm, engine = make(echo, size=1)
    seen: list[RequestOutput] = []
    for output in llm.stream(["abc", "xyzw"], LONG):
        seen.append(output)
        if output.request_id == "1" and len(output.outputs[0].text) == 2:
            llm.abort("1")
            llm.abort("1")
            llm.abort("no such request")
    ends = {
        o.request_id: (o.outputs[0].text, o.outputs[0].finish_reason) for o in seen if o.finished
    }
    assert ends == {"0": ("cba", "stop"), "1": ("wz", "abort")}
    assert engine.aborted == ["1"]


def test_held_text_is_delivered_when_a_request_is_aborted() -> None:
    llm, _ = make("go STO", size=6)
    stream = llm.stream("a", SamplingParams(stop="STOP", max_tokens=None))
    assert next(stream).outputs[0].text == "go "
    llm.abort("0")
    last = next(stream)
    assert (last.outputs[0].text, last.finished) == ("go STO", True)
    assert list(stream) == []


# Ends that nobody asked for.


def test_ctrl_c_in_generate_aborts_what_it_queued_and_propagates() -> None:
    llm, engine = make(lambda _: said("x" * 50), size=1)
    other = llm.stream("kept", SamplingParams(max_tokens=5))
    next(other)

    def interrupt() -> None:
        if len(engine.added) == 3 and engine.added[-1].said == 3:
            raise KeyboardInterrupt

    engine.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], LONG)
    engine.before_step = lambda: None
    assert sorted(engine.aborted) == ["1", "2"]
    assert list(engine.running) == ["0"]
    assert [o.outputs[0].text for o in other][-1] == "xxxxx"
    engine.script = echo
    assert llm.generate("ab", LONG)[0].outputs[0].text == "ba"


def test_a_signal_in_the_middle_of_a_step_waits_for_its_end() -> None:
    llm, engine = make(lambda _: said("x" * 50), size=1)
    finished_steps = []

    def interrupt() -> None:
        if len(finished_steps) == 2:
            signal.raise_signal(signal.SIGINT)
        finished_steps.append(True)  # not reached if the signal cut the step

    engine.before_step = interrupt
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", LONG)
    assert len(finished_steps) == 3
    assert engine.added[0].said == 3
    assert engine.aborted == ["0"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait() -> None:
    llm, engine = make(lambda _: said("x" * 50), size=1)
    reached = []

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)

    engine.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", LONG)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_job_that_the_engine_refuses_takes_the_whole_call_back() -> None:
    llm, engine = make(refuse=lambda added: added.id == "2")
    with pytest.raises(ValueError, match="the engine refuses it"):
        llm.generate(["a", "b", "c"], LONG)
    assert sorted(engine.aborted) == ["0", "1"]
    assert not engine.running
    assert len(llm.generate(["a", "b"], LONG)) == 2


def test_an_engine_that_fails_does_not_leave_requests_behind() -> None:
    llm, engine = make(lambda _: said("x" * 50))

    def fail() -> None:
        if engine.added[-1].said:
            raise RuntimeError("the device is gone")

    engine.before_step = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.generate("a", LONG)
    assert not engine.running


def test_waiting_for_an_engine_without_work_is_an_error_and_no_endless_loop() -> None:
    llm, engine = make(lambda _: said("x" * 50))
    engine.before_step = engine.running.clear
    with pytest.raises(RuntimeError, match="no work left but requests"):
        llm.generate("a", LONG)


def test_a_request_that_failed_says_why_and_the_others_go_on() -> None:
    llm, engine = make(echo)
    step = engine.step

    def failing() -> list[object]:
        deltas = step()
        if "1" in engine.running or any(d.request_id == "1" for d in deltas):
            engine.running.pop("1", None)
            bad = type(deltas[0])(
                request_id="1", finish_reason="error", error="its logits are not numbers"
            )
            return [*(d for d in deltas if d.request_id != "1"), bad]
        return list(deltas)

    engine.step = failing  # type: ignore[method-assign,assignment]
    outputs = llm.generate(["ab", "cd", "efgh"], LONG)
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "error", "stop"]
    assert outputs[1].outputs[0].stop_reason == "its logits are not numbers"
    assert [o.outputs[0].text for o in outputs] == ["ba", "", "hgfe"]


# Conversations.


CHAT = [{"role": "user", "content": "hi"}]


def test_a_conversation_is_rendered_by_the_template_without_a_second_bos() -> None:
    llm, engine = make()
    output = llm.chat(CHAT, LONG)[0]
    assert output.prompt == "<|user|>hi<|end|><|assistant|>"
    assert list(engine.added[0].prompt) == TOKENIZER.encode(output.prompt, add_special_tokens=False)
    assert output.outputs[0].text == "hello"


def test_many_conversations_and_streams_of_them() -> None:
    llm, _ = make()
    assert len(llm.chat([CHAT, [*CHAT, *CHAT]], LONG)) == 2
    assert [o.outputs[0].text for o in llm.stream_chat(CHAT, LONG)][-1] == "hello"


def test_a_template_of_the_call_or_of_the_llm_or_from_a_file(tmp_path: Path) -> None:
    llm, _ = make()
    output = llm.chat(
        CHAT,
        LONG,
        chat_template="{{ messages[0].content }}{{ tone }}",
        chat_template_kwargs={"tone": "!"},
    )
    assert output[0].prompt == "hi!"
    path = tmp_path / "chat.jinja"
    path.write_text("file: {{ messages[0].content }}", "utf-8")
    assert llm.chat(CHAT, LONG, chat_template=str(path))[0].prompt == "file: hi"
    with pytest.raises(ValueError, match="neither a Jinja template nor a file"):
        llm.chat(CHAT, LONG, chat_template="missing.jinja")


def test_the_last_message_can_be_continued() -> None:
    llm, _ = make()
    messages = [*CHAT, {"role": "assistant", "content": "well"}]
    output = llm.chat(messages, LONG, add_generation_prompt=False, continue_final_message=True)[0]
    assert output.prompt == "<|user|>hi<|end|><|assistant|>well"
    with pytest.raises(ValueError, match="cannot both be True"):
        llm.chat(messages, LONG, continue_final_message=True)


def test_text_parts_are_text_and_other_parts_are_refused() -> None:
    llm, _ = make()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        llm.chat([{"role": "user", "content": parts}], LONG)[0].prompt
        == "<|user|>a\nb<|end|><|assistant|>"
    )
    with pytest.raises(
        ValueError, match="only text is supported in a message, got a part of type 'image_url'"
    ):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], LONG)


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "user"}])
def test_no_content_is_no_text(message: dict[str, object]) -> None:
    llm, _ = make()
    assert llm.chat([message], LONG)[0].prompt == "<|user|><|end|><|assistant|>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "a\ud83d"}], "conversation 0: the text has half a surrogate"),
        ("hi", "messages must be a list"),
        ([[]], "conversation 0 has no messages"),
        (["hi"], "messages must be a list"),
        ([{"content": "x"}], "conversation 0: a message must be a dict with a 'role'"),
        ([{"role": "user", "content": 5}], "the 'content' of a message must be text, got 5"),
    ],
)
def test_bad_conversations_are_refused_before_anything_is_queued(
    messages: object, message: str
) -> None:
    llm, engine = make()
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, LONG)  # type: ignore[arg-type]
    assert engine.added == []


def test_a_tokenizer_without_a_template_says_what_to_do() -> None:
    bare = byte_level()
    bare.chat_template = None
    llm = LLM.around(EngineConfig(), FakeEngine(lambda _: said("hello", EOS)), bare)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no chat template, and none was given"):
        llm.chat(CHAT, LONG)
    assert llm.chat(CHAT, LONG, chat_template=TEMPLATE)[0].outputs[0].text == "hello"


def test_a_template_that_refuses_says_so() -> None:
    llm, _ = make()
    with pytest.raises(ValueError, match="the chat template refused the messages: no systems"):
        llm.chat(CHAT, LONG, chat_template="{{ raise_exception('no systems') }}")


# The object.


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"lora_request": "adapter"}, "lora_request='adapter' is not supported. Merge the adapter"),
        ({"prompt_token_ids": [[3]]}, "Pass {'prompt_token_ids': [...]} as the prompt."),
        ({"tokenization_kwargs": {"truncation": True}}, "pass its token ids"),
        ({"guided_options_request": {}}, "Use structured_outputs in SamplingParams."),
        ({"prioritty": [1]}, "has no key 'prioritty'; did you mean 'priority'?"),
    ],
)
def test_arguments_that_only_vllms_calls_have_are_refused_unless_they_are_off(
    argument: dict[str, object], message: str
) -> None:
    llm, engine = make()
    calls: list[Callable[..., object]] = [llm.generate, llm.stream]
    for call in calls:
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is compared)
            call("a", LONG, **argument)
        assert message in str(caught.value)
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call(CHAT, LONG, **argument)
        assert message in str(caught.value)
    assert engine.added == []
    off = {"lora_request": None, "mm_processor_kwargs": None, "tokenization_kwargs": {}}
    assert llm.generate("a", LONG, **off)[0].outputs[0].text == "hello"
    assert (
        llm.chat(CHAT, LONG, chat_template_content_format="auto", **off)[0].outputs[0].text  # type: ignore[call-arg]
        == "hello"
    )


def test_arguments_of_other_engines_are_refused_before_a_model_is_touched() -> None:
    with pytest.raises(ValueError, match=r"enable_lora=True is not supported\. Merge the adapter"):
        LLM("no/such-model", enable_lora=True)
    with pytest.raises(ValueError, match="LLM has no key 'temprature'"):
        LLM("no/such-model", temprature=1.0)
    with pytest.raises(ValueError, match="without speculative model"):
        LLM("no/such-model", num_speculative_tokens=5)
    with pytest.raises(ValueError, match="gpu_memory_utilization must be in"):
        LLM("no/such-model", gpu_memory_utilization=90)


def test_a_closed_llm_says_so_and_closing_twice_is_fine() -> None:
    llm, engine = make(lambda _: said("x" * 50), size=1)
    with llm:
        stream = llm.stream("a", LONG)
        next(stream)
    assert engine.aborted == ["0"]
    assert [o.outputs[0].finish_reason for o in stream] == ["abort"]
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM was closed"):
        llm.generate("a", LONG)


def test_the_prefix_cache_is_reset_in_the_engine() -> None:
    llm, engine = make()
    llm.reset_prefix_cache()
    assert engine.cache_resets == 1
    assert llm.get_tokenizer() is TOKENIZER


def test_cached_tokens_and_times_are_reported() -> None:
    llm, _ = make()
    output = llm.generate("abcd", LONG)[0]
    assert output.num_cached_tokens == 2
    assert output.metrics.time_to_first_token is not None
    assert output.metrics.latency is not None
    assert 0 <= output.metrics.time_to_first_token <= output.metrics.latency


def test_the_progress_bar_counts_prompts_and_stays_away_from_logs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Bar:
        def __init__(self, total: int, desc: str, dynamic_ncols: bool) -> None:
            self.total, self.done, self.closed, self.said = total, 0, False, ""
            bars.append(self)

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            self.said = text

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.closed = True

    bars: list[Bar] = []
    llm, _ = make(echo)
    llm.generate(["ab", "c", "d"], LONG, use_tqdm=Bar)
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(3, 3, True)]
    assert "toks/s" in bars[0].said
    llm.generate("a", LONG)  # standard error is no terminal here
    assert capsys.readouterr().err == ""


def test_importing_the_package_needs_no_torch() -> None:
    import subprocess

    code = "import sys, foretell; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
