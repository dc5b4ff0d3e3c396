"""Step costs, measured: how long a decode step takes by batch and tree, and what prompt tokens cost.

The engine runs requests of equal length together, past their ends, under a controller that takes every tree in turn
instead of the best one. The engine's own stopwatch times the steps, as it does for the controller that chooses. What
the requests say is of no worth here, and no acceptance is reported.

Invariant: a step that also computed a prompt, or in which the drafter caught up, is in no figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretell.bench.costs import Costs, PromptCosts, fit_line
from foretell.bench.offline import Plan, enough
from foretell.bench.prompts import BenchPrompt
from foretell.bench.runs import Opener, Side, Tell, together
from foretell.bench.variants import Variant
from foretell.spec.controller import Choice, Controller, Wish
from foretell.spec.costs import StepCosts, bucket_of
from foretell.spec.tree import Tree

STAY = 3  # steps on one tree before the next: the first may be one of catching up
LEAST = 3  # timed steps of a tree at a batch, or the record warns


@dataclass(frozen=True, slots=True)
class StepRow:
    """One tree at one batch.

    Args:
        requests: at once; the bucket that the engine ran them in.
        seconds: median of the newest steps, drafting included.
        draft_seconds: of drafting among them; 0 = not timed apart.
        count: steps that were timed.
    """

    label: str
    tree: int
    nodes: int
    depth: int
    requests: int
    seconds: float
    draft_seconds: float
    count: int


class InTurn(Controller):
    """Takes every tree in turn, whatever it costs."""

    def __init__(self, trees: Sequence[Tree]) -> None:
        super().__init__(trees)
        self._turn = 0

    def choose(self, wishes: Sequence[Wish], room: int | None = None) -> Choice:
        """The next tree; the smallest one if it does not fit."""
        super().choose(wishes, room)
        tree = (self._turn // STAY) % len(self.trees)
        self._turn += 1
        if room is not None and self.trees[tree].nodes > room:
            tree = self.plain
        return Choice(tree, float(len(wishes)), 0.0)


def step_costs(
    open_llm: Opener, variant: Variant, batches: Sequence[int], plan: Plan, tell: Tell
) -> tuple[Costs, list[StepRow], list[str]]:
    """Measure one engine.

    Returns:
        The costs, the same as rows, and what is to be doubted.
    """
    tell(f"loading {variant.label}")
    with open_llm(variant) as llm:
        scheduler = llm.parts().driver.engine.scheduler
        turn = InTurn(scheduler.trees)
        scheduler.controller = turn
        params = replace(plan.params, ignore_eos=True, min_tokens=0)
        side = Side(variant, llm, params, raw=plan.raw)
        for batch in batches:
            group = enough(plan, batch).prompts[:batch]
            for repeat in range(plan.repeats):
                tell(f"{batch} at once, repeat {repeat + 1} of {plan.repeats}")
                together(side, group)
        tell("prompts")
        prompts = prompt_costs(side, plan.prompts, batches, plan.repeats)
    costs = Costs(turn.costs, prompts)
    rows = rows_of(turn.costs)
    return costs, rows, _missing(turn.costs, batches)


def rows_of(costs: StepCosts) -> list[StepRow]:
    """The table, by tree and batch."""
    found = []
    for (rows, tree), cell in sorted(
        costs.cells.items(), key=lambda entry: (entry[0][1], entry[0][0])
    ):
        shape = costs.trees[tree]
        found.append(
            StepRow(
                label=_name(shape),
                tree=tree,
                nodes=shape.nodes,
                depth=shape.depth,
                requests=rows,
                seconds=cell.seconds,
                draft_seconds=cell.draft,
                count=cell.count,
            )
        )
    return found


def prompt_costs(
    side: Side, prompts: Sequence[BenchPrompt], batches: Sequence[int], repeats: int
) -> PromptCosts:
    """Prefills of several sizes with one token of answer; the fastest of the repeats, since only delays add to one."""
    short = replace(side, params=replace(side.params, max_tokens=1))
    points = []
    for count in sorted({1, 2, 4, *batches}):
        group = [prompts[i % len(prompts)] for i in range(count)]
        runs = [together(short, group) for _ in range(repeats + 1)][1:]
        points.append((float(runs[0].prompt_tokens), min(run.seconds for run in runs)))
    fixed, token = fit_line(points)
    return PromptCosts(fixed, token, tuple(points))


def _missing(costs: StepCosts, batches: Sequence[int]) -> list[str]:
    """Trees that were hardly ever verified, as by a lookup that finds nothing."""
    found = []
    for batch in batches:
        few = [t for t in range(len(costs.trees)) if costs.measured(batch, t) < LEAST]
        if few:
            names = ", ".join(_name(costs.trees[t]) for t in few)
            found.append(
                f"at {batch} at once (bucket {bucket_of(batch)}) fewer than {LEAST} steps were timed of: {names}; "
                "their costs are estimates. Give longer answers, or prompts for which the drafter finds something "
                "(--prompts copy)"
            )
    return found


def _name(tree: Tree) -> str:
    if tree.nodes == 1:
        return "plain"
    return f"chain of {tree.depth}" if tree.is_chain else f"tree of {tree.nodes} nodes"
