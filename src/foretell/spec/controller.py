"""Controller: which tree to draft next, from what steps cost and what drafts brought. Torch-free; it launches nothing.

Every choice is the tree with the most expected tokens per second for the batch at hand, plain decoding among them. It
cannot change what is emitted: under `match` the text is the same with any tree, under `rejection` its law is.

- Costs are measured while running (costs.py). A tree that was not tried in a bucket is hoped to be as cheap as the next
  smaller one, so each one that could be the best is tried, and no other.
- Acceptance is counted per request and depth, censored (acceptance.py), drawn towards what all requests show together.
- A change is noticed by a sum of surprises (CUSUM, Page 1954): far off, what was known is forgotten.
- Where nothing is drafted nothing is learnt, so now and then a tree that could pay is tried. Trials are paid from a
  budget: `EXPLORE` of the time. A trial that surprises is followed by another at once.
- The tree changes only for a gain of `MARGIN`: no flapping between equals.

Invariant: `choose` returns one of the trees, and time spent on trials is at most EXPLORE of the whole, one trial apart.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from foretell.spec.acceptance import CERTAIN, Rates, expected_tokens, level_worths
from foretell.spec.costs import StepCosts, bucket_of
from foretell.spec.tree import Tree

EXPLORE = 0.008  # share of the time that trials may lose
LARGEST_BUDGET = 1.5  # plain steps: what trials may have saved up
MARGIN = 0.01  # gain that is worth a change
REST = 6  # fewest steps between two trials that do not surprise
HOPEFUL = 0.9  # rate that a trial hopes for, at depths that were not tried for STALE choices
STALE = 12
OWN = 96.0  # drafts that a request's rates remember
SHARED_STEPS = 8.0  # steps that the rates of all requests remember, but at least OWN drafts
TRUST = 12.0  # drafts of its own that weigh as much for a request as what all requests show
SLACK, ALARM = 0.5, 6.0  # CUSUM in standard deviations: a change of 2 * SLACK is looked for
LARGEST = 2.5  # deviation that counts: one rare draft alone proves nothing
FORGET = 0.95  # of what was known, at an alarm
SMALL = 32  # requests that are thought about one by one, in every step
FOUND_STEPS = 32.0  # steps that the share of drafts with a token remembers


@dataclass(frozen=True, slots=True)
class Wish:
    """A request that will verify the next draft.

    Args:
        key: names the request.
        most: deepest level it wants; None = all; 0 = no drafts.
    """

    key: Hashable
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What to draft next, and what is expected of the step that verifies it.

    Args:
        tree: index.
        tokens: expected of the batch.
        seconds: expected of the step; 0 = nothing was measured yet.
        trial: it is not thought the best, but worth knowing.
    """

    tree: int
    tokens: float
    seconds: float
    trial: bool = False

    @property
    def speed(self) -> float:
        """Tokens per second; 0 = not known."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Surprise:
    """Two-sided CUSUM of (seen - expected) in standard deviations."""

    up: float = 0.0
    down: float = 0.0

    def add(self, deviation: float) -> bool:
        """Whether a change is certain enough; the sums start anew then."""
        deviation = max(-LARGEST, min(LARGEST, deviation))
        self.up = max(0.0, self.up + deviation - SLACK)
        self.down = max(0.0, self.down - deviation - SLACK)
        if max(self.up, self.down) < ALARM:
            return False
        self.up = self.down = 0.0
        return True


@dataclass(slots=True)
class _Known:
    """What is known of one request, or of all."""

    rates: Rates
    surprise: _Surprise = field(default_factory=_Surprise)

    def take(self, drafts: Sequence[_Draft], seen: float, variance: float) -> bool:
        """Count drafts; first forget what was known before, if they make it certain that something has changed."""
        alarmed = variance > 0 and self.surprise.add(seen / math.sqrt(variance))
        if alarmed:
            self.rates.forget(FORGET)
        for draft in drafts:
            self.rates.add(draft.tree, draft.accepted, draft.cut, draft.most)
        return alarmed


@dataclass(frozen=True, slots=True)
class _Draft:
    """One that was verified; see `Controller.verified`."""

    tree: Tree
    accepted: int
    cut: bool
    most: int | None


class Controller:
    """Chooses trees.

    Args:
        trees: the engine's, by index; one has a single node, and the largest is the most that was asked for.
        costs: what was measured before, of the same trees; measuring goes on.
    """

    def __init__(self, trees: Sequence[Tree], costs: StepCosts | None = None) -> None:
        assert costs is None or costs.trees == tuple(trees), "costs of other trees"
        self.trees = tuple(trees)
        self.costs = StepCosts(self.trees) if costs is None else costs
        self.plain = self.costs.plain
        self.depth = max(tree.depth for tree in self.trees)
        self.current = max(range(len(self.trees)), key=lambda i: self.trees[i].nodes)
        self.switches = self.trials = self.alarms = 0
        self._order = sorted(range(len(self.trees)), key=lambda i: self.trees[i].nodes)
        self._all = _Known(Rates(OWN))
        self._own: dict[Hashable, _Known] = {}
        self._new: list[_Draft] = []  # of the step that is being collected
        self._seen = self._variance = 0.0  # accepted less expected of those, and its variance
        self._shared: tuple[float, ...] = self._all.rates.rates(self.depth)
        self._started: set[tuple[int, int]] = set()  # (bucket, tree) that ran once
        self._tried_at = [-STALE] * self.depth  # by depth, the choice that tried it last
        self._choices = 0
        self._budget = 0.0  # seconds that trials may lose
        self._rest = 0
        self._again = False
        self._last = Choice(-1, 0.0, 0.0)
        self._found = 1.0  # share of wanted drafts that had a token

    # What happened.

    def verified(
        self,
        key: Hashable,
        tree: int,
        accepted: int,
        cut: bool = False,
        most: int | None = None,
    ) -> None:
        """One request verified a draft that was made for a tree, even if its drafter found nothing for it.

        Args:
            accepted: drafted tokens that were emitted.
            cut: the request ended in this step, so what follows the accepted tokens was not refused.
            most: deepest level that the request wanted.
        """
        shape = self.trees[tree]
        deepest = shape.depth if most is None else min(shape.depth, most)
        if deepest == 0:
            return
        known = self._own.setdefault(key, _Known(Rates(OWN)))
        draft = _Draft(shape, accepted, cut, most)
        reached = accepted if cut else min(accepted + 1, deepest)
        for place in range(reached):
            self._tried_at[place] = self._choices
        seen = variance = 0.0
        if (
            len(self._own) <= SMALL
        ):  # in a large batch one request's change is that of all, or of no weight
            seen, variance = _surprise(shape, self._rates(known), accepted, reached)
        known.take((draft,), seen, variance)
        seen, variance = _surprise(shape, self._shared, accepted, reached)
        self._seen, self._variance = self._seen + seen, self._variance + variance
        self._new.append(draft)

    def found(self, anything: bool) -> None:
        """Whether a draft that was wanted held any token, where that is known before it is verified."""
        self._found += (anything - self._found) / FOUND_STEPS

    def timed(
        self, rows: int, tree: int, seconds: float, draft: float = 0.0, steady: bool = True
    ) -> None:
        """A step of `rows` requests that verified a tree, and nothing else, took so long, its drafting included.

        Args:
            steady: False = it took longer than such steps do, since the drafter had rested; that is a trial's loss.
        """
        if not steady:
            self._budget -= max(seconds - self._seconds(rows, tree, seconds), 0.0)
            return
        self._budget = min(
            self._budget + EXPLORE * seconds,
            LARGEST_BUDGET * self._seconds(rows, self.plain, seconds),
        )
        cell = bucket_of(rows), tree
        if cell in self._started or self.costs.measured(rows, tree):
            self.costs.add(rows, tree, seconds, draft)
        self._started.add(
            cell
        )  # the first one may have loaded code or captured a graph: not counted

    def ended(self, key: Hashable) -> None:
        """A request is over. Unknown ones are no error."""
        self._own.pop(key, None)

    # What to do.

    def choose(self, wishes: Sequence[Wish], room: int | None = None) -> Choice:
        """The tree to draft for these requests, all of which will be in the next step.

        Args:
            room: most nodes of a tree, so that the step fits its token budget; None = any.
        """
        rows = len(wishes)
        self._settle(rows)
        fits = [t for t in self._order if room is None or self.trees[t].nodes <= room]
        if rows == 0 or fits in ([], [self.plain]) or all(wish.most == 0 for wish in wishes):
            return Choice(self.plain, float(rows), 0.0)
        last = self._last
        if last.tree in fits and self._choices % (1 + rows // SMALL) and not last.trial:
            return last  # a large batch has its own inertia, and thinking takes time as well
        self._last = self._decide(wishes, fits, rows)
        return self._last

    def _decide(self, wishes: Sequence[Wish], fits: Sequence[int], rows: int) -> Choice:
        if not self.costs.cells:
            return Choice(self.current if self.current in fits else fits[-1], 0.0, 0.0)
        options = [self._option(tree, wishes) for tree in fits]
        best = max(options, key=lambda option: option.speed)
        now = next((option for option in options if option.tree == self.current), None)
        if now is None or best.speed > now.speed * (1 + MARGIN):
            self.switches += best.tree != self.current
            self.current, now = best.tree, best
        return self._trial(options, now, rows) or now

    def _settle(self, rows: int) -> None:
        """Take in what was verified since the last choice."""
        self._choices += 1
        self._rest += 1
        if self._new:
            # Good news in a trial deserves another one at once: it is soon seen what it was worth.
            self._again = self._again and self._seen > math.sqrt(self._variance)
            self._all.rates.memory = max(OWN, SHARED_STEPS * rows)
            if self._all.take(self._new, self._seen, self._variance):
                self.alarms += 1
                for known in self._own.values():
                    known.rates.forget(FORGET)
            self._new, self._seen, self._variance = [], 0.0, 0.0
        self._shared = self._all.rates.rates(self.depth)

    def _option(self, tree: int, wishes: Sequence[Wish]) -> Choice:
        tokens = 0.0
        for wish in wishes:
            known = self._own.get(wish.key)
            rates = self._shared if known is None else self._rates(known)
            tokens += expected_tokens(self.trees[tree], rates, wish.most)
        return Choice(tree, tokens, self._expected_seconds(len(wishes), tree))

    def _trial(self, options: Sequence[Choice], now: Choice, rows: int) -> Choice | None:
        """A tree that could be better than the present one if depths that were not tried lately went well."""
        again, self._again = self._again, False
        if not again and (self._rest < REST or self._budget <= 0):
            return None
        hopes = [
            rate if self._choices - at < STALE else max(rate, HOPEFUL)
            for rate, at in zip(self._shared, self._tried_at, strict=True)
        ]
        worth = [
            (option.seconds - option.tokens / now.speed, option)
            for option in options
            if option.tree != now.tree
            and rows * expected_tokens(self.trees[option.tree], hopes)
            > now.speed * option.seconds * (1 + 2 * MARGIN)
        ]
        if not worth:
            return None
        loss, option = min(worth, key=lambda pair: pair[0])
        if loss > self._budget and not again:
            return None
        self._budget -= max(loss, 0.0)
        self._rest, self._again = 0, True
        self.trials += 1
        return replace(option, trial=True)

    def _expected_seconds(self, rows: int, tree: int) -> float:
        """Of a step for which the tree is drafted; where the drafter finds nothing it is a plain one."""
        drafted = self.costs.seconds(rows, tree)
        if tree == self.plain:
            return drafted
        return self._found * drafted + (1 - self._found) * self.costs.seconds(rows, self.plain)

    def _seconds(self, rows: int, tree: int, otherwise: float) -> float:
        return self.costs.seconds(rows, tree) if self.costs.cells else otherwise

    def _rates(self, known: _Known) -> tuple[float, ...]:
        return known.rates.rates(self.depth, self._shared, TRUST)


def _surprise(
    tree: Tree, rates: Sequence[float], accepted: int, reached: int
) -> tuple[float, float]:
    """(accepted less expected, variance) over the depths that a draft reached; its mean is 0 if the rates hold."""
    seen = variance = 0.0
    for place, worth in enumerate(level_worths(tree)[:reached]):
        expected = min(rates[place] * worth, CERTAIN)
        seen += (place < accepted) - expected
        variance += expected * (1 - expected)
    return seen, variance
