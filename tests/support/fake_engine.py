"""An engine without a model: it says scripted texts, in steps of scripted sizes, with the real engine's calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretell.engine.engine import Delta
from foretell.metrics import State
from foretell.runner.plan import LogprobRow
from foretell.sampling_params import SamplingParams


@dataclass
class Added:
    """What `add` was given."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    priority: int
    bad_words: tuple[tuple[int, ...], ...]
    said: int = 0  # tokens emitted


@dataclass
class FakeEngine:
    """Says `script(request)` to each request, `size` tokens a step, up to end tokens and limits."""

    script: Callable[[Added], Sequence[int]]
    size: int = 3
    vocab_size: int = 300
    max_model_len: int = 64
    eos_token_ids: tuple[int, ...] = (1,)
    before_step: Callable[[], None] = lambda: None
    refuse: Callable[[Added], bool] = lambda added: False
    added: list[Added] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    cache_resets: int = 0
    grammars: None = None
    num_blocks: int = 8
    drafts: bool = True
    tolerant: bool = False
    running: dict[str, Added] = field(default_factory=dict)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        priority: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        words = tuple(tuple(word) for word in bad_words)
        added = Added(request_id, tuple(prompt_token_ids), params, seed, priority, words)
        if self.refuse(added):
            raise ValueError("the engine refuses it")
        assert request_id not in self.running
        self.added.append(added)
        self.running[request_id] = added

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.pop(request_id, None)

    def state(self) -> State:
        return State(running=len(self.running))

    def has_work(self) -> bool:
        return bool(self.running)

    def reset_prefix_cache(self) -> None:
        self.cache_resets += 1

    def step(self) -> list[Delta]:
        self.before_step()
        return [self._delta(request) for request in list(self.running.values())]

    def _delta(self, request: Added) -> Delta:
        first = request.said == 0
        tokens, finish, stop = self._next(request)
        request.said += len(tokens)
        if finish is not None:
            del self.running[request.id]
        return Delta(
            request_id=request.id,
            token_ids=tuple(tokens),
            logprobs=self._logprobs(request, tokens),
            prompt_logprobs=self._prompt_logprobs(request) if first else None,
            finish_reason=finish,
            stop_reason=None if stop in self.eos_token_ids else stop,
            num_cached_tokens=len(request.prompt) // 2,
        )

    def _next(self, request: Added) -> tuple[list[int], str | None, int | None]:
        limit = self.max_model_len - len(request.prompt)
        limit = min(limit, request.params.max_tokens or limit)
        stops = request.params.stop_ids(self.eos_token_ids)
        tokens: list[int] = []
        for token in self.script(request)[request.said : request.said + self.size]:
            tokens.append(token)
            if token in stops:
                return tokens, "stop", token
            if request.said + len(tokens) == limit:
                return tokens, "length", None
        assert tokens, "the script is over but the request is not"
        return tokens, None, None

    def _logprobs(self, request: Added, tokens: Sequence[int]) -> tuple[LogprobRow, ...] | None:
        """Token 3 is the likeliest with -0.5, then 4, 5, ...; a chosen token that is none of these has -1.0, rank 9."""
        count = request.params.logprobs
        if count is None:
            return None
        top = {3 + i: -0.5 * (i + 1) for i in range(count)}
        return tuple(
            LogprobRow(token, top.get(token, -1.0), token - 2 if token in top else 9, top)
            for token in tokens
        )

    def _prompt_logprobs(self, request: Added) -> tuple[LogprobRow, ...] | None:
        if request.params.prompt_logprobs is None:
            return None
        return tuple(LogprobRow(token, -2.0, 5) for token in request.prompt[1:])
