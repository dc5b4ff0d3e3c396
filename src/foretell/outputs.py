"""What a caller gets back, in vLLM's words: RequestOutput, CompletionOutput, Logprob. Plain data, torch-free.

An output is a snapshot: the engine never changes one it has handed out.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.metrics import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the target's raw logits (natural logarithm).

    Args:
        rank: 1 = the likeliest token of the vocabulary; of equally likely ones each has the rank of the first.
        decoded_token: the token's own text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # token id -> Logprob; the token that was emitted comes first


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Args:
        index: which of the n answers.
        text: without the end token and, unless asked for, without the stop string.
        token_ids: up to and including the token that ended it.
        cumulative_logprob, logprobs: None unless `logprobs` was asked for; one entry per token.
        finish_reason: "stop", "length", "abort", "error", or None while it goes on.
        stop_reason: the stop string or stop token id that ended it, or what went wrong; None for the model's own end
            token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Nothing will be added."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds of the monotonic clock; None = has not happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt, as far as they have come.

    Args:
        prompt: the prompt's text; None when it came as token ids.
        prompt_logprobs: None unless asked for; one entry per prompt token, the first is None.
        outputs: `n` answers, in order of `index`.
        num_cached_tokens: prompt tokens that the prefix cache held.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
