"""Gather: run an engine on prompts and measure what the findings rest on. Decides nothing.

One engine does it all: the same prompts plainly, with the tree that was asked for, and with every tree of the ladder in
turn, so that costs, acceptance and speeds are of one build and one state of the machine. A lookup of n-grams is not
run: how far it would have got is counted in the text that was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretell.bench.steps import InTurn
from foretell.doctor.evidence import Evidence, Machine, Speed
from foretell.engine.engine import Delta, Engine
from foretell.metrics import StepReport
from foretell.sampling_params import SamplingParams
from foretell.spec.acceptance import Rates, expected_tokens
from foretell.spec.controller import Choice, Controller, Wish
from foretell.spec.tree import Tree

SHORTEST, LONGEST = 1, 5  # tokens that a lookup compares
LOOKED_UP = 7  # tokens that it drafts
TIMED, PASSES = 4, 12  # steps of every tree that are timed, runs that are made for it at most
ALL = 1e12  # a memory that forgets nothing

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt: tokens, and of what kind it is."""

    kind: str
    tokens: tuple[int, ...]

    @property
    def seed(self) -> int:
        """The same in every run."""
        return (31 * sum(self.tokens) + len(self.tokens)) % (1 << 31)


class Pinned(Controller):
    """Always the same tree; counts what it brought and how long its steps took."""

    def __init__(self, trees: Sequence[Tree], tree: int) -> None:
        super().__init__(trees)
        self.tree = tree
        self.seen = Rates(ALL)
        self.hits = self.wanted = 0

    def found(self, anything: bool) -> None:
        """Count how often something was drafted."""
        super().found(anything)
        self.wanted += 1
        self.hits += anything

    def choose(self, wishes: Sequence[Wish], room: int | None = None) -> Choice:
        """That tree."""
        super().choose(wishes, room)
        return Choice(self.tree, float(len(wishes)), 0.0)

    def verified(
        self, key: object, tree: int, accepted: int, cut: bool = False, most: int | None = None
    ) -> None:
        """Count it."""
        self.seen.add(self.trees[tree], accepted, cut, most)


@dataclass(slots=True)
class _Ran:
    """One pass over probes."""

    texts: list[tuple[int, ...]]
    speed: Speed
    rates: tuple[float, ...] = ()
    preemptions: int = 0
    lengths: dict[str, list[float]] = field(default_factory=dict)


