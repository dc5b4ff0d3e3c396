"""Calls of functions and thoughts in the text of an answer, as models write them; whole or as the text lands.

Formats: Hermes and Qwen (<tool_call>{"name": ..., "arguments": ...}</tool_call>), Llama 3's JSON
({"name": ..., "parameters": ...}, after <|python_tag|> or bare), Mistral ([TOOL_CALLS][{...}] and
[TOOL_CALLS]name[ARGS]{...}); thoughts between <think> and </think>.

A reader takes text piece by piece, however it was cut, and hands out what is certain: a piece that may still become a
sign is held back, and a call comes in one piece when it is complete. What looks like a call and is none stays text.

Invariant: what a reader hands out for a text does not depend on how the text was cut.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class FoundCall:
    """One call; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Found:
    """What is new in an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[FoundCall, ...] = ()

    def plus(self, other: Found) -> Found:
        """Both, in this order."""
        return Found(
            self.content + other.content,
            self.reasoning + other.reasoning,
            self.calls + other.calls,
        )


class Reader(Protocol):
    """Takes an answer piece by piece."""

    def read(self, text: str) -> Found:
        """What this piece makes certain."""
        ...

    def end(self) -> Found:
        """What was held back."""
        ...


class PlainReader:
    """All text is content."""

    def read(self, text: str) -> Found:
        """The text."""
        return Found(content=text)

    def end(self) -> Found:
        """Nothing."""
        return Found()


@dataclass(slots=True)
class ReasoningReader:
    """Thoughts first, then what another reader makes of the rest.

    Args:
        rest: reads what follows the thoughts.
        thinking: the answer begins inside the thoughts (the prompt opened them, or the model never does).
    """

    rest: Reader
    thinking: bool
    _held: str = ""
    _begun: bool = False
    _done: bool = False
    _start: bool = False  # line ends at the start of a part belong to the sign before it

    def read(self, text: str) -> Found:
        """See Reader."""
        self._held += text
        if not self._begun and not self._begin():
            return Found()
        self._drop_line_ends()
        if self._done:
            return self._pass()
        before, sign, after = self._held.partition(END_THINK)
        if sign:
            self._done = self._start = True
            self._held = after
            self._drop_line_ends()
            return Found(reasoning=before).plus(self._pass())
        cut = len(self._held) - overlap(self._held, END_THINK)
        ready, self._held = self._held[:cut], self._held[cut:]
        return Found(reasoning=ready)

    def end(self) -> Found:
        """See Reader."""
        held, self._held = self._held, ""
        if self._done:
            return self.rest.end()
        if self._begun:
            return Found(reasoning=held)
        return self.rest.read(held).plus(self.rest.end())

    def _begin(self) -> bool:
        """Whether it is known if the answer starts with thoughts."""
        text = self._held.lstrip()
        if len(text) < len(THINK) and THINK.startswith(text):
            return False
        self._begun = True
        if text.startswith(THINK):
            self._held, self._start = text[len(THINK) :], True
        elif not self.thinking:
            self._done = True
        return True

    def _drop_line_ends(self) -> None:
        if self._start:
            self._held = self._held.lstrip("\n")
            self._start = not self._held

    def _pass(self) -> Found:
        held, self._held = self._held, ""
        return self.rest.read(held) if held else Found()


@dataclass(slots=True)
class HermesReader:
    """Calls between <tool_call> and </tool_call>."""

    start: str = "<tool_call>"
    stop: str = "</tool_call>"
    _held: str = ""
    _inside: bool = False

    def read(self, text: str) -> Found:
        """See Reader."""
        self._held += text
        found = Found()
        while True:
            if not self._inside:
                before, sign, after = self._held.partition(self.start)
                if not sign:
                    size = overlap(self._held, self.start)
                    ready = self._held[: len(self._held) - size]
                    self._held = self._held[len(self._held) - size :]
                    return found.plus(Found(content=ready))
                found = found.plus(Found(content=before))
                self._held, self._inside = after, True
            inside, sign, after = self._held.partition(self.stop)
            if not sign:
                return found
            call = parse_call(inside)
            whole = Found(content=f"{self.start}{inside}{self.stop}")
            found = found.plus(whole if call is None else Found(calls=(call,)))
            self._held, self._inside = after, False

    def end(self) -> Found:
        """See Reader."""
        held, self._held = self._held, ""
        if not self._inside:
            return Found(content=held)
        self._inside = False
        call = parse_call(held)  # the end token may stand in place of the closing sign
        return Found(content=self.start + held) if call is None else Found(calls=(call,))


@dataclass(slots=True)
class WholeReader:
    """Holds an answer back from a sign on, and reads it at the end.

    Args:
        signs: what may begin the calls.
        anywhere: a sign counts anywhere in the text; else only at its start.
    """

    signs: tuple[str, ...]
    anywhere: bool
    _held: str = ""
    _calling: bool = False
    _plain: bool = False

    def read(self, text: str) -> Found:
        """See Reader."""
        if self._plain:
            return Found(content=text)
        self._held += text
        if self._calling:
            return Found()
        if self.anywhere:
            return self._look()
        start = self._held.lstrip()
        if any(start.startswith(sign) for sign in self.signs):
            self._calling = True
        elif start and not any(sign.startswith(start) for sign in self.signs):
            self._plain = True
            held, self._held = self._held, ""
            return Found(content=held)
        return Found()

    def end(self) -> Found:
        """See Reader."""
        held, self._held = self._held, ""
        calls = parse_calls(held, self.signs) if self._calling else ()
        return Found(calls=calls) if calls else Found(content=held)

    def _look(self) -> Found:
        places = [self._held.find(sign) for sign in self.signs if sign in self._held]
        if places:
            self._calling = True
            cut = min(places)
        else:
            cut = len(self._held) - max(overlap(self._held, sign) for sign in self.signs)
        ready, self._held = self._held[:cut], self._held[cut:]
        return Found(content=ready)


@dataclass(slots=True)
class ForcedReader:
    """The whole answer is JSON that a constraint made: the arguments of one function, or a list of calls.

    Args:
        name: the function; None = the list names them.
    """

    name: str | None
    _held: list[str] = field(default_factory=list)

    def read(self, text: str) -> Found:
        """See Reader."""
        self._held.append(text)
        return Found()

    def end(self) -> Found:
        """See Reader."""
        text = "".join(self._held).strip()
        if self.name is not None:
            return Found(calls=(FoundCall(self.name, text),))
        calls = parse_calls(text, ())
        return Found(calls=calls) if calls else Found(content=text)


def reader_of(format: str) -> Reader:
    """The reader of a format's calls: "hermes", "llama3_json" or "mistral"."""
    match format:
        case "hermes":
            return HermesReader()
        case "llama3_json":
            return WholeReader(("<|python_tag|>", "{"), anywhere=False)
        case "mistral":
            return WholeReader(("[TOOL_CALLS]",), anywhere=True)
    raise ValueError(f"tool_call_parser must be hermes, llama3_json or mistral, got {format!r}")


