"""What drafts will bring: expected lengths from acceptance, and acceptance from what was accepted. Torch-free.

A draft that is refused at depth d says that depths 1 to d - 1 hold and d does not, and nothing about deeper ones: they
were drafted behind a wrong token (censored). So every depth has a rate of its own, counted over the drafts that reached
it: `rates[d]` is the probability that the best candidate of depth d + 1 is right, given that its parent was.

Siblings: the candidate of rank r is right with probability rate * FALLOFF[r]; candidates exclude each other, so those
of one parent add up (to less than 1).

It is not the accept rule (verify.py), and it knows no costs (costs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from foretell.spec.costs import StepCosts
from foretell.spec.tree import MAX_NODES, Tree

FALLOFF = (
    1.0,
    0.3,
    0.15,
    0.09,
    0.06,
    0.045,
    0.035,
    0.03,
    0.025,
    0.02,
)  # Medusa's and EAGLE's heads, about
CERTAIN = 0.995  # no rate is above it
HOPE = 0.7  # rate of the first depth before anything was seen; later ones fall to FADE of the one before
FADE = 0.95


def expected_tokens(tree: Tree, rates: Sequence[float], most: int | None = None) -> float:
    """Tokens that a step of one request emits, its own token included: 1 + the sum over nodes of P(node accepted).

    Medusa (arXiv 2401.10774, section 2.3.3) and EAGLE-2 (arXiv 2406.16858, section 4.1) build trees by this sum; for a
    chain it is 1 + a + a b + a b c + ..., of equal rates (1 - a^(k+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192,
    equation 1).

    Args:
        rates: by depth, from 1; the last one holds for deeper nodes; none = nothing is accepted.
        most: deepest level that the request wants.
    """
    if not rates:
        return 1.0
    reach, total = 1.0, 1.0
    for depth, worth in enumerate(level_worths(tree), start=1):
        if most is not None and depth > most:
            break
        reach *= min(_rate(rates, depth) * worth, CERTAIN)
        total += reach
    return total


def expected_speed(
    costs: StepCosts, rows: int, tree: int, rates: Sequence[float] | Sequence[Sequence[float]]
) -> float:
    """Tokens per second of all requests together, in steps of `rows` requests under a tree. A pure function.

    Args:
        tree: index into `costs.trees`.
        rates: of all requests, or of each one (`rows` of them).

    Example: plain decoding is `expected_speed(costs, rows, costs.plain, ())`, that is rows / seconds.
    """
    each = _of_each(rates, rows)
    shape = costs.trees[tree]
    emitted = sum(expected_tokens(shape, own) for own in each)
    if len(each) != rows:
        assert len(each) == 1, (len(each), rows)
        emitted *= rows
    return emitted / costs.seconds(rows, tree)


def best_tree(costs: StepCosts, rows: int, rates: Sequence[float]) -> int:
    """The tree with the most expected tokens per second; the smallest of equals."""
    order = sorted(range(len(costs.trees)), key=lambda tree: costs.trees[tree].nodes)
    return max(order, key=lambda tree: expected_speed(costs, rows, tree, rates))


def break_even(costs: StepCosts, rows: int, tree: int) -> float | None:
    """The rate, equal at all depths, from which on the tree is as fast as plain decoding; None: it never is."""
    plain = rows / costs.seconds(rows, costs.plain)
    if expected_speed(costs, rows, tree, (CERTAIN,)) < plain:
        return None
    low, high = 0.0, CERTAIN
    for _ in range(40):
        middle = (low + high) / 2
        if expected_speed(costs, rows, tree, (middle,)) < plain:
            low = middle
        else:
            high = middle
    return high


@dataclass(slots=True)
class Rates:
    """Censored counts per depth, the newest weighing most.

    Args:
        memory: how many drafts back a draft weighs 1/e.
    """

    memory: float = 64.0
    right: list[float] = field(default_factory=list)  # by depth: drafts accepted there
    tried: list[float] = field(default_factory=list)  # by depth: chances drafts had there

    def add(self, tree: Tree, accepted: int, cut: bool = False, most: int | None = None) -> None:
        """One draft of one request was verified.

        Args:
            accepted: drafted tokens that were emitted.
            cut: the request ended in this step: what follows the accepted tokens was not refused.
            most: deepest level that the request wanted.
        """
        levels = level_worths(tree)
        deepest = len(levels) if most is None else min(len(levels), most)
        assert 0 <= accepted <= deepest, (accepted, deepest)
        reached = accepted if cut else min(accepted + 1, deepest)
        self._grow(reached)
        keep = 1.0 - 1.0 / self.memory
        for place in range(reached):
            self.right[place] = self.right[place] * keep + (place < accepted)
            self.tried[place] = self.tried[place] * keep + levels[place]

    def seen(self, depth: int) -> float:
        """Weight of what is known of a depth."""
        return self.tried[depth - 1] if depth <= len(self.tried) else 0.0

    def forget(self, share: float) -> None:
        """Let all that was seen weigh so much less (0 = nothing is forgotten, 1 = all)."""
        self.right = [value * (1 - share) for value in self.right]
        self.tried = [value * (1 - share) for value in self.tried]

    def rates(
        self, depths: int, prior: Sequence[float] = (), weight: float = 2.0
    ) -> tuple[float, ...]:
        """A rate for each depth: what was seen, drawn towards `prior` as if that had been seen `weight` times.

        Without a prior, a depth nobody reached is thought a little worse than the one before it.
        """
        found: list[float] = []
        for place in range(depths):
            own = prior[place] if place < len(prior) else found[-1] * FADE if found else HOPE
            right = self.right[place] if place < len(self.right) else 0.0
            tried = self.tried[place] if place < len(self.tried) else 0.0
            found.append(min((right + weight * own) / (tried + weight), CERTAIN))
        return tuple(found)

    def _grow(self, depths: int) -> None:
        missing = depths - len(self.right)
        self.right.extend([0.0] * missing)
        self.tried.extend([0.0] * missing)


def rates_of(metrics_per_pos: Iterable[int], drafts: int) -> tuple[float, ...]:
    """Rates from counters: how many of so many drafts had their first, second, ... token accepted.

    Example: 100 drafts with 80, 40, 30 accepted at places 1, 2, 3 have the rates 0.8, 0.5, 0.75.
    """
    rates, before = [], drafts
    for count in metrics_per_pos:
        if before == 0:
            break
        rates.append(count / before)
        before = count
    return tuple(rates)


def _of_each(
    rates: Sequence[float] | Sequence[Sequence[float]], rows: int
) -> list[Sequence[float]]:
    own = [entry for entry in rates if not isinstance(entry, int | float)]
    if own:
        assert len(own) == rows, (len(own), rows)
        return own
    return [[entry for entry in rates if isinstance(entry, int | float)]]


def _rate(rates: Sequence[float], depth: int) -> float:
    return rates[depth - 1] if depth <= len(rates) else rates[-1]


@lru_cache(maxsize=4 * MAX_NODES)
def level_worths(tree: Tree) -> tuple[float, ...]:
    """For each depth from 1: what its nodes are worth in best candidates, per node reached above; 1 in a chain."""
    worth = [1.0]
    for node in range(1, tree.nodes):
        rank = tree.ranks[node]
        fall = FALLOFF[rank] if rank < len(FALLOFF) else FALLOFF[-1]
        worth.append(worth[tree.parents[node]] * fall)
    sums = [sum(worth[node] for node in level) for level in tree.levels]
    return tuple(low / high for high, low in pairwise(sums))
