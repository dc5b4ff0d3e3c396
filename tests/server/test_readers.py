"""Calls and thoughts are found in the text however it was cut; what is handed out does not depend on the cuts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.server.tools import (
    Found,
    FoundCall,
    HermesReader,
    PlainReader,
    Reader,
    ReasoningReader,
    WholeReader,
    format_of,
    reader_of,
)

CALL = '{"name": "f", "arguments": {"a": "ä 👍🏽", "b": [1, 2]}}'
F = FoundCall("f", '{"a": "ä 👍🏽", "b": [1, 2]}')
LLAMA = '{"name": "f", "parameters": {"a": "ä 👍🏽", "b": [1, 2]}}'


def hermes() -> Reader:
    return HermesReader()


def llama() -> Reader:
    return reader_of("llama3_json")


def mistral() -> Reader:
    return reader_of("mistral")


def thinking(start: bool = False) -> Callable[[], Reader]:
    return lambda: ReasoningReader(HermesReader(), start)


CASES: list[tuple[Callable[[], Reader], str, Found]] = [
    (hermes, "just text", Found("just text")),
    (hermes, f"Sure.<tool_call>{CALL}</tool_call>", Found("Sure.", calls=(F,))),
    (
        hermes,
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
        Found("\n", calls=(F, F)),
    ),
    (hermes, f"<tool_call>{CALL}", Found(calls=(F,))),
    (hermes, "<tool_call>not json</tool_call> x", Found("<tool_call>not json</tool_call> x")),
    (hermes, "a < b <tool <tool_cal", Found("a < b <tool <tool_cal")),
    (hermes, '<tool_call>{"name": 3}</tool_call>', Found('<tool_call>{"name": 3}</tool_call>')),
    (llama, LLAMA, Found(calls=(F,))),
    (llama, f"<|python_tag|>{LLAMA}; {LLAMA}", Found(calls=(F, F))),
    (llama, '{"x": 1}', Found('{"x": 1}')),
    (llama, "{ not json", Found("{ not json")),
    (llama, "Text with { in it", Found("Text with { in it")),
    (mistral, f"[TOOL_CALLS][{CALL}]", Found(calls=(F,))),
    (mistral, f"Well [TOOL_CALLS] [{CALL}, {CALL}]", Found("Well ", calls=(F, F))),
    (mistral, '[TOOL_CALLS]f[ARGS]{"a": 1}', Found(calls=(FoundCall("f", '{"a": 1}'),))),
    (
        mistral,
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}',
        Found(calls=(FoundCall("f", '{"a": "[TOOL_CALLS]"}'), FoundCall("g", "{}"))),
    ),
    (mistral, "[TOOL_CALLS]nonsense", Found("[TOOL_CALLS]nonsense")),
    (mistral, "[TOOL", Found("[TOOL")),
    (thinking(), "<think>\nhm</think>\n\nyes", Found("yes", "hm")),
    (thinking(), "no thoughts", Found("no thoughts")),
    (thinking(), "<thin", Found("<thin")),
    (thinking(), "<think>never ends </thi", Found("", "never ends </thi")),
    (thinking(True), "hm</think>yes", Found("yes", "hm")),
    (thinking(True), "<think>hm</think>yes", Found("yes", "hm")),
    (thinking(), f"<think>x</think><tool_call>{CALL}</tool_call>", Found("", "x", (F,))),
    (lambda: PlainReader(), "a <think> b", Found("a <think> b")),
    (lambda: WholeReader(("[X]",), anywhere=True), "a[X", Found("a[X")),
]


def read(reader: Reader, pieces: list[str]) -> Found:
    found = Found()
    for piece in pieces:
        found = found.plus(reader.read(piece))
    return found.plus(reader.end())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_is_found_does_not_depend_on_the_size_of_pieces(case: int, size: int) -> None:
    make, text, wanted = CASES[case]
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert read(make(), pieces) == wanted


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_cut_gives_the_same(data: st.DataObject) -> None:
    make, text, wanted = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert read(make(), pieces) == wanted


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "{", CALL, "<think>", "x", "[TOOL_CALLS]"])
    )
)
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_or_made_up(parts: list[str]) -> None:
    """Every piece of text comes out as content, a thought or a call."""
    text = "".join(parts)
    for make in (hermes, llama, mistral, thinking()):
        once = read(make(), [text])
        assert once == read(make(), list(text))
        if not once.calls and not once.reasoning and "<think>" not in text:
            assert once.content == text
        for call in once.calls:
            json.loads(call.arguments)


def test_the_format_is_known_from_the_template() -> None:
    assert format_of("... <tool_call> ...") == "hermes"
    assert format_of("[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert format_of("<|python_tag|>") == "llama3_json"
    assert format_of("") == "hermes"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="hermes, llama3_json or mistral"):
        reader_of("xml")
