"""What an answer must look like: a JSON schema, a regular expression, one of several texts, or a grammar.

Plain data, torch-free and without the library that compiles it (spec/grammar.py). Names are vLLM's.

Invariant: an instance holds exactly one constraint, as canonical text, and is hashable.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["json", "regex", "choice", "grammar"]

MAX_TEXT = 1 << 17  # characters of a schema, an expression or a grammar
MAX_CHOICES = 1024
_FORMS = "json, regex, choice, grammar or json_object"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Constrains the text of an answer; give exactly one of json, regex, choice, grammar and json_object.

    Args:
        json: a JSON schema, as a dict or as text.
        regex: a regular expression that the whole answer matches (no look-around, no back-references).
        choice: the answer is one of these.
        grammar: in Lark's or GBNF's notation; its first rule is `start` or `root`.
        json_object: any JSON object.
        begins_after: the constraint holds from this text on, as after "</think>"; what comes before is free.

    Raises:
        ValueError: none or several are given, or one is empty, too long or no JSON.
    """

    json: str | Mapping[str, Any] | None = field(default=None, hash=False, compare=False)
    regex: str | None = field(default=None, hash=False, compare=False)
    choice: Sequence[str] | None = field(default=None, hash=False, compare=False)
    grammar: str | None = field(default=None, hash=False, compare=False)
    json_object: bool | None = field(default=None, hash=False, compare=False)
    begins_after: str | None = None
    kind: Kind = field(init=False)
    text: str = field(init=False)

    def __post_init__(self) -> None:
        given = {
            "json": self.json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            got = " and ".join(named) or "none of them"
            raise ValueError(f"structured_outputs needs exactly one of {_FORMS}, got {got}.")
        kind, text = _canonical(named[0], given[named[0]])
        if len(text) > MAX_TEXT:
            raise ValueError(
                f"structured_outputs: {named[0]} has {len(text)} characters, at most {MAX_TEXT} are allowed."
            )
        if self.begins_after == "":
            raise ValueError("structured_outputs: begins_after must not be empty; leave it out.")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "text", text)


def _canonical(name: str, value: object) -> tuple[Kind, str]:
    match name:
        case "json":
            return "json", _schema(value)
        case "json_object":
            return "json", '{"type": "object"}'
        case "choice":
            return "choice", jsonlib.dumps(_choices(value))
        case "regex" | "grammar":
            if not isinstance(value, str) or not value:
                raise ValueError(
                    f"structured_outputs: {name} must be a text that is not empty, got {value!r}."
                )
            return ("regex" if name == "regex" else "grammar"), value
    raise AssertionError(name)


def _schema(value: object) -> str:
    if isinstance(value, str):
        try:
            value = jsonlib.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs: json is not JSON ({error}).") from None
    if not isinstance(value, Mapping | bool):
        raise ValueError(f"structured_outputs: json must be a JSON schema, got {value!r}.")
    try:
        return jsonlib.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: json is not a JSON schema ({error}).") from None


def _choices(value: object) -> list[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"structured_outputs: choice must be a list of texts, got {value!r}.")
    listed = list(value)
    if not listed or not all(isinstance(one, str) and one for one in listed):
        raise ValueError(
            "structured_outputs: choice must name at least one text, and none may be empty."
        )
    if len(listed) > MAX_CHOICES:
        raise ValueError(
            f"structured_outputs: choice has {len(listed)} texts, at most {MAX_CHOICES} are allowed."
        )
    return listed
