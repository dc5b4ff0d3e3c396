"""Prompts for benchmarks: real text, by category, from the package's own set or from a JSONL file.

A line of a file is an object with `turns` (a list of user messages; the first one is asked) or `prompt` (text), and
where it has them `id` and `category`. Prompts become conversations, so that the model's own chat template is used.

Invariant: a prompt is text that a person could have written. Random token ids are never made here: what a drafter gets
right is a property of the text, and of nonsense it says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

BUILT_IN = "mixed"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One user message.

    Args:
        id: unique in its set.
        category: what kind of work it is, such as "code".
    """

    id: str
    category: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as a conversation."""
        return [{"role": "user", "content": self.text}]


def load_prompts(source: str = BUILT_IN, count: int | None = None) -> list[BenchPrompt]:
    """Prompts by name or file.

    Args:
        source: "mixed" (the whole built-in set), one of its categories, or the path of a JSONL file.
        count: at most that many, spread over the categories in turn; None = all.

    Raises:
        ValueError: there is no such set or file, a line is not what it should be, or `count` is below 1.
    """
    if count is not None and count < 1:
        raise ValueError(f"the number of prompts must be at least 1, got {count}")
    path = Path(source).expanduser()
    if path.is_file():
        found = read_lines(path.read_text("utf-8"), str(path))
    else:
        found = built_in()
        known = categories(found)
        if source in known:
            found = [prompt for prompt in found if prompt.category == source]
        elif source != BUILT_IN:
            raise ValueError(
                f"prompts {source!r} is neither a file nor a built-in set; known sets: {BUILT_IN}, {', '.join(known)}"
            )
    return found if count is None else in_turn(found)[:count]


def built_in() -> list[BenchPrompt]:
    """The package's own prompts."""
    source = files("foretell.bench") / "prompts" / "mixed.jsonl"
    return read_lines(source.read_text("utf-8"), "the built-in prompts")


def categories(prompts: Sequence[BenchPrompt]) -> list[str]:
    """Their categories, in order of appearance."""
    return list(dict.fromkeys(prompt.category for prompt in prompts))


def in_turn(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The first of every category, then the second of every category, and so on."""
    groups = [[p for p in prompts if p.category == name] for name in categories(prompts)]
    longest = max(map(len, groups), default=0)
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def read_lines(text: str, name: str) -> list[BenchPrompt]:
    """Parse JSONL.

    Args:
        name: how error messages call the source.

    Raises:
        ValueError: a line is not an object with a prompt, or there is no line at all; names line and remedy.
    """
    found = [
        _read(line, f"{name}, line {number}", number)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not found:
        raise ValueError(f"{name} has no prompts; write one JSON object a line")
    return found


def _read(line: str, place: str, number: int) -> BenchPrompt:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error})") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"{place} is not an object; write one like {{'prompt': 'text'}}")
    turns = data.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else data.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place} has neither 'turns' (a list of texts) nor 'prompt' (a text)")
    return BenchPrompt(str(data.get("id", number)), str(data.get("category") or "all"), text)
