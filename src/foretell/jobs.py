"""Jobs: checked requests, ready to be queued. Pairs prompts with parameters and priorities; refuses what cannot run.

Invariant: whatever is refused is refused here, before anything is queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.prompts import Prompt, check
from foretell.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One checked request that is not queued yet."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can run.

    Args:
        max_logprobs: most log-probabilities per token; -1 = the whole vocabulary.
        priorities: requests may have a priority.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    priorities: bool


def make_jobs(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    priority: Sequence[int] | None,
    limits: Limits,
) -> list[Job]:
    """One job per prompt, in their order.

    Args:
        params: for all prompts, or one per prompt.
        priority: one per prompt, lower first; None = all alike.

    Raises:
        ValueError: lengths differ, or a prompt or parameter does not fit the engine.
    """
    params = _params(params, len(prompts))
    priorities = _priorities(priority, len(prompts), limits)
    for place, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        check(prompt, limits.vocab_size, limits.max_model_len, f"prompt {place}")
        own.check_vocabulary(limits.vocab_size)
        own.check_logprobs(limits.vocab_size, limits.max_logprobs)
    return [Job(*job) for job in zip(prompts, params, priorities, strict=True)]


def _params(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(given, SamplingParams):
        return [given] * count
    wrong = not isinstance(given, Sequence) or not all(
        isinstance(one, SamplingParams) for one in given
    )
    if wrong:
        raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {given!r}")
    if len(given) != count:
        raise ValueError(
            f"The lengths of prompts ({count}) and sampling_params ({len(given)}) must be the same; give one for all, "
            "or one per prompt."
        )
    return list(given)


def _priorities(given: Sequence[int] | None, count: int, limits: Limits) -> list[int]:
    if given is None:
        return [0] * count
    if len(given) != count:
        raise ValueError(
            f"The lengths of prompts ({count}) and priority ({len(given)}) must be the same."
        )
    if any(given) and not limits.priorities:
        raise ValueError(
            f"Got priority {list(given)} but priority scheduling is not enabled; pass scheduling_policy='priority' "
            "to LLM."
        )
    return list(given)
