"""Prompts and answers as files, and packed rows of them: everything about training text that needs no model.

A prompt file has one JSON object a line: {"turns": [text, ...]} (the first is asked), {"prompt": text} or {"messages":
[...]}; messages that end with the assistant's are taken as answered. An answer file has what the target saw and said as
token ids, with the spans the assistant wrote. Invariant: loss is only ever taken on tokens inside those spans.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from foretell.prompts import ChatOptions, encode_chat
from foretell.text import Tokenizer

log = logging.getLogger("foretell")

OnBroken = Literal["stop", "skip"]
OPEN_ROWS = 64  # rows that packing keeps open at the same time


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation; if its last message is the assistant's it needs no answer."""

    id: str
    messages: tuple[Mapping[str, Any], ...]

    @property
    def answered(self) -> bool:
        """The last message is the assistant's."""
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"


@dataclass(frozen=True, slots=True)
class Example:
    """A text as the target reads it, and what of it the assistant wrote."""

    id: str
    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]  # half-open


def read_asked(path: Path, on_broken: OnBroken = "stop") -> list[Asked]:
    """The conversations of a prompt file.

    Raises:
        ValueError: the file is not there or has nothing in it; or, unless broken lines are skipped, a line is empty or
            broken: names it by number.
    """
    if not path.is_file():
        raise ValueError(
            f"data file {str(path)!r} does not exist; give a JSONL file or 'synthetic'"
        )
    found: list[Asked] = []
    # At "\n" only: texts may hold other characters that str.splitlines takes for the end of a line.
    lines = path.read_text("utf-8").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_asked(line, f"{path.stem}-{number}"))
        except ValueError as error:
            where = f"{path.name} line {number}: {error}"
            if on_broken == "stop":
                raise ValueError(
                    f"{where}; mend it, or leave such lines out with --on-broken skip"
                ) from None
            log.warning("%s; skipped", where)
    if not found:
        raise ValueError(f"{path.name} holds no prompts")
    return found


def _asked(line: str, fallback: str) -> Asked:
    if not line.strip():
        raise ValueError("the line is empty")
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(given, dict):
        raise ValueError(f"must be a JSON object, got {type(given).__name__}")
    name = str(given.get("id", fallback))
    if "messages" in given:
        messages = given["messages"]
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        ):
            raise ValueError("'messages' must be a list of {'role': ..., 'content': ...}")
        return Asked(name, tuple(messages))
    text = given["turns"][0] if _texts(given.get("turns")) else given.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("there is neither 'turns' (a list of texts), 'prompt' nor 'messages'")
    return Asked(name, ({"role": "user", "content": text},))


