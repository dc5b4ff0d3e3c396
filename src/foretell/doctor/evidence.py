"""Evidence: what was measured of an engine and its drafter. Plain data; gather.py makes it, findings.py reads it.

Everything that may be unknown has a value that says so, and no finding is made of what is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretell.spec.acceptance import expected_tokens
from foretell.spec.costs import StepCosts
from foretell.spec.tree import Tree


@dataclass(frozen=True, slots=True)
class Speed:
    """One measured run.

    Args:
        tokens, seconds: emitted, and from the first prompt to the last token.
        steps: decode steps; `step_seconds` of them all; the rest of the time went to prompts and to the host.
    """

    tokens: int
    seconds: float
    steps: int = 0
    step_seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def decoding(self) -> float:
        """Tokens per second of the decode steps alone."""
        return self.tokens / self.step_seconds if self.step_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What it ran on.

    Args:
        busy_cores: that other processes kept busy meanwhile.
        threads: that torch computes with.
    """

    accelerator: str = "cpu"
    cores: int = 1
    threads: int = 1
    busy_cores: float = 0.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a diagnosis rests on.

    Args:
        method: of the drafter; "none" without one.
        rows: requests at once that the measures are for.
        costs: seconds of a step by (rows, tree); the trees are the engine's ladder, the last is what was asked for.
        rates: acceptance by depth, of drafts that got there (see spec/acceptance.py).
        by_kind: mean tokens a step by kind of prompt.
        control: mean tokens a step with the target's features shuffled; None = it reads none, or was not tried.
        tested: mean tokens a step in the same test with the right ones; None = no test.
        causes: what the start-up proof found, the likeliest first ("wrong layers: ...").
        ngram: mean tokens a step that a lookup in the same texts would have had; 0 = not known.
        greedy: mean tokens a step at temperature 0, where the run had another; 0 = not known.
        shared_vocabulary: share of the target's tokens that the drafter knows; 1 = all, or not known.
        template: prompts went through the model's chat template.
        plain, drafted: measured speeds without and with drafts, of the same prompts.
        found: share of steps in which the drafter found anything to draft; the others were plain.
        same_text: both said the same; None = not comparable (another law than `match`).
        narrow: 16-bit numbers, in which near-ties may fall otherwise with another number of rows.
        preemptions: in the drafted run.
        room: requests of the longest length that fit at once.
        load_error: what it said when it would not load.
    """

    method: str = "none"
    checkpoint: str | None = None
    acceptance: str = "match"
    temperature: float = 0.0
    rows: int = 1
    costs: StepCosts = field(default_factory=lambda: StepCosts((Tree((-1,)),)))
    rates: tuple[float, ...] = ()
    by_kind: Mapping[str, float] = field(default_factory=dict)
    control: float | None = None
    tested: float | None = None
    causes: tuple[str, ...] = ()
    ngram: float = 0.0
    greedy: float = 0.0
    shared_vocabulary: float = 1.0
    template: bool = True
    plain: Speed = Speed(0, 0.0)
    drafted: Speed = Speed(0, 0.0)
    found: float = 1.0
    same_text: bool | None = None
    narrow: bool = False
    preemptions: int = 0
    room: int = 0
    max_num_seqs: int = 0
    machine: Machine = Machine()
    load_error: str | None = None

    @property
    def tree(self) -> int:
        """The tree that was asked for."""
        return len(self.costs.trees) - 1

    @property
    def speculates(self) -> bool:
        """There is a drafter, and it was measured."""
        return self.method != "none" and len(self.costs.trees) > 1 and bool(self.costs.cells)

    @property
    def length(self) -> float:
        """Mean tokens a step under the tree that was asked for."""
        return expected_tokens(self.costs.trees[self.tree], self.rates)

    def speed(self, tree: int, rates: tuple[float, ...] | None = None) -> float:
        """Predicted tokens per second of all requests under a tree."""
        rates = self.rates if rates is None else rates
        return self.rows * expected_tokens(self.costs.trees[tree], rates) / self.seconds(tree)

    def seconds(self, tree: int) -> float:
        """Of a step for which a tree is drafted; one for which nothing was found is a plain one."""
        plain = self.costs.seconds(self.rows, self.costs.plain)
        if tree == self.costs.plain:
            return plain
        return self.found * self.costs.seconds(self.rows, tree) + (1 - self.found) * plain

    @property
    def best(self) -> int:
        """The tree with the best prediction."""
        return max(range(len(self.costs.trees)), key=self.speed)

    @property
    def predicted_speedup(self) -> float:
        """Cost model times acceptance, of the tree that was asked for over plain decoding."""
        return self.speed(self.tree) / self.speed(self.costs.plain)

    @property
    def measured_speedup(self) -> float:
        """Of the decode steps; 0 = not measured."""
        plain = self.plain.decoding
        return self.drafted.decoding / plain if plain > 0 else 0.0
