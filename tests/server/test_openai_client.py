"""The official client against a live server: chat, completions, streams, log-probabilities, n, seed, stop, tools."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from serving_lab import MODEL, Live

from foretell.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **asked: object):
    settings: dict[str, object] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16}
    return client.chat.completions.create(**(settings | asked))  # type: ignore[call-overload]


def solo(live: Live, prompt: str, **params: object) -> str:
    """What the library says to a prompt of text, on an engine of its own."""
    from serving_lab import tiny_llm

    with tiny_llm() as llm:
        return llm.generate(prompt, SamplingParams(**params), False)[0].outputs[0].text  # type: ignore[arg-type]


def test_models_are_listed(client: openai.OpenAI, live: Live) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_is_answered_and_counted(client: openai.OpenAI) -> None:
    answer = chat(client, seed=1)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0


def test_a_completion_is_what_the_library_says(client: openai.OpenAI, live: Live) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc", max_tokens=20, seed=7)
    assert answer.choices[0].text == solo(live, "abc", max_tokens=20, seed=7)


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI, seed: int) -> None:
    whole = chat(client, seed=seed, max_tokens=40)
    pieces = list(
        chat(
            client,
            seed=seed,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    choices = [piece.choices[0] for piece in pieces if piece.choices]
    assert choices[0].delta.role == "assistant"
    assert [c.delta.role for c in choices[1:]] == [None] * (len(choices) - 1)
    text = "".join(c.delta.content or "" for c in choices)
    assert text == whole.choices[0].message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    assert choices[-1].finish_reason == "length"
    ids = [t for c in choices for t in c.model_extra.get("token_ids", [])]
    assert len(ids) == 40
    assert max(len(c.model_extra.get("token_ids", [])) for c in choices) > 1, "one token a chunk"
    usages = [piece.usage for piece in pieces if piece.usage]
    assert len(usages) == 1
    assert usages[0].completion_tokens == 40
    assert usages[0].model_dump() | {"prompt_tokens_details": None} == whole.usage.model_dump() | {
        "prompt_tokens_details": None
    }
    assert not pieces[-1].choices


def test_usage_with_every_piece_only_grows(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = list(chat(client, stream=True, stream_options=options))
    counts = [piece.usage.completion_tokens for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == 16


@pytest.mark.parametrize("length", range(1, 13))
def test_usage_is_what_was_asked_whatever_was_drafted(client: openai.OpenAI, length: int) -> None:
    """R52: max_tokens 1..12 with drafts: usage = delivered = max_tokens."""
    answer = chat(client, max_tokens=length, extra_body={"return_token_ids": True})
    assert answer.usage.completion_tokens == length
    assert len(answer.choices[0].model_extra["token_ids"]) == length


def test_n_answers_come_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = chat(client, n=3, seed=5)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    streamed = dict.fromkeys(range(3), "")
    for piece in chat(client, n=3, seed=5, stream=True):
        for choice in piece.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts
    assert whole.usage.completion_tokens == 48


def test_a_seed_gives_the_same_text_with_drafts_and_without(client: openai.OpenAI) -> None:
    texts = {
        chat(client, seed=11, extra_body=extra).choices[0].message.content
        for extra in ({}, {"speculate": False}, {"num_speculative_tokens": 1})
    }
    assert len(texts) == 1


def test_speculation_is_a_request_s_own_choice(client: openai.OpenAI) -> None:
    def block(**extra: object) -> dict[str, object]:
        answer = chat(client, seed=2, extra_body={"speculation_metrics": "detailed", **extra})
        return answer.choices[0].model_extra["metrics"]["speculative_decoding"]

    full, none, one = block(), block(speculate=False), block(num_speculative_tokens=1)
    assert full["num_spec_steps"] > 0
    assert full["mean_acceptance_length"] > one["mean_acceptance_length"] > 1
    assert none["num_draft_tokens"] == 0
    assert none["num_steps"] == 16
    histogram = full["acceptance_histogram"]
    assert sum(histogram) == full["num_spec_steps"]
    assert sum(i * c for i, c in enumerate(histogram)) == full["num_accepted_draft_tokens"]


def test_reports_say_where_each_token_comes_from(client: openai.OpenAI) -> None:
    answer = chat(client, seed=2, extra_body={"report_drafts": True, "return_token_ids": True})
    steps = answer.choices[0].model_extra["steps"]
    ids = [token["id"] for step in steps for token in step["tokens"]]
    assert ids == answer.choices[0].model_extra["token_ids"]
    for step in steps:
        tree = step["tree"]
        assert len(tree["accepted"]) == step["accepted"] <= len(step["tokens"])
        path = [tree["tokens"][node] for node in tree["accepted"]]
        assert path == [token["text"] for token in step["tokens"][: step["accepted"]]]
        if step["last"] == "bonus":
            assert step["accepted"] == len(tree["tokens"]) - 1


@pytest.mark.parametrize("length", [10, 25, 40])
def test_a_stop_text_ends_the_answer_before_it(client: openai.OpenAI, length: int) -> None:
    """Stop texts over chunks and steps: cut, never shown, in pieces as in the whole."""
    ids = chat(client, seed=4, max_tokens=length, extra_body={"return_token_ids": True})
    full = ids.choices[0].message.content
    stop = full[len(full) // 2 : len(full) // 2 + 3]
    where = full.index(stop)
    whole = chat(client, seed=4, max_tokens=length, stop=[stop])
    assert whole.choices[0].message.content == full[:where]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].model_extra["stop_reason"] == stop
    pieces = list(chat(client, seed=4, max_tokens=length, stop=[stop], stream=True))
    text = "".join(c.delta.content or "" for p in pieces for c in p.choices)
    assert text == full[:where]
    assert [c.finish_reason for p in pieces for c in p.choices if c.finish_reason] == ["stop"]


def test_chat_logprobs_are_those_of_plain_decoding(client: openai.OpenAI) -> None:
    """R16: accepted tokens have their own log-probabilities."""

    def rows(**extra: object):
        answer = chat(client, seed=3, logprobs=True, top_logprobs=3, extra_body=extra)
        return answer.choices[0].logprobs.content

    drafted, plain = rows(), rows(speculate=False)
    assert len(drafted) == 16
    for one, other in zip(drafted, plain, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert one.logprob < 0
        assert [t.token for t in one.top_logprobs] == [t.token for t in other.top_logprobs]
        assert len(one.top_logprobs) in (3, 4)


def test_completion_logprobs_and_echo_line_up(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="abcd", max_tokens=6, logprobs=2, echo=True, seed=1
    ).choices[0]
    assert answer.text.startswith("abcd")
    assert answer.logprobs.tokens[:4] == list("abcd")
    assert len(answer.logprobs.tokens) == 10
    assert answer.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in answer.logprobs.token_logprobs[1:])
    assert answer.logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
    streamed = list(
        client.completions.create(
            model=MODEL, prompt="abcd", max_tokens=6, logprobs=2, echo=True, seed=1, stream=True
        )
    )
    tokens = [t for p in streamed for c in p.choices if c.logprobs for t in c.logprobs.tokens]
    assert tokens == answer.logprobs.tokens
    assert "".join(c.text for p in streamed for c in p.choices) == answer.text


def test_several_prompts_are_answered_in_order(client: openai.OpenAI, live: Live) -> None:
    prompts = ["ab", "xyz", "q"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=5, seed=9, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for place, prompt in enumerate(prompts):
        assert answer.choices[2 * place].text == solo(live, prompt, max_tokens=5, seed=9)
    texts = [""] * 6
    for piece in client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=5, seed=9, n=2, stream=True
    ):
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]
    ids = client.completions.create(model=MODEL, prompt=[68, 69, 70], max_tokens=3)
    assert ids.usage.prompt_tokens == 3


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_json_schema(client: openai.OpenAI, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = {"response_format": wanted, "max_tokens": 150, "seed": 3, "temperature": 0.5}
    if stream:
        pieces = chat(client, stream=True, **asked)
        text = "".join(c.delta.content or "" for p in pieces for c in p.choices)
    else:
        text = chat(client, **asked).choices[0].message.content
    found = json.loads(text)
    assert isinstance(found["ok"], bool)
    assert found["kind"] in ("a", "b")


def test_structured_outputs_by_vllm_s_names(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["red", "green"]}}
    assert chat(client, extra_body=extra).choices[0].message.content in ("red", "green")
    extra = {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}
    assert len(chat(client, extra_body=extra).choices[0].message.content) == 6


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_tool_that_must_be_called_is_called(
    client: openai.OpenAI, choice: object, stream: bool
) -> None:
    asked = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 160, "seed": 1}
    if stream:
        pieces = list(chat(client, stream=True, **asked))
        calls = [t for p in pieces for c in p.choices for t in c.delta.tool_calls or ()]
        reason = next(c.finish_reason for p in pieces for c in p.choices if c.finish_reason)
    else:
        answer = chat(client, **asked).choices[0]
        calls, reason = answer.message.tool_calls, answer.finish_reason
    assert calls[0].function.name == "weather"
    if reason == "tool_calls":
        assert set(json.loads(calls[0].function.arguments)) == {"ok", "kind"}


def test_errors_come_as_the_client_s_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.body["code"] == 400
    with pytest.raises(openai.NotFoundError):
        chat(client, model="other")


def test_tokenize_and_back(live: Live) -> None:
    found = httpx.post(
        f"{live.url}/tokenize", json={"prompt": "Ä 你", "return_token_strs": True}
    ).json()
    assert found["count"] == len(found["tokens"]) == len("Ä 你".encode())
    back = httpx.post(f"{live.url}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": "Ä 你"}
    chat_ids = httpx.post(f"{live.url}/tokenize", json={"messages": MESSAGES}).json()
    assert chat_ids["count"] > found["count"]


def test_small_routes_answer(live: Live) -> None:
    for path in (
        "/health",
        "/ping",
        "/version",
        "/load",
        "/metrics",
        "/server_info",
        "/stats",
        "/",
    ):
        answer = httpx.get(live.url + path)
        assert answer.status_code == 200, path
        assert answer.headers["x-request-id"]
    assert httpx.get(f"{live.url}/load").json() == {"server_load": 0}
    shown = httpx.get(f"{live.url}/server_info").json()["speculation"]
    assert shown["acceptance"] == "match"
    assert shown["tree"]["drafted_tokens"] == 3
    assert "default-src 'none'" in httpx.get(live.url).headers["content-security-policy"]
