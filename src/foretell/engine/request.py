"""Request: the host's truth about one generation. Plain data; the scheduler moves it along.

It is not what the user sees (that is the output) and not what the device knows (that is a row of
Slots). The host runs up to one step behind the device: `tokens` are the tokens collected so far,
and `in_flight` says how many more the launched steps may bring.

Invariant: low <= true length on the device <= high, for a request that still runs there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from foretell.sampling_params import SamplingParams


class Status(Enum):
    """WAITING owns nothing, RUNNING a slot and blocks, DONE the same until its last step is in."""

    WAITING = 0
    RUNNING = 1
    DONE = 2


@dataclass(slots=True)
class Counts:
    """What speculation did for one request. A draft is one verification of drafted tokens."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # drafts accepted up to place 1, 2, ...
    cached: int = 0  # prompt tokens found in the prefix cache when first admitted
    preemptions: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verification of `drafted` tokens."""
        if drafted == 0:
            return
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at.extend([0] * (accepted - len(self.accepted_at)))
        for place in range(accepted):
            self.accepted_at[place] += 1


@dataclass(slots=True, eq=False)
class Request:
    """One generation.

    Args:
        id: the engine's name for it, unique among unfinished requests.
        prompt: token ids, at least one.
        params: what the user asked for.
        seed: the noise key; `params.seed` or one that the engine chose.
        priority: lower runs earlier; only read under priority scheduling.
        stop_ids: tokens that end it, the model's own included unless it ignores them.
        bad_words: token sequences that must not appear in the output.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    priority: int = 0
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    arrival: int = 0  # order of `Scheduler.add`
    status: Status = Status.WAITING
    finish: str | None = None  # "stop", "length", "error" or "abort"
    stop_token: int | None = None
    error: str | None = None  # for people, when finish is "error"
    limit: int = 0  # total length at which it ends
    slot: int = -1
    blocks: list[int] = field(default_factory=list)  # its block table
    computed: int = 0  # tokens whose KV the device has, or will have after the steps launched
    target: int = 0  # tokens to compute before it decodes
    in_flight: deque[int] = field(default_factory=deque)  # tokens each launched step may emit
    served: int = 0  # the last step that computed something for it
    ingested: int = 0  # tokens whose KV the drafter has as well, as far as collected
    draft_tree: int = -1  # the tree that its last draft was wanted for, -1 = it wanted none
    registered: int = 0  # leading blocks offered to the prefix cache
    drafts: bool = True  # False: the drafter failed for it
    shareable: bool = True  # False: what it computes from now on is not for others
    prompt_rows: int = 0  # prompt log-probability rows already delivered
    counts: Counts = field(default_factory=Counts)
    chain: list[bytes] = field(default_factory=list)  # hashes of the full blocks of `tokens`
    tokens: list[int] = field(init=False)  # prompt and output, as far as collected

    def __post_init__(self) -> None:
        self.prompt = tuple(self.prompt)
        self.tokens = list(self.prompt)

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt)

    @property
    def output(self) -> list[int]:
        """The tokens emitted so far (a copy)."""
        return self.tokens[len(self.prompt) :]

    @property
    def low(self) -> int:
        """The least length it has on the device after all launched steps, if it is not over."""
        return len(self.tokens) + sum(most > 0 for most in self.in_flight)

    @property
    def high(self) -> int:
        """The greatest length it can have on the device after all launched steps."""
        return min(len(self.tokens) + sum(self.in_flight), self.limit)

    @property
    def prefilling(self) -> bool:
        """It still has prompt tokens to launch."""
        return self.computed < self.target

    @property
    def decodes(self) -> bool:
        """It can take part in a decode step, and the steps in flight do not surely end it."""
        return self.status is Status.RUNNING and not self.prefilling and self.low < self.limit