def format_of(template: str) -> str:
    """Which format a chat template teaches its model; Hermes' where it says nothing."""
    if "[TOOL_CALLS]" in template or "[AVAILABLE_TOOLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama3_json"
    return "hermes"


def overlap(text: str, sign: str) -> int:
    """Length of the longest end of `text` that begins `sign` without being all of it."""
    for size in range(min(len(sign) - 1, len(text)), 0, -1):
        if text.endswith(sign[:size]):
            return size
    return 0


def parse_call(text: str) -> FoundCall | None:
    """A call from {"name": ..., "arguments" or "parameters": ...}."""
    try:
        return _as_call(json.loads(text))
    except (ValueError, RecursionError):
        return None


def parse_calls(text: str, signs: Sequence[str]) -> tuple[FoundCall, ...]:
    """Calls from a list, from objects one after the other, or from name[ARGS]{...}; () if it is anything else."""
    decoder, found, place = json.JSONDecoder(), list[FoundCall](), 0
    while True:
        sign = next((sign for sign in signs if len(sign) > 1 and text.startswith(sign, place)), "")
        while sign or (place < len(text) and text[place] in " \t\r\n;,"):
            place += len(sign) or 1
            sign = next((s for s in signs if len(s) > 1 and text.startswith(s, place)), "")
        if place == len(text):
            return tuple(found)
        name = None
        if text[place] not in "[{":
            name, sign, _ = text[place:].partition("[ARGS]")
            if not sign:
                return ()
            place += len(name) + len(sign)
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return ()
        if name is not None:
            found.append(FoundCall(name.strip(), json.dumps(value, ensure_ascii=False)))
            continue
        for one in value if isinstance(value, list) else [value]:
            call = _as_call(one)
            if call is None:
                return ()
            found.append(call)


def call_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of one function's arguments."""
    return parameters if parameters else {"type": "object"}


def calls_schema(functions: Sequence[tuple[str, dict[str, Any] | None]]) -> dict[str, Any]:
    """The schema of a list of calls of these functions, at least one."""
    one = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": call_schema(parameters)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in functions
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": one}}


def _as_call(value: object) -> FoundCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return FoundCall(value["name"], arguments)
    return FoundCall(value["name"], json.dumps(arguments, ensure_ascii=False))
