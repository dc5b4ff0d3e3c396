"""Text as it lands: whole characters only, stop strings, and nothing that depends on how a reply was cut into steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import REPLY, byte_level, ids_of, sentencepiece_like
from transformers import PreTrainedTokenizerFast

from foretell.text import BROKEN, LONGEST_CHARACTER, Detokenizer, TextStream, TokenText

BYTES = byte_level()
MERGED = byte_level((("Ġ", "e"), ("n", "d"), ("Ń", "Ġ")))
PIECES = sentencepiece_like()
BYTES_TEXT, PIECES_TEXT = TokenText(BYTES), TokenText(PIECES)


def stream(
    text: TokenText = BYTES_TEXT, prompt: Sequence[int] = (), skip: bool = True, **options: object
) -> TextStream:
    return TextStream(Detokenizer(text, prompt, skip), **options)  # type: ignore[arg-type]


def deltas(reply: TextStream, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """What a streaming caller sees when the tokens come in steps of these sizes (the last one repeats)."""
    seen, shown, place, step = [], 0, 0, 0
    while place < len(ids):
        size = sizes[min(step, len(sizes) - 1)]
        for token in ids[place : place + size]:
            if reply.push(token) is not None:
                place = len(ids)
                break
        place, step = place + size, step + 1
        seen.append(reply.text[shown : reply.visible])
        shown = reply.visible
    reply.end()
    seen.append(reply.text[shown : reply.visible])
    return seen


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED, PIECES], ids=["bytes", "merged", "pieces"])
@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("first", range(1, 8))
def test_R42_joined_deltas_are_the_full_text_for_every_step_size(
    tokenizer: PreTrainedTokenizerFast, size: int, first: int
) -> None:
    ids = tokenizer.encode(REPLY, add_special_tokens=False)
    seen = deltas(stream(TokenText(tokenizer)), ids, [first, size])
    assert "".join(seen) == REPLY == tokenizer.decode(ids)
    assert not any(BROKEN in delta for delta in seen)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=30), st.sampled_from([BYTES, PIECES]))
@settings(max_examples=200, deadline=None)
def test_R42_joined_deltas_are_the_full_text_for_any_split(
    sizes: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = tokenizer.encode(REPLY, add_special_tokens=False)
    text = BYTES_TEXT if tokenizer is BYTES else PIECES_TEXT
    seen = deltas(stream(text, stop=("no such", "end!")), ids, sizes)
    assert "".join(seen) == REPLY
    assert not any(BROKEN in delta for delta in seen)


@given(st.text(max_size=40), st.sampled_from([BYTES, PIECES]))
@settings(max_examples=300, deadline=None)
def test_any_text_comes_out_as_a_full_decode(text: str, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    seen = deltas(stream(BYTES_TEXT if tokenizer is BYTES else PIECES_TEXT), ids, [3])
    # A broken piece at the very end is dropped, and the same sign as text cannot be told from it.
    assert "".join(seen) == whole.rstrip(BROKEN)


def test_a_character_is_shown_with_the_token_that_completes_it_and_not_later() -> None:
    ids = BYTES.encode("a你b")
    reader = Detokenizer(BYTES_TEXT)
    assert [reader.push(token) for token in ids] == ["a", "", "", "你", "b"]


def test_stray_bytes_are_shown_as_broken_once_text_follows() -> None:
    ids = [*BYTES.encode("a"), BYTES.encode("你")[0], *BYTES.encode("b")]
    assert "".join(deltas(stream(), ids, [1])) == BYTES.decode(ids) == f"a{BROKEN}b"


def test_an_endless_run_of_stray_bytes_is_not_held_for_ever() -> None:
    ids = [BYTES.encode("你")[0]] * (3 * LONGEST_CHARACTER)
    reader = Detokenizer(BYTES_TEXT)
    shown = [len(reader.push(token)) for token in ids]
    assert sum(shown) >= 2 * LONGEST_CHARACTER
    assert len(reader._window) <= 2 * LONGEST_CHARACTER


def test_a_piece_of_a_character_at_the_end_is_dropped() -> None:
    ids = BYTES.encode("ab你")[:-1]
    reply = stream()
    assert "".join(deltas(reply, ids, [2])) == reply.text == "ab"


def test_tokens_without_text_do_not_pile_up() -> None:
    nothing = len(BYTES) + 5  # the model's vocabulary is padded; the tokenizer knows no such id
    reader = Detokenizer(BYTES_TEXT)
    assert "".join(reader.push(nothing) for _ in range(500)) == ""
    assert len(reader._window) <= LONGEST_CHARACTER
    assert reader.push(BYTES.encode("x")[0]) == "x"


def test_the_space_before_the_first_word_depends_on_the_prompt() -> None:
    prompt = ids_of(PIECES, "<s>", "▁Paris", "▁is", "▁a")
    city = ids_of(PIECES, "▁city", "s")
    assert "".join(deltas(stream(PIECES_TEXT, prompt), city, [1])) == " citys"
    assert "".join(deltas(stream(PIECES_TEXT), city, [1])) == "citys"


def test_a_character_that_the_prompt_begins_is_part_of_the_reply() -> None:
    ids = BYTES.encode("x你")
    assert "".join(deltas(stream(prompt=ids[:-1]), [*ids[-1:], *BYTES.encode("!")], [1])) == "你!"


def test_special_tokens_are_skipped_or_kept() -> None:
    hello, end = BYTES.encode("hi"), ids_of(BYTES, "<|end|>")
    ids = [*hello, *end, *hello]
    assert "".join(deltas(stream(), ids, [1])) == "hihi"
    assert "".join(deltas(stream(skip=False), ids, [1])) == "hi<|end|>hi"


def test_a_skipped_special_token_does_not_eat_the_space_after_it() -> None:
    ids = [*ids_of(PIECES, "▁a", "</s>"), *ids_of(PIECES, "▁city")]
    assert (
        "".join(deltas(stream(PIECES_TEXT), ids, [1]))
        == PIECES.decode(ids, skip_special_tokens=True)
        == "a city"
    )


def feed(reply: TextStream, text: str) -> tuple[str | None, int]:
    """Push a text byte by byte; the stop string and how many tokens it took."""
    ids = BYTES.encode(text)
    for place, token in enumerate(ids):
        stop = reply.push(token)
        if stop is not None:
            return stop, place + 1
    return reply.end(), len(ids)


@pytest.mark.parametrize(
    ("stop", "text", "expected", "left", "tokens"),
    [
        (("STOP",), "go STOP on", "STOP", "go ", 7),
        (("b", "a"), "xayb", "a", "x", 2),
        (("abc", "b"), "xabc", "b", "xa", 3),  # complete first, although it starts later
        (("bc", "abc"), "xabc", "abc", "x", 4),  # complete together: the longer one
        (("好",), "你好!", "好", "你", 6),  # complete with its last byte
        (("aab",), "aaab", "aab", "a", 4),  # overlaps its own beginning
        (("\n\n",), "a\nb\n\nc", "\n\n", "a\nb", 5),
        (("never",), "neve", None, "neve", 4),
    ],
)
def test_stop_strings_cut_the_text_where_the_first_one_is_complete(
    stop: tuple[str, ...], text: str, expected: str | None, left: str, tokens: int
) -> None:
    reply = stream(stop=stop)
    assert feed(reply, text) == (expected, tokens)
    assert reply.text == left
    assert reply.visible == len(left)


def test_the_text_can_end_behind_the_stop_string() -> None:
    reply = stream(stop=("STOP",), include_stop=True)
    feed(reply, "go STOP on")
    assert reply.text == "go STOP"


def test_a_stop_string_inside_one_token_cuts_that_token() -> None:
    tokenizer = byte_level((("a", "b"), ("ab", "c"), ("abc", "d")))
    token = ids_of(tokenizer, "abcd")
    for include, left in ((False, "a"), (True, "abc")):
        reply = stream(TokenText(tokenizer), stop=("bc",), include_stop=include)
        assert reply.push(token[0]) == "bc"
        assert reply.text == left


@pytest.mark.parametrize(
    "merges", [(), (("a", "b"),), (("b", "c"),), (("a", "b"), ("ab", "c"), ("abc", "d"))]
)
def test_stops_do_not_depend_on_how_the_text_was_tokenised(
    merges: tuple[tuple[str, str], ...],
) -> None:
    tokenizer = byte_level(merges)
    reply = stream(TokenText(tokenizer), stop=("abcd", "bc"))
    stops = (reply.push(token) for token in tokenizer.encode("xabcd"))
    assert next(stop for stop in stops if stop) == "bc"
    assert reply.text == "xa"


def test_text_that_may_become_a_stop_string_is_held_back_and_no_more() -> None:
    reply = stream(stop=("STOP", "TX"))
    visible = []
    for token in BYTES.encode("a SSTO S"):
        reply.push(token)
        visible.append(reply.text[: reply.visible])
    assert visible == ["a", "a ", "a ", "a S", "a S", "a S", "a SSTO ", "a SSTO "]
    reply.end()
    assert reply.text[: reply.visible] == "a SSTO S"


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_streamed_text_is_the_final_text_and_ends_at_the_first_complete_stop(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    reply = stream(stop=stop)
    seen = "".join(deltas(reply, BYTES.encode(text), sizes))
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    expected = text if not ends else text[: sum(min(ends))]
    assert seen == reply.text == expected


def test_stop_strings_wait_for_min_tokens() -> None:
    reply = stream(stop=("a",), min_tokens=3)
    ids = BYTES.encode("aaaa")
    assert [reply.push(token) for token in ids] == [None, None, None, "a"]
    assert reply.text == "aaa"


def test_a_stop_string_may_begin_before_min_tokens_are_over() -> None:
    reply = stream(stop=("abc",), min_tokens=2)
    assert feed(reply, "abcd") == ("abc", 3)


def test_without_a_detokenizer_there_is_no_text() -> None:
    reply = TextStream(None)
    assert reply.push(5) is None
    assert reply.end() is None
    assert (reply.text, reply.visible) == ("", 0)
