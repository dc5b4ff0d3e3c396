"""From the engine's outputs to OpenAI's objects: choices, log-probabilities, usage, whole or piece by piece.

Pure functions and small accumulators: no HTTP, no engine.

Invariant: usage counts tokens that the client was given, whatever was drafted; a choice gets its finish_reason once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foretell.outputs import CompletionOutput, RequestOutput, SpeculationCounts, TokenLogprobs
from foretell.server.tools import Found, FoundCall, Reader
from foretell.text import TokenText


@dataclass(frozen=True, slots=True)
class Style:
    """How answers are written.

    Args:
        text: texts of tokens.
        ids_as_tokens: tokens of log-probabilities are written as "token_id:17".
        logprobs: log-probabilities were asked for.
        token_ids: ids of tokens are given.
        metrics: the block on speculation: "none", "summary" or "detailed".
        drafts: steps and trees are given.
    """

    text: TokenText
    ids_as_tokens: bool = False
    logprobs: bool = False
    token_ids: bool = False
    metrics: str = "none"
    drafts: bool = False

    def token(self, token_id: int, shown: str | None) -> str:
        """A token's text."""
        if self.ids_as_tokens:
            return f"token_id:{token_id}"
        return self.text.alone(token_id) if shown is None else shown


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    accepted: int = 0
    rejected: int = 0
    _prompts: dict[int, int] = field(default_factory=dict)
    _speculation: dict[tuple[int, int], SpeculationCounts] = field(default_factory=dict)

    def add(self, place: int, output: RequestOutput) -> None:
        """Count an output (a delta, or all of it) of prompt `place`."""
        if place not in self._prompts:
            self._prompts[place] = len(output.prompt_token_ids)
            self.prompt += self._prompts[place]
        self.cached = max(self.cached, output.num_cached_tokens)
        for one in output.outputs:
            self.completion += len(one.token_ids)
            self._speculation[place, one.index] = one.speculation
        self.accepted = sum(s.accepted for s in self._speculation.values())
        self.rejected = sum(s.drafted - s.accepted for s in self._speculation.values())

    def body(self) -> dict[str, Any]:
        """OpenAI's object; predicted tokens are OpenAI's words for accepted and rejected drafts."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
            },
        }


def finish_of(output: CompletionOutput, calls: bool = False) -> str | None:
    """OpenAI's word for how a choice ended."""
    if output.finish_reason == "stop" and calls:
        return "tool_calls"
    return output.finish_reason


def speculation_block(counts: SpeculationCounts, detailed: bool) -> dict[str, Any]:
    """What speculation did for one answer, in vLLM's words."""
    drafts = counts.drafts
    block: dict[str, Any] = {
        "num_spec_steps": drafts,
        "num_steps": counts.steps,
        "num_draft_tokens": counts.drafted,
        "num_accepted_draft_tokens": counts.accepted,
        "mean_acceptance_length": 1.0 + counts.accepted / drafts if drafts else 1.0,
        "draft_acceptance_rate": counts.accepted / counts.drafted if counts.drafted else 0.0,
    }
    if detailed:
        block["acceptance_histogram"] = list(counts.accepted_histogram)
    return block


def steps_block(output: CompletionOutput, text: TokenText) -> list[dict[str, Any]]:
    """Steps and trees with texts, for whoever shows them."""
    return [
        {
            "tokens": [{"id": t, "text": text.alone(t)} for t in step.token_ids],
            "accepted": step.accepted,
            "last": step.last,
            "tree": {
                "tokens": [text.alone(t) if t >= 0 else None for t in step.tree_tokens],
                "parents": list(step.tree_parents),
                "accepted": list(step.tree_accepted),
            },
        }
        for step in output.steps or ()
    ]


# Log-probabilities.


