"""Prompts are real text: the built-in set, files of either form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.bench.prompts import built_in, categories, in_turn, load_prompts


def test_the_built_in_set_has_several_kinds_and_no_double() -> None:
    found = built_in()
    kinds = categories(found)
    assert {"chat", "code", "edit", "summary", "question", "math", "translate", "copy"} == set(
        kinds
    )
    assert len({p.id for p in found}) == len({p.text for p in found}) == len(found) >= 40
    assert all(sum(p.category == kind for p in found) >= 4 for kind in kinds)


def test_a_category_of_the_built_in_set_is_a_set() -> None:
    assert {p.category for p in load_prompts("code")} == {"code"}


def test_a_number_takes_from_all_categories_in_turn() -> None:
    found = load_prompts("mixed", 9)
    assert len(found) == 9
    assert len(set(categories(found))) == 8
    assert in_turn(found)[0] == found[0]


def test_both_forms_of_a_line_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [
        {"id": "q-1", "category": "math", "turns": ["first", "second"], "reference": None},
        {"prompt": "plain"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", "utf-8")
    first, second = load_prompts(str(path))
    assert (first.id, first.category, first.text) == ("q-1", "math", "first")
    assert first.messages == [{"role": "user", "content": "first"}]
    assert (second.id, second.category, second.text) == ("2", "all", "plain")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"line 1 is not JSON"),
        ("[1]", r"line 1 is not an object"),
        ('{"prompt": "ok"}\n{"turns": []}', r"line 2 has neither 'turns'"),
        ('{"prompt": "  "}', r"line 1 has neither"),
        ("\n\n", "has no prompts"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_an_unknown_set_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known sets: mixed, chat, code"):
        load_prompts("poetry")
    with pytest.raises(ValueError, match="at least 1"):
        load_prompts("mixed", 0)
