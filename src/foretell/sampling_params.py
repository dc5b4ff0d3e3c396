"""SamplingParams: what one request asks of the sampler and of the speculation. Torch-free.

Names, defaults and error texts follow vLLM, so that code written for it runs unchanged. Two fields
are ours: `speculate` and `num_speculative_tokens`. It is not the engine's view of a request
(engine/request.py).

Invariant: an instance is valid and normalised. Greedy parameters hold no filter, lists are tuples,
every number is finite. What depends on the model is checked by `check_vocabulary` and
`check_logprobs`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from typing import Self, cast

from foretell.structured_outputs import StructuredOutputsParams

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 1e-2
MAX_LOGPROBS = 20  # vLLM's default cap on `logprobs` and `prompt_logprobs`
SEED_LOW, SEED_HIGH = -(1 << 63), (1 << 63) - 1
MAX_N = 16384  # vLLM's
LARGEST, SMALLEST = 1e30, 1e-30  # what logits may be multiplied with and stay finite in float32

_STRUCTURED = "Use structured_outputs=StructuredOutputsParams(json=..., regex=..., choice=..., or grammar=...)."
_BEAM = "Beam search is not available; use n > 1 with a temperature for several answers."
UNSUPPORTED: Mapping[str, str] = {
    "best_of": "Use n and rank the answers yourself.",
    "use_beam_search": _BEAM,
    "beam_width": _BEAM,
    "length_penalty": _BEAM,
    "early_stopping": _BEAM,
    "guided_decoding": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "response_format": _STRUCTURED,
    "logits_processors": "Use logit_bias, allowed_token_ids or bad_words.",
    "extra_args": "There is nothing that would read it.",
    "thinking_token_budget": "Use max_tokens.",
    "repetition_detection": "Use repetition_penalty or frequency_penalty.",
    "logprob_token_ids": "Use logprobs.",
    "flat_logprobs": "Log-probabilities come as one dict per token.",
    "skip_reading_prefix_cache": "Switch the engine's prefix cache off, or set prompt_logprobs.",
    "truncate_prompt_tokens": "Cut the prompt before passing it.",
}


class RequestOutputKind(Enum):
    """How a streamed answer arrives: all text so far, only what is new, or once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Args:
        n: answers per prompt, at most 16384; greedy sampling requires 1.
        presence_penalty, frequency_penalty: in [-2, 2]; count generated tokens only.
        repetition_penalty: > 0; counts prompt and generated tokens.
        temperature: 0 is greedy; below 0.01 it is raised to 0.01.
        top_p, top_k, min_p: filters; 1.0, 0 (or -1) and 0.0 switch them off.
        seed: None takes one from the engine. The text depends on prompt, parameters and seed only.
        stop: strings that end the answer; need `detokenize`.
        stop_token_ids: token ids that end the answer, besides the model's own end token.
        bad_words: strings that must not appear.
        ignore_eos: go on after the model's end token.
        max_tokens: None = until the context limit.
        min_tokens: no end or stop token before that many.
        logprobs, prompt_logprobs: how many of the likeliest tokens to report; -1 = all.
        logit_bias: token id -> added to its logit, clamped to [-100, 100].
        allowed_token_ids: nothing else may be emitted.
        speculate: False runs this request without drafts, whatever the engine's drafter.
        num_speculative_tokens: at most that many draft tokens per step for this request; None = as
            many as the engine makes.
        prompt_lookup_min: for n-gram and suffix decoding, fewest tokens of context that must agree for this
            request, where that is more than the engine's own; None = as the engine does.
        structured_outputs: the form that the answer must have.
        report_drafts: every output says which of its tokens were drafted, and which tree was verified.

    Raises:
        ValueError: a field is unknown, unsupported, of a wrong type or out of range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    speculate: bool = True
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    report_drafts: bool = False

    def __new__(cls, *args: object, **named: object) -> Self:
        # __init__ would answer an unknown keyword with a TypeError that names no remedy.
        _refuse_unknown(named, tuple(f.name for f in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_types()
        self._normalise_lists()
        self._normalise_temperature()
        self._check_ranges()
        self._check_lengths()
        self._check_strings()
        if self.greedy:
            self._check_greedy()

    # What the engine asks.

    @property
    def greedy(self) -> bool:
        """The likeliest token always wins; no noise is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def wants_filter(self) -> bool:
        """top-k, top-p or min-p cut the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def wants_penalties(self) -> bool:
        """The logits of a row depend on which tokens came before it."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def wants_mask(self) -> bool:
        """Logits are changed by token id: bias, allowed tokens, bad words, held-back ends."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens)

    @property
    def wants_logprobs(self) -> bool:
        """Log-probabilities of emitted tokens are reported."""
        return self.logprobs is not None

    @property
    def speculates(self) -> bool:
        """Drafts may be made for this request."""
        return self.speculate and self.num_speculative_tokens != 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def bad_word_strings(self) -> tuple[str, ...]:
        """`bad_words` as a tuple."""
        return cast("tuple[str, ...]", self.bad_words)

    def stop_ids(self, eos_ids: Iterable[int] = ()) -> tuple[int, ...]:
        """Ids that end the answer, each once: the model's (unless `ignore_eos`), then its own."""
        own = cast("tuple[int, ...]", self.stop_token_ids)
        return tuple(dict.fromkeys((*(() if self.ignore_eos else eos_ids), *own)))

    # What depends on the model.

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            ValueError: an id of logit_bias, allowed_token_ids or stop_token_ids is not in it.
        """
        named = {
            "logit_bias": tuple(self.logit_bias or ()),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
        }
        for name, ids in named.items():
            wrong = [i for i in ids if not 0 <= i < vocab_size]
            if wrong:
                raise ValueError(
                    f"token_id(s) {wrong[:8]} in {name} contain out-of-vocab token ids. "
                    f"Vocabulary size: {vocab_size}"
                )

    def check_logprobs(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Refuse more log-probabilities than the engine gives (`max_logprobs`; -1 = all).

        Raises:
            ValueError: `logprobs` or `prompt_logprobs` is over the cap.
        """
        cap = vocab_size if max_logprobs == -1 else max_logprobs
        for kind, asked in (("sample", self.logprobs), ("prompt", self.prompt_logprobs)):
            if asked is None:
                continue
            count = vocab_size if asked == -1 else asked
            if count > cap:
                raise ValueError(
                    f"Requested {kind} logprobs of {count}, "
                    f"which is greater than max allowed: {cap}"
                )

    # Construction.

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            _require_int(name, getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", *_DRAFTING):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name))
        for name in _FLOATS:
            self._set(name, _as_float(name, getattr(self, name)))
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        wanted = self.structured_outputs
        if not isinstance(wanted, StructuredOutputsParams | None):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams(...), got {wanted!r}."
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}.")

    def _normalise_lists(self) -> None:
        self._set(
            "stop", (self.stop,) if isinstance(self.stop, str) else _as_strings("stop", self.stop)
        )
        self._set("bad_words", _as_strings("bad_words", self.bad_words))
        self._set("stop_token_ids", _as_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _as_ids("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            self._set("logit_bias", _as_bias(self.logit_bias))
        if self.seed == -1:
            self._set("seed", None)
        if self.top_k == -1:
            self._set("top_k", 0)

    def _normalise_temperature(self) -> None:
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            warnings.warn(
                f"temperature {self.temperature} is less than {LOWEST_TEMPERATURE}, which may cause "
                f"numerical errors (nan or inf). It is raised to {LOWEST_TEMPERATURE}; use 0 for "
                "greedy sampling.",
                stacklevel=4,
            )
            self._set("temperature", LOWEST_TEMPERATURE)

    def _check_ranges(self) -> None:
        _require(self.n >= 1, f"n must be at least 1, got {self.n}.")
        _require(self.n <= MAX_N, f"n must be at most {MAX_N}, got {self.n}.")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, f"{name} must be in [-2, 2], got {value}.")
        penalty = self.repetition_penalty
        _require(penalty > 0.0, f"repetition_penalty must be greater than zero, got {penalty}.")
        _require(
            penalty >= SMALLEST, f"repetition_penalty must be at least {SMALLEST}, got {penalty}."
        )
        _require(
            self.temperature >= 0.0, f"temperature must be non-negative, got {self.temperature}."
        )
        _require(0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}.")
        self._set("top_p", max(self.top_p, SMALLEST))  # smaller ones are 0 in float32
        _require(self.top_k >= 0, f"top_k must be 0 (disable), or at least 1, got {self.top_k}.")
        _require(0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}.")
        seed = self.seed
        _require(
            seed is None or SEED_LOW <= seed <= SEED_HIGH,
            f"seed must fit a signed 64-bit integer, got {seed}.",
        )

    def _check_lengths(self) -> None:
        top = self.max_tokens
        _require(top is None or top >= 1, f"max_tokens must be at least 1, got {top}.")
        low = self.min_tokens
        _require(low >= 0, f"min_tokens must be greater than or equal to 0, got {low}.")
        _require(
            top is None or low <= top,
            f"min_tokens must be less than or equal to max_tokens={top}, got {low}.",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or value >= -1, f"{name} must be non-negative or -1, got {value}."
            )
        most, least = self.num_speculative_tokens, self.prompt_lookup_min
        _require(
            most is None or most >= 0,
            f"num_speculative_tokens must be at least 0 (0: no drafts), got {most}.",
        )
        _require(least is None or least >= 1, f"prompt_lookup_min must be at least 1, got {least}.")

    def _check_strings(self) -> None:
        _require("" not in self.stop_strings, "stop cannot contain an empty string.")
        _require("" not in self.bad_word_strings, "bad_words cannot contain an empty string.")
        _require(
            self.detokenize or not self.stop,
            "stop strings are only supported when detokenize is True. "
            "Set detokenize=True to use stop.",
        )
        _require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids is not None and empty! Leave it out, or name at least one token id.",
        )
        _require(
            self.structured_outputs is None or not (self.ignore_eos or self.min_tokens),
            "structured_outputs ends the answer where it is complete: leave out ignore_eos and min_tokens.",
        )

    def _check_greedy(self) -> None:
        _require(self.n == 1, f"n must be 1 when using greedy sampling, got {self.n}.")
        self._set("top_p", 1.0)
        self._set("top_k", 0)
        self._set("min_p", 0.0)


_FLOATS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)
_DRAFTING = ("num_speculative_tokens", "prompt_lookup_min")
_BOOLS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "speculate",
    "report_drafts",
)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _refuse_unknown(named: Iterable[str], known: Sequence[str]) -> None:
    for name in named:
        if name in UNSUPPORTED:
            raise ValueError(f"{name} is not supported; leave it out. {UNSUPPORTED[name]}")
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
            raise ValueError(f"SamplingParams has no field {name}; {hint}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_int(name: str, value: object) -> None:
    if not _is_int(value):
        raise ValueError(
            f"{name} must be an integer, got {value!r} of type {type(value).__name__}."
        )


def _as_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}.")
    if abs(value) > LARGEST:
        raise ValueError(f"{name} must be between {-LARGEST} and {LARGEST}, got {value}.")
    return float(value)


def _as_strings(name: str, value: Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of strings, got {value!r}.")
    items = tuple(value)
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{name} must contain only strings, got {item!r}.")
    return items


def _as_ids(name: str, value: Sequence[int]) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}.")
    items = tuple(value)
    if not all(_is_int(item) for item in items):
        raise ValueError(f"{name} must contain only integers, got {list(items)!r}.")
    return items


def _as_bias(value: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {value!r}.")
    bias: dict[int, float] = {}
    for token, amount in value.items():
        key = _as_token(token)
        bias[key] = min(100.0, max(-100.0, _as_float(f"logit_bias[{key}]", amount)))
    return bias


def _as_token(value: object) -> int:
    """A key of logit_bias: JSON objects have string keys, so "17" is a token id too."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"logit_bias must have token ids as keys, got {value!r}.")