def chat_logprobs(rows: Sequence[TokenLogprobs], style: Style) -> dict[str, Any]:
    """The `logprobs` of a message."""
    content = []
    for row in rows:
        entries = [
            _entry(token, one.logprob, one.decoded_token, style) for token, one in row.items()
        ]
        top = entries[1:] if len(entries) > 1 else []
        first, rank = entries[0], next(iter(row.values())).rank
        if top and rank <= len(top):
            # The chosen token is among the likeliest: put it back in its place, once.
            top = [*top[: rank - 1], first, *top[rank - 1 :]]
        content.append({**first, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, shown: str | None, style: Style) -> dict[str, Any]:
    text = style.token(token, shown)
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def _finite(value: float) -> float:
    """JSON has no infinity: vLLM's stand-in for a token that cannot be."""
    return max(value, -9999.0)


def text_logprobs(
    rows: Sequence[TokenLogprobs | None], ids: Sequence[int], offset: int, style: Style
) -> dict[str, Any]:
    """The `logprobs` of a completion.

    Args:
        rows: one per token of `ids`; None where there is none, as for the first token of a prompt.
        offset: characters before the first token.
    """
    found: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token, row in zip(ids, rows, strict=True):
        text = style.token(token, None)
        found["tokens"].append(text)
        found["text_offset"].append(offset)
        found["token_logprobs"].append(None if row is None else _finite(row[token].logprob))
        top = None
        if row is not None:
            top = {
                style.token(t, one.decoded_token): _finite(one.logprob) for t, one in row.items()
            }
        found["top_logprobs"].append(top)
        offset += len(text)
    return found


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if row is None
        else {
            str(token): {
                "logprob": _finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token, one in row.items()
        }
        for row in output.prompt_logprobs
    ]


# Choices.


def text_choice(
    output: CompletionOutput, index: int, request: RequestOutput, style: Style, echo: str | None
) -> dict[str, Any]:
    """A whole choice of /v1/completions. `echo`: the prompt's text, if it is to stand in front."""
    choice: dict[str, Any] = {
        "index": index,
        "text": (echo or "") + output.text,
        "logprobs": None,
        "finish_reason": finish_of(output),
        "stop_reason": output.stop_reason,
    }
    if style.logprobs and output.logprobs is not None:
        rows: list[TokenLogprobs | None] = list(output.logprobs)
        ids = output.token_ids
        if echo is not None and request.prompt_logprobs is not None:
            rows = [*request.prompt_logprobs, *rows]
            ids = [*request.prompt_token_ids, *ids]
        choice["logprobs"] = text_logprobs(rows, ids, 0, style)
    if request.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(request)
    return _extras(choice, output, request, style)


def chat_choice(
    output: CompletionOutput,
    request: RequestOutput,
    style: Style,
    reader: Reader,
    role: str,
    prefix: str,
) -> dict[str, Any]:
    """A whole choice of /v1/chat/completions."""
    found = reader.read(output.text).plus(reader.end())
    message: dict[str, Any] = {"role": role, "content": prefix + found.content}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    if found.calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [call_object(call) for call in found.calls]
    choice: dict[str, Any] = {
        "index": output.index,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_of(output, bool(found.calls)),
        "stop_reason": output.stop_reason,
    }
    if style.logprobs and output.logprobs is not None:
        choice["logprobs"] = chat_logprobs(output.logprobs, style)
    return _extras(choice, output, request, style)


def call_object(call: FoundCall, index: int | None = None) -> dict[str, Any]:
    """A call as clients see it; with its place in a stream."""
    import uuid

    found: dict[str, Any] = {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    return found if index is None else {"index": index, **found}


def _extras(
    choice: dict[str, Any], output: CompletionOutput, request: RequestOutput, style: Style
) -> dict[str, Any]:
    if style.token_ids:
        choice["token_ids"] = list(output.token_ids)
        choice["prompt_token_ids"] = list(request.prompt_token_ids)
    if style.drafts:
        choice["steps"] = steps_block(output, style.text)
    if style.metrics != "none":
        block = speculation_block(output.speculation, style.metrics == "detailed")
        choice["metrics"] = {"speculative_decoding": block}
    return choice


# Streams.


@dataclass(slots=True)
class ChoiceStream:
    """One choice while it is streamed.

    Args:
        reader: finds calls and thoughts; None for plain text.
        offset: characters before the next token, for log-probabilities of completions.
    """

    index: int
    style: Style
    reader: Reader | None = None
    role: str = "assistant"
    prefix: str = ""
    offset: int = 0
    begun: bool = False
    calls: int = 0

    def text_pieces(
        self, output: CompletionOutput, request: RequestOutput, echo: str | None
    ) -> list[dict[str, Any]]:
        """Pieces of /v1/completions."""
        first, self.begun = not self.begun, True
        text = ((echo or "") if first else "") + output.text
        piece: dict[str, Any] = {
            "index": self.index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_of(output),
            "stop_reason": output.stop_reason,
        }
        if self.style.logprobs and output.logprobs is not None:
            rows: list[TokenLogprobs | None] = list(output.logprobs)
            ids = list(output.token_ids)
            if first and echo is not None and request.prompt_logprobs is not None:
                rows, ids = [*request.prompt_logprobs, *rows], [*request.prompt_token_ids, *ids]
            piece["logprobs"] = text_logprobs(rows, ids, self.offset, self.style)
            self.offset += sum(map(len, piece["logprobs"]["tokens"]))
        return [self._finished(piece, output, request, first)] if self._tells(piece, text) else []

    def chat_pieces(self, output: CompletionOutput, request: RequestOutput) -> list[dict[str, Any]]:
        """Pieces of /v1/chat/completions; the first one says who speaks."""
        assert self.reader is not None
        pieces = []
        first, self.begun = not self.begun, True
        if first:
            pieces.append(self._piece({"role": self.role, "content": self.prefix}))
        found = self.reader.read(output.text)
        if output.finished:
            found = found.plus(self.reader.end())
        deltas = self._deltas(found)
        logprobs = None
        if self.style.logprobs and output.logprobs:
            logprobs = chat_logprobs(output.logprobs, self.style)
        extra = logprobs or output.finished or (output.token_ids and self._wants_tokens)
        if not deltas and extra:
            deltas = [{} if output.finished else {"content": ""}]
        for place, delta in enumerate(deltas):
            last = place == len(deltas) - 1
            piece = self._piece(delta)
            if last:
                piece["logprobs"] = logprobs
                piece["finish_reason"] = finish_of(output, self.calls > 0)
                piece["stop_reason"] = output.stop_reason
                piece = self._finished(piece, output, request, first)
            pieces.append(piece)
        return pieces

    def _deltas(self, found: Found) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if found.reasoning:
            deltas.append({"reasoning_content": found.reasoning})
        if found.content:
            deltas.append({"content": found.content})
        for call in found.calls:
            deltas.append({"tool_calls": [call_object(call, self.calls)]})
            self.calls += 1
        return deltas

    def _piece(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    @property
    def _wants_tokens(self) -> bool:
        return self.style.token_ids or self.style.drafts

    def _tells(self, piece: dict[str, Any], text: str) -> bool:
        """An empty piece is not worth a chunk."""
        return bool(text or piece["finish_reason"] or piece["logprobs"] or self._wants_tokens)

    def _finished(
        self, piece: dict[str, Any], output: CompletionOutput, request: RequestOutput, first: bool
    ) -> dict[str, Any]:
        if self.style.token_ids:
            piece["token_ids"] = list(output.token_ids)
            if first:
                piece["prompt_token_ids"] = list(request.prompt_token_ids)
        if self.style.drafts:
            piece["steps"] = steps_block(output, self.style.text)
        if self.style.metrics != "none" and output.finished:
            block = speculation_block(output.speculation, self.style.metrics == "detailed")
            piece["metrics"] = {"speculative_decoding": block}
        return piece


def plain(value: Any) -> Any:
    """A dataclass as JSON's types."""
    return asdict(value)
