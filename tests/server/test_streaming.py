"""Streams of scripted answers, committed in steps of every size: characters whole, stop texts hidden, usage right."""

from __future__ import annotations

import json

import httpx
import pytest
from fake_engine import Added, FakeEngine
from serving_lab import Live, start
from tiny_tokenizers import REPLY, byte_level

from foretell.config import EngineConfig
from foretell.llm import LLM

TOKENIZER = byte_level((("e", "n"), ("en", "d"), ("Ġ", "end")))
IDS = TOKENIZER.encode(REPLY, add_special_tokens=False)
END = 1


def scripted(size: int, reply: str = REPLY, **settings: object) -> Live:
    """A server whose engine says `reply`, `size` tokens a step."""
    ids = [*TOKENIZER.encode(reply, add_special_tokens=False), END]

    def script(request: Added) -> list[int]:
        return ids

    engine = FakeEngine(script, size=size, max_model_len=400)
    config = EngineConfig(model="tiny")
    return start(LLM.around(config, engine, TOKENIZER), **settings)  # type: ignore[arg-type]


def events(live: Live, path: str, **body: object) -> list[dict]:
    asked = {"stream": True, "stream_options": {"include_usage": True}, **body}
    answer = httpx.post(live.url + path, json=asked, timeout=30)
    lines = [line for line in answer.text.split("\n\n") if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("size", range(1, 8))
def test_characters_are_never_cut_and_roles_and_ends_come_once(size: int) -> None:
    """R42: byte-level tokens of two- to four-byte characters in steps of 1 to 7."""
    live = scripted(size)
    try:
        found = events(live, "/v1/chat/completions", **CHAT)
        usage = found.pop()
        deltas = [piece["choices"][0]["delta"] for piece in found]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in delta for delta in deltas[1:])
        texts = [delta.get("content", "") for delta in deltas]
        assert "".join(texts) == REPLY
        assert not any("\ufffd" in text for text in texts)
        reasons = [piece["choices"][0]["finish_reason"] for piece in found]
        assert [r for r in reasons if r] == ["stop"]
        assert reasons[-1] == "stop"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(IDS) + 1
        whole = httpx.post(f"{live.url}/v1/chat/completions", json=CHAT, timeout=30).json()
        assert whole["choices"][0]["message"]["content"] == REPLY
        assert whole["usage"]["completion_tokens"] == len(IDS) + 1
        texts = [p["choices"][0]["text"] for p in events(live, "/v1/completions", prompt="x")[:-1]]
        assert len("".join(texts)) <= 16 * 4  # the default of max_tokens
        long = events(live, "/v1/completions", prompt="x", max_tokens=200)[:-1]
        assert "".join(p["choices"][0]["text"] for p in long) == REPLY
    finally:
        live.close()


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("stop", ["好 👍", " end", "Ü", "Ö\u00dc 你"])
def test_a_stop_text_across_steps_is_never_shown(size: int, stop: str) -> None:
    live = scripted(size)
    try:
        wanted = REPLY[: REPLY.index(stop)]
        found = events(live, "/v1/chat/completions", stop=[stop, "never"], **CHAT)
        text = "".join(c["delta"].get("content", "") for p in found for c in p["choices"])
        assert text == wanted
        last = found[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        kept = events(
            live, "/v1/chat/completions", stop=stop, include_stop_str_in_output=True, **CHAT
        )
        text = "".join(c["delta"].get("content", "") for p in kept for c in p["choices"])
        assert text == wanted + stop
    finally:
        live.close()


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_calls_and_thoughts_come_whole_in_streams(size: int) -> None:
    reply = (
        '<think>so ä</think>\nWell.<tool_call>{"name": "f", "arguments": {"a": "👍🏽"}}</tool_call>'
    )
    live = scripted(size, reply, reasoning_parser="qwen3", tool_parser="hermes")
    try:
        found = events(live, "/v1/chat/completions", tools=TOOLS, **CHAT)[:-1]
        deltas = [c["delta"] for p in found for c in p["choices"]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "so ä"
        assert "".join(d.get("content") or "" for d in deltas) == "Well."
        calls = [call for d in deltas for call in d.get("tool_calls", ())]
        assert len(calls) == 1
        assert calls[0]["index"] == 0
        assert json.loads(calls[0]["function"]["arguments"]) == {"a": "👍🏽"}
        assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
        whole = httpx.post(
            f"{live.url}/v1/chat/completions", json={"tools": TOOLS, **CHAT}, timeout=30
        ).json()["choices"][0]
        assert whole["message"]["reasoning_content"] == "so ä"
        assert whole["message"]["content"] == "Well."
        assert whole["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert whole["finish_reason"] == "tool_calls"
        free = httpx.post(
            f"{live.url}/v1/chat/completions",
            json={"tools": TOOLS, "tool_choice": "none", **CHAT},
            timeout=30,
        ).json()["choices"][0]
        assert "<tool_call>" in free["message"]["content"]
    finally:
        live.close()


def test_logprobs_of_a_stream_line_up_with_its_tokens() -> None:
    live = scripted(3)
    try:
        found = events(live, "/v1/chat/completions", logprobs=True, top_logprobs=2, **CHAT)[:-1]
        rows = [
            row
            for piece in found
            for choice in piece["choices"]
            if choice["logprobs"]
            for row in choice["logprobs"]["content"]
        ]
        assert len(rows) == len(IDS) + 1
        assert all(len(row["top_logprobs"]) >= 2 for row in rows)
    finally:
        live.close()
