"""Plan: all that one step needs, decided by the host. The only message from host to device.

Plain tuples and integers: no tensors, no requests. Every tensor-parallel rank replays the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foretell.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A request that enters a slot with this step (for the first time, or again after a preemption)."""

    slot: int
    tokens: tuple[
        int, ...
    ]  # all committed tokens: the prompt, and after a preemption the output so far
    prompt_length: int  # how many of them are the user's prompt
    limit: int  # total length at which the request ends: prompt_length + max_tokens, at most max_model_len
    params: SamplingParams
    seed: int
    cached: int = 0  # tokens whose KV a prefix-cache hit already holds
    stop_ids: tuple[
        int, ...
    ] = ()  # tokens that end it: stop_token_ids, and the model's own unless ignore_eos
    bad_words: tuple[
        tuple[int, ...], ...
    ] = ()  # token sequences that must not appear in the output


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Entries `start, start + 1, ...` of a slot's block table."""

    slot: int
    start: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens `start .. start + count - 1` of a slot, to be computed in this step."""

    slot: int
    start: int
    count: int
    last: bool  # the chunk ends the prompt: the step also samples the next token


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    A slot is in `chunks` or in `decode`, never in both. `keys` bounds the key indices any decode row may see or write
    in this step, so that the CPU path can slice instead of reading a whole table.
    """

    step: int
    new: tuple[NewSlot, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode: tuple[int, ...] = ()  # slots that verify `tree` in this step
    tree: int = 0  # index into the engine's trees; the tree the drafts of these slots are padded to
    next_tree: int = 0  # the tree to draft for the next step
    keys: int = 0
    undrafted: frozenset[int] = field(
        default_factory=frozenset
    )  # slots that get no draft after this step
    rest: bool = False  # the drafter does not see what this step commits; it catches up before it drafts again
    past: tuple[
        tuple[int, ...], ...
    ] = ()  # texts of requests that ended, if a drafter learns of them

    @property
    def emitting(self) -> tuple[int, ...]:
        """Slots that emit tokens in this step."""
        return (*self.decode, *(chunk.slot for chunk in self.chunks if chunk.last))


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """Log-probabilities at one place of a text, under the target's raw logits.

    Args:
        token: the token that stands there.
        rank: of that token; 1 + how many tokens of the whole vocabulary are likelier.
        top: the likeliest tokens asked for and their log-probabilities, the likeliest first.
    """

    token: int
    logprob: float
    rank: int
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What one step verified for one request, node by node; node 0 is the last committed token.

    Args:
        tokens: -1 where nothing was drafted.
        parents: the root's is 0.
        accepted: the accepted nodes, from the root's child on.
        target_probs: of traced steps, how probable each token was for the target after its parent.
        draft_probs: the same under the law it was drawn from; empty where it was not drawn.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    target_probs: tuple[float, ...] = ()
    draft_probs: tuple[float, ...] = ()

    @property
    def refused(self) -> bool:
        """The last accepted node had drafts under it, and none was right."""
        last = self.accepted[-1] if self.accepted else 0
        below = zip(self.tokens[1:], self.parents[1:], strict=True)
        return any(token >= 0 and parent == last for token, parent in below)


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What one slot emitted in one step. The only message from device to host."""

    slot: int
    tokens: tuple[int, ...]
    finish: str | None = None  # None, "stop", "length" or "error"
    stop_token: int | None = None  # the stop token id that ended it, if one did
    drafted: int = 0  # draft tokens verified (the root is not one)
    accepted: int = 0  # how many of `tokens` were drafted
    logprobs: tuple[LogprobRow, ...] | None = None  # one per token
    prompt_logprobs: tuple[LogprobRow, ...] | None = None  # for the rows of this step's chunk
    tree: DraftTree | None = None  # for requests that report their drafts


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one plan, one entry per slot that emitted something or ended."""

    step: int
    slots: tuple[SlotResult, ...]
