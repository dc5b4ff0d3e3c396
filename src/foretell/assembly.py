"""Assembly: from the engine's deltas to the RequestOutput that a caller sees.

One Assembly per user request; its n replies are n requests of the engine ("children"). It makes text, finds stop
strings, cuts tokens and log-probabilities where the reply ends, and merges. It drives no engine: when a stop string
ends a child early, it says so and the caller aborts that child.

Invariant: a finished reply never changes, and what was handed out as a delta is never taken back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from foretell.metrics import FinishReason
from foretell.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculationCounts,
    StepReport,
    TokenLogprobs,
)
from foretell.prompts import Prompt
from foretell.sampling_params import RequestOutputKind, SamplingParams
from foretell.text import Detokenizer, TextStream, TokenText

if TYPE_CHECKING:
    from foretell.engine.engine import Delta
    from foretell.runner.plan import LogprobRow


@dataclass(slots=True)
class Reply:
    """One child's answer so far, and how much of it was handed out as deltas."""

    index: int
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    steps: list[StepReport] | None = None
    sent_steps: int = 0
    sent_tokens: int = 0
    sent_text: int = 0
    sent_end: bool = False

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Nothing will be added."""
        self.finish_reason, self.stop_reason = reason, stop_reason

    @property
    def news(self) -> bool:
        """Something was not handed out yet."""
        ended = self.finish_reason is not None and not self.sent_end
        return ended or self.sent_tokens < len(self.token_ids)

    def snapshot(self, delta: bool) -> CompletionOutput:
        """All of it, or what is new since the last snapshot; both count as handed out."""
        shown = self.stream.visible
        tokens = self.sent_tokens if delta else 0
        text = self.stream.text[self.sent_text if delta else 0 : shown]
        steps = None if self.steps is None else self.steps[self.sent_steps if delta else 0 :]
        self.sent_steps = len(self.steps or ())
        self.sent_tokens, self.sent_text = len(self.token_ids), shown
        self.sent_end = self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[tokens:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            speculation=self.speculation,
            steps=steps,
        )


class Assembly:
    """The answers to one prompt.

    Args:
        request_id: the user's name for the request.
        token_text: the tokenizer's texts.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        token_text: TokenText,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.replies = [
            self._reply(index, prompt.token_ids, token_text) for index in range(params.n)
        ]
        self._prompt = prompt.text
        self._prompt_token_ids = list(prompt.token_ids)
        self._prompt_rows: list[TokenLogprobs] = []
        self._prompt_logprobs_sent = False
        self._token_text = token_text
        self._cached = 0
        self._clock = clock
        self._arrival = clock()
        self._first_token: float | None = None
        self._end: float | None = None

    @property
    def finished(self) -> bool:
        """All replies have ended."""
        return all(reply.finish_reason is not None for reply in self.replies)

    @property
    def has_news(self) -> bool:
        """`news` would return something."""
        if self.params.output_kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return False
        return any(reply.news for reply in self.replies)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all replies so far."""
        return sum(len(reply.token_ids) for reply in self.replies)

    def take(self, index: int, delta: Delta) -> bool:
        """Add one step of child `index`.

        Returns:
            True when a stop string ended the reply before the engine did: the child is to be aborted.
        """
        reply = self.replies[index]
        if reply.finish_reason is not None:
            return False
        if delta.token_ids and self._first_token is None:
            self._first_token = self._clock()
        self._cached = max(self._cached, delta.num_cached_tokens)
        if delta.prompt_logprobs and index == 0:
            self._prompt_rows.extend(ranked(row, self._token_text) for row in delta.prompt_logprobs)
        reply.speculation = reply.speculation.plus(
            len(delta.token_ids), delta.drafted, delta.accepted
        )
        stop = self._read(reply, delta)
        if reply.steps is not None and delta.token_ids:
            reply.steps.append(_report(delta))
        if stop is not None:
            self._finish(reply, "stop", stop)
            return delta.finish_reason is None
        if delta.finish_reason is not None:
            # Text that waited for the rest of a character may complete a stop string, too.
            stop = reply.stream.end()
            reason = cast("FinishReason", delta.finish_reason)
            said = delta.error if delta.stop_reason is None else delta.stop_reason
            self._finish(reply, *((reason, said) if stop is None else ("stop", stop)))
        return False

    def abort(self) -> list[int]:
        """End every reply that goes on; returns their indices."""
        running = [reply for reply in self.replies if reply.finish_reason is None]
        for reply in running:
            reply.stream.end()
            self._finish(reply, "abort")
        return [reply.index for reply in running]

    def news(self) -> RequestOutput | None:
        """What a streaming caller has not seen yet, in the form `params.output_kind` asks for; None = nothing."""
        if not self.has_news:
            return None
        if self.params.output_kind is RequestOutputKind.DELTA:
            return self._output([reply for reply in self.replies if reply.news], delta=True)
        return self.output()

    def output(self) -> RequestOutput:
        """All that is there."""
        return self._output(self.replies, delta=False)

    def _reply(self, index: int, prompt: Sequence[int], token_text: TokenText) -> Reply:
        params = self.params
        detokenizer = (
            Detokenizer(token_text, prompt, params.skip_special_tokens)
            if params.detokenize
            else None
        )
        stream = TextStream(
            detokenizer, params.stop_strings, params.include_stop_str_in_output, params.min_tokens
        )
        wanted = params.logprobs is not None
        return Reply(
            index,
            stream,
            logprobs=[] if wanted else None,
            cumulative_logprob=0.0 if wanted else None,
            steps=[] if params.report_drafts else None,
        )

    def _read(self, reply: Reply, delta: Delta) -> str | None:
        """Add tokens up to one that completes a stop string, and return that string."""
        hidden = len(delta.token_ids)
        if delta.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            hidden -= 1  # the token that ended it is kept as a token but is no text
        for place, token in enumerate(delta.token_ids):
            reply.token_ids.append(token)
            if reply.logprobs is not None and delta.logprobs is not None:
                self._add_logprobs(reply, token, delta.logprobs[place])
            stop = reply.stream.push(token) if place < hidden else None
            if stop is not None:
                return stop
        return None

    def _add_logprobs(self, reply: Reply, token: int, row: LogprobRow) -> None:
        assert reply.logprobs is not None
        assert reply.cumulative_logprob is not None
        assert row.token == token, f"log-probabilities of token {row.token} came for {token}"
        reply.logprobs.append(ranked(row, self._token_text))
        reply.cumulative_logprob += row.logprob

    def _finish(
        self, reply: Reply, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        reply.finish(reason, stop_reason)
        if self.finished:
            self._end = self._clock()

    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [None, *self._prompt_rows[: len(self._prompt_token_ids) - 1]]

    def _output(self, replies: Sequence[Reply], delta: bool) -> RequestOutput:
        prompt_logprobs = None if delta and self._prompt_logprobs_sent else self._prompt_logprobs()
        self._prompt_logprobs_sent = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[reply.snapshot(delta) for reply in replies],
            finished=self.finished,
            metrics=RequestMetrics(self._arrival, self._first_token, self._end),
            num_cached_tokens=self._cached,
        )


def _report(delta: Delta) -> StepReport:
    tree, tokens = delta.tree, delta.token_ids
    last: Literal["corrected", "bonus", "plain"] | None = None
    if len(tokens) > delta.accepted:
        refused = tree is not None and tree.refused
        last = "corrected" if refused else "bonus" if delta.drafted else "plain"
    if tree is None:
        return StepReport(tokens, delta.accepted, last)
    return StepReport(tokens, delta.accepted, last, tree.tokens, tree.parents, tree.accepted)


def ranked(row: LogprobRow, token_text: TokenText) -> TokenLogprobs:
    """One token's log-probabilities with ranks and texts: the token itself first, then the likeliest others.

    Equally likely tokens have the same rank, that of the first of them.
    """
    ranks, rank, last = dict[int, int](), 0, math.inf
    for place, (token, value) in enumerate(row.top.items(), start=1):
        if value < last:
            rank, last = place, value
        ranks[token] = rank
    ranks[row.token] = row.rank
    return {
        token: Logprob(value, ranks[token], token_text.alone(token))
        for token, value in ({row.token: row.logprob} | row.top).items()
    }