def _texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def prompt_ids(asked: Asked, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens after which the assistant answers."""
    return encode_chat(asked.messages, tokenizer, ChatOptions(), asked.id).token_ids


def answered_example(asked: Asked, tokenizer: Tokenizer) -> Example:
    """An answered conversation as tokens; the spans are what each assistant message adds to what was before it.

    Raises:
        ValueError: the template writes a message differently once others follow: then nobody can say which tokens are
            the assistant's.
    """
    spans: list[tuple[int, int]] = []
    tokens: tuple[int, ...] = ()
    for place, message in enumerate(asked.messages):
        if message["role"] != "assistant":
            continue
        before = prompt_ids(Asked(asked.id, asked.messages[:place]), tokenizer)
        options = ChatOptions(add_generation_prompt=False)
        whole = encode_chat(asked.messages[: place + 1], tokenizer, options, asked.id).token_ids
        if whole[: len(before)] != before or before[: len(tokens)] != tokens:
            raise ValueError(
                f"{asked.id}: the chat template does not write message {place} after the words that begin an answer, "
                "so its tokens cannot be told apart; was the data made with another template?"
            )
        spans.append((len(before), len(whole)))
        tokens = whole
    return Example(asked.id, tokens, tuple(spans))


def template_of(tokenizer: Tokenizer) -> str:
    """A fingerprint of a chat template."""
    text = json.dumps(tokenizer.chat_template, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_line(example: Example) -> str:
    """An example as a line of an answer file."""
    spans = [list(span) for span in example.spans]
    return json.dumps({"id": example.id, "spans": spans, "tokens": list(example.tokens)}) + "\n"


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of an answer file: what it must fit."""

    template: str
    vocab_size: int

    def line(self) -> str:
        """As it is written."""
        return json.dumps({"template": self.template, "vocab_size": self.vocab_size}) + "\n"


def read_answers(
    path: Path, header: Header | None = None, on_broken: OnBroken = "stop"
) -> Iterator[Example]:
    """The examples of an answer file.

    Args:
        header: what the target at hand would write; None = do not compare.

    Raises:
        ValueError: another template or vocabulary, or a broken line, named by number.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                given = json.loads(raw)
                if number == 1 and "template" in given:
                    _compare(path, Header(given["template"], given["vocab_size"]), header)
                    continue
                spans = tuple((int(a), int(b)) for a, b in given["spans"])
                example = Example(str(given["id"]), tuple(map(int, given["tokens"])), spans)
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                where = (
                    f"{path.name} line {number}: not an answer ({type(error).__name__}: {error})"
                )
                if on_broken == "stop":
                    raise ValueError(
                        f"{where}; remove the line, or leave such lines out with --on-broken skip"
                    ) from None
                log.warning("%s; skipped", where)
                continue
            yield example


def _compare(path: Path, found: Header, wanted: Header | None) -> None:
    if wanted is None or found == wanted:
        return
    if found.template != wanted.template:
        raise ValueError(
            f"{path.name} was written with another chat template (fingerprint {found.template}) than the target serves "
            f"with ({wanted.template}); a head trained on it would meet other tokens. Answer the prompts again"
        )
    raise ValueError(
        f"{path.name} holds tokens of a vocabulary of {found.vocab_size}, the target's has {wanted.vocab_size}; "
        "answer the prompts again"
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of L tokens, several documents in each, on the CPU."""

    tokens: Tensor  # [rows, L] int64, 0 where nothing is
    places: Tensor  # [rows, L] int64, from 0 in each document
    documents: Tensor  # [rows, L] int64, -1 where nothing is
    assistant: Tensor  # [rows, L] bool, written by the assistant

    def take(self, rows: Tensor) -> Packed:
        """Some of the rows."""
        return Packed(
            self.tokens[rows], self.places[rows], self.documents[rows], self.assistant[rows]
        )

    def to(self, device: torch.device) -> Packed:
        """On a device."""
        return Packed(*(t.to(device, non_blocking=True) for t in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of it."""
        return self.tokens, self.places, self.documents, self.assistant


def pack(examples: Sequence[Example], length: int) -> Packed:
    """Lay examples into rows, longest first; what does not fit a row is cut off.

    Raises:
        ValueError: no token of the assistant is left.
    """
    fitting = [e for e in examples if any(start < min(end, length) for start, end in e.spans)]
    if not fitting:
        raise ValueError(
            f"no assistant tokens are left after masking ({len(examples)} examples, rows of {length} tokens); is the "
            "chat template that of the data, or are all prompts longer than a row?"
        )
    if len(fitting) < len(examples):
        log.info("%d examples have no assistant tokens in reach", len(examples) - len(fitting))
    rows: list[list[Example]] = []
    room: list[int] = []
    still_open: list[int] = []
    for example in sorted(fitting, key=lambda e: (-min(len(e.tokens), length), e.id)):
        size = min(len(example.tokens), length)
        place = next((i for i in still_open if room[i] >= size), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(length)
            still_open.append(place)
            if len(still_open) > OPEN_ROWS:
                still_open.remove(min(still_open, key=lambda i: room[i]))
        rows[place].append(example)
        room[place] -= size
    return _laid(rows, length)


def _laid(rows: Sequence[Sequence[Example]], length: int) -> Packed:
    shape = (len(rows), length)
    tokens, places = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    documents, assistant = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
    for row, examples in enumerate(rows):
        at = 0
        for number, example in enumerate(examples):
            size = min(len(example.tokens), length)
            tokens[row, at : at + size] = torch.tensor(example.tokens[:size])
            places[row, at : at + size] = torch.arange(size)
            documents[row, at : at + size] = number
            for start, end in example.spans:
                assistant[row, at + min(start, size) : at + min(end, size)] = True
            at += size
    return Packed(tokens, places, documents, assistant)


def token_counts(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """[V] int64, how often the assistant wrote each token."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        for start, end in example.spans:
            ids = torch.tensor(example.tokens[start:end], dtype=torch.int64)
            counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def draft_vocabulary(counts: Tensor, size: int, always: Sequence[int] = ()) -> tuple[Tensor, float]:
    """The target tokens that a drafter shall know, and the share of the assistant's tokens they cover.

    Args:
        counts: from `token_counts`.
        size: Vd.
        always: ids that must be in, such as the end tokens.

    Returns:
        [Vd] int64 ids in ascending order, and a share of 1.
    """
    if not 0 < size <= counts.shape[0]:
        raise ValueError(
            f"draft_vocab_size={size} must be between 1 and the target's vocabulary of {counts.shape[0]}"
        )
    weight = counts.double()
    weight[list(always)] = torch.inf
    best = torch.sort(weight, descending=True, stable=True).indices[:size]
    covered = counts[best].sum().item() / max(1, counts.sum().item())
    return best.sort().values, covered