class _Counter:
    """A watcher of steps."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.tokens = 0, 0.0, 0

    def added(self, request: object) -> None:
        """Not of interest."""

    admitted = fell_back = added

    def emitted(self, request: object, result: object) -> None:
        """Not of interest."""

    def stepped(self, report: StepReport) -> None:
        """Count it."""
        self.steps += 1
        self.seconds += report.seconds
        self.tokens += report.emitted


def measure(
    engine: Engine,
    probes: Sequence[Probe],
    params: SamplingParams,
    rows: int,
    about: Evidence,
    tell: Tell = lambda text: None,
) -> Evidence:
    """Run the probes and fill in what is measured.

    Args:
        engine: idle; its controller and watcher are put back afterwards.
        rows: requests at once.
        about: what is known beforehand (method, machine, the start-up proof).
    """
    trees = engine.scheduler.trees
    kept = engine.scheduler.controller, engine.watcher
    try:
        tell("warming up")
        _run(engine, probes[:1], replace(params, max_tokens=8), rows, Pinned(trees, 0))
        tell("without drafts")
        plain = _run(engine, probes, params, rows, Pinned(trees, 0))
        found = replace(
            about,
            rows=rows,
            temperature=params.temperature,
            plain=plain.speed,
            ngram=looked_up(probes, plain.texts),
            max_num_seqs=engine.scheduler.max_num_seqs,
            room=_room(engine, probes, params),
        )
        tell("what a step costs")
        turn = InTurn(trees)
        for count in sorted({1, rows}):
            _time_trees(engine, probes, params, count, turn)
        found = replace(found, costs=turn.costs)
        if len(trees) == 1:
            return found
        tell("with drafts")
        return _with_drafts(engine, probes, params, rows, found, plain)
    finally:
        engine.scheduler.controller, engine.watcher = kept


def _time_trees(
    engine: Engine, probes: Sequence[Probe], params: SamplingParams, rows: int, turn: InTurn
) -> None:
    """Run until every tree was timed often enough, or it is clear that some never are (nothing is found for them)."""
    group = _enough(probes, rows)
    for _ in range(PASSES):
        _run(engine, group, replace(params, ignore_eos=True), rows, turn)
        if all(turn.costs.measured(rows, tree) >= TIMED for tree in range(len(turn.trees))):
            return


def _with_drafts(
    engine: Engine,
    probes: Sequence[Probe],
    params: SamplingParams,
    rows: int,
    found: Evidence,
    plain: _Ran,
) -> Evidence:
    trees = engine.scheduler.trees
    full = len(trees) - 1
    by_kind, texts, preempted = {}, [], 0
    seen = Rates(ALL)
    hits = wanted = 0
    tokens, seconds, steps, step_seconds = 0, 0.0, 0, 0.0
    for kind in dict.fromkeys(probe.kind for probe in probes):
        own = [probe for probe in probes if probe.kind == kind]
        pinned = Pinned(trees, full)
        ran = _run(engine, own, params, rows, pinned)
        depth = trees[full].depth
        by_kind[kind] = expected_tokens(trees[full], pinned.seen.rates(depth, weight=1e-9))
        _join(seen, pinned.seen)
        hits, wanted = hits + pinned.hits, wanted + pinned.wanted
        texts += list(zip(own, ran.texts, strict=True))
        preempted += ran.preemptions
        tokens, seconds = tokens + ran.speed.tokens, seconds + ran.speed.seconds
        steps, step_seconds = steps + ran.speed.steps, step_seconds + ran.speed.step_seconds
    greedy = 0.0
    if params.temperature > 0:
        pinned = Pinned(trees, full)
        _run(engine, probes, replace(params, temperature=0.0), rows, pinned)
        greedy = expected_tokens(trees[full], pinned.seen.rates(trees[full].depth, weight=1e-9))
    said = {id(probe): text for probe, text in texts}
    same = [said[id(probe)] for probe in probes] == plain.texts
    return replace(
        found,
        rates=seen.rates(trees[full].depth, weight=1e-9),
        by_kind=by_kind,
        greedy=greedy,
        found=hits / wanted if wanted else 1.0,
        drafted=Speed(tokens, seconds, steps, step_seconds),
        same_text=same if found.acceptance == "match" else None,
        preemptions=preempted,
    )


def _run(
    engine: Engine,
    probes: Sequence[Probe],
    params: SamplingParams,
    rows: int,
    controller: Controller,
) -> _Ran:
    """All probes, `rows` at once."""
    counter = _Counter()
    engine.scheduler.controller, engine.watcher = controller, counter
    engine.reset_prefix_cache()
    before = engine.scheduler.preemptions
    texts: dict[str, list[int]] = {}
    waiting = list(enumerate(probes))
    running = 0
    started = time.perf_counter()
    while waiting or running:
        while waiting and running < rows:
            place, probe = waiting.pop(0)
            texts[str(place)] = []
            engine.add(str(place), probe.tokens, params, seed=probe.seed)
            running += 1
        for delta in engine.step():
            running -= _take(texts, delta)
    while engine.has_work():
        engine.step()
    seconds = time.perf_counter() - started
    emitted = sum(len(text) for text in texts.values())
    # Tokens of steps that were timed alone; the others (with prompts in them) have no place in a step's speed.
    share = counter.seconds * emitted / counter.tokens if counter.tokens else 0.0
    return _Ran(
        texts=[tuple(texts[str(place)]) for place in range(len(probes))],
        speed=Speed(emitted, seconds, counter.steps, share),
        preemptions=engine.scheduler.preemptions - before,
    )


def _take(texts: Mapping[str, list[int]], delta: Delta) -> bool:
    """Keep what came; whether the request is over."""
    texts[delta.request_id].extend(delta.token_ids)
    return delta.finish_reason is not None


def _enough(probes: Sequence[Probe], count: int) -> list[Probe]:
    """So many probes, some twice if there are fewer."""
    return [probes[place % len(probes)] for place in range(count)]


def _room(engine: Engine, probes: Sequence[Probe], params: SamplingParams) -> int:
    """How many requests as long as the longest probe and its answer fit at once."""
    scheduler = engine.scheduler
    longest = max(len(probe.tokens) for probe in probes) + (params.max_tokens or 16)
    longest = min(longest, scheduler.max_model_len)
    blocks = scheduler.blocks
    return blocks.usable // blocks.blocks_for(longest + 2 * scheduler.slack)


def _join(all_: Rates, more: Rates) -> None:
    for place, tried in enumerate(more.tried):
        if place == len(all_.tried):
            all_.tried.append(0.0)
            all_.right.append(0.0)
        all_.tried[place] += tried
        all_.right[place] += more.right[place]


def looked_up(probes: Sequence[Probe], texts: Sequence[Sequence[int]]) -> float:
    """Mean tokens a step that a lookup of n-grams would have had while these texts were made."""
    steps = emitted = 0
    for probe, text in zip(probes, texts, strict=True):
        known, rest = list(probe.tokens), list(text)
        while rest:
            draft = _lookup(known)
            right = 0
            while right < len(draft) and right < len(rest) - 1 and draft[right] == rest[right]:
                right += 1
            known += rest[: right + 1]
            rest = rest[right + 1 :]
            steps += 1
            emitted += right + 1
    return emitted / steps if steps else 0.0


def _lookup(known: Sequence[int]) -> Sequence[int]:
    """What followed the last earlier place of the longest end of the text."""
    end = len(known)
    for size in range(min(LONGEST, end - 1), SHORTEST - 1, -1):
        suffix = known[end - size :]
        for start in range(end - size - 1, -1, -1):
            if known[start : start + size] == suffix:
                return known[start + size : start + size + LOOKED_UP]
    return ()


def machine_now(busy_cores: float) -> Machine:
    """This machine, as torch uses it."""
    import os

    import torch

    gpu = torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0))
    return Machine("cuda" if gpu else "cpu", cores, torch.get_num_threads(), busy_cores)
