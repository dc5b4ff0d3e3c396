"""What a caller gets back, in vLLM's words: RequestOutput, CompletionOutput, Logprob. Plain data, torch-free.

An output is a snapshot: the engine never changes one it has handed out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

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
class SpeculationCounts:
    """What speculation did for one answer, counted as the engine's metrics are.

    Args:
        steps: steps that emitted a token.
        drafts: steps that verified at least one drafted token.
        drafted, accepted: tokens.
        accepted_histogram: entry i is how many drafts had exactly i tokens accepted.
    """

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_histogram: tuple[int, ...] = ()

    def plus(self, emitted: int, drafted: int, accepted: int) -> SpeculationCounts:
        """With one more step."""
        if not emitted:
            return self
        if not drafted:
            return replace(self, steps=self.steps + 1)
        counts = list(self.accepted_histogram)
        counts.extend([0] * (accepted + 1 - len(counts)))
        counts[accepted] += 1
        return SpeculationCounts(
            self.steps + 1,
            self.drafts + 1,
            self.drafted + drafted,
            self.accepted + accepted,
            tuple(counts),
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did for an answer; comes if `SamplingParams.report_drafts` asks for it.

    Args:
        token_ids: what it emitted; the first `accepted` of them were drafted.
        last: where the token after them comes from: "corrected" stands in place of a refused draft, "bonus" follows
            drafts that were all right, "plain" had no draft. None: a limit or an end came before it.
        tree_tokens, tree_parents: what was verified, node by node; node 0 is the text's last token, -1 nothing drafted.
        tree_accepted: the accepted nodes.
    """

    token_ids: tuple[int, ...]
    accepted: int
    last: Literal["corrected", "bonus", "plain"] | None
    tree_tokens: tuple[int, ...] = ()
    tree_parents: tuple[int, ...] = ()
    tree_accepted: tuple[int, ...] = ()


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
        speculation: what speculation did for it so far.
        steps: reports of the steps that brought `token_ids`, if they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts, compare=False)
    steps: list[StepReport] | None = None

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
