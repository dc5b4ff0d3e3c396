"""Questions to the simulation: what a load does to so many replicas, how much one carries, and how many a load needs.

Also the check against real runs: a batch that was run is simulated from the same step costs, and both are compared.

Invariant: a fleet larger than SIMULATED replicas is simulated by that many with their share of the load. Behind a
router that looks at queues a larger fleet shares better, so such figures are on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.bench.costs import Costs
from foretell.bench.serving import Limits, Load, summed
from foretell.bench.simulate import Accepting, Outcome, Router, Shape, Traffic, simulate
from foretell.bench.stats import Distribution
from foretell.spec.acceptance import best_tree, expected_speed, rates_of
from foretell.spec.tree import chain

SIMULATED = 8
ENOUGH = 4  # requests for each that can run at once, or a queue that grows is not seen
PRECISION = 0.02  # of a rate that is searched


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is the same for all loads.

    Args:
        gpus: of one replica.
    """

    shape: Shape
    costs: Costs
    accepting: Accepting
    gpus: int = 1
    router: Router = "least"


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One load on one fleet; figures are of the whole fleet.

    Args:
        simulated: replicas that were simulated for it.
        busy: share of the time that a replica computed.
    """

    label: str
    replicas: int
    simulated: int
    gpus: int
    rate: float | None
    requests: int
    requests_per_s: float
    tokens_per_s: float
    goodput: float | None
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2el_ms: Distribution
    busy: float
    step_ms: float
    tokens_per_step: float
    preemptions: int


def under(fleet: Fleet, traffic: Traffic, replicas: int, limits: Limits) -> FleetRow:
    """The traffic on so many replicas."""
    ran = min(replicas, SIMULATED)
    share = ran / replicas
    part = replace(traffic, rate=traffic.rate * share)
    outcome = simulate(part, fleet.shape, fleet.costs, fleet.accepting, ran, fleet.router)
    return _row(fleet, traffic, replicas, ran, outcome, limits)


def capacity(fleet: Fleet, traffic: Traffic, limits: Limits) -> float:
    """The most requests a second that one replica serves within the limits for 99 of 100 requests; 0 = none.

    Args:
        traffic: its rate is not read.

    Raises:
        ValueError: there is no limit, or there are too few requests to see a queue grow.
    """
    if not limits.any:
        raise ValueError(
            "a capacity needs a limit: give --ttft-limit, --tpot-limit or --e2el-limit"
        )
    least = ENOUGH * fleet.shape.max_num_seqs
    if traffic.requests < least:
        raise ValueError(
            f"{traffic.requests} requests are too few to see a queue grow; simulate at least {least}, "
            f"{ENOUGH} for each that can run at once"
        )

    def holds(rate: float) -> bool:
        own = replace(traffic, rate=rate)
        outcome = simulate(own, fleet.shape, fleet.costs, fleet.accepting, 1, fleet.router)
        row = _row(fleet, own, 1, 1, outcome, limits)
        seen = (row.ttft_ms, row.tpot_ms, row.e2el_ms)
        wanted = (limits.ttft_ms, limits.tpot_ms, limits.e2el_ms)
        within = (w is None or s.percentiles["p99"] <= w for s, w in zip(seen, wanted, strict=True))
        return all(within) and _left(outcome) <= fleet.shape.max_num_seqs

    low, high = 0.0, _full(fleet, traffic)
    while holds(high):
        low, high = high, 2 * high
    if low == 0.0:
        low, high = _below(holds, high)
    while low > 0 and high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def needed(per_replica: float, rate: float, gpus: int = 1, spare: float = 0.0) -> int:
    """GPUs for a load.

    Args:
        spare: share of the fleet that may be down or draining at any time.

    Raises:
        ValueError: a replica serves nothing within the limits.
    """
    if per_replica <= 0:
        raise ValueError(
            "one replica serves nothing within the limits; relax them or use faster GPUs"
        )
    return gpus * math.ceil(rate / per_replica / (1 - spare))


@dataclass(frozen=True, slots=True)
class Check:
    """A run that was made, and what the simulation says it should have been.

    Args:
        requests: at once.
        measured, predicted: output tokens a second.
    """

    label: str
    requests: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted by measured, less 1."""
        return self.predicted / self.measured - 1


def check(row: Mapping[str, Any], fleet: Fleet) -> Check:
    """Simulate one row of a throughput or sweep record: the same lengths, in batches that start together.

    Args:
        fleet: its shape's tree is the one that the row ran; its acceptance is replaced by the row's own.
    """
    batch = int(row["requests"])
    lengths = [(int(p), int(o)) for p, o in row["lengths"]]
    own = replace(fleet, accepting=accepting_of(row))
    seconds = 0.0
    for start in range(0, len(lengths), batch):
        seconds += batch_seconds(own, lengths[start : start + batch])
    tokens = sum(output for _, output in lengths)
    measured = float(row["tokens_per_s"]["median"])
    return Check(str(row["label"]), batch, measured, tokens / seconds)


def with_predictions(rows: Sequence[Mapping[str, Any]], fleet: Fleet) -> list[dict[str, Any]]:
    """Rows of a sweep, each drafting one with the speed-up that the costs predict for it.

    The row's own acceptance goes in, so what is tested is the cost model, not the drafter. A row whose tree was not
    measured, or that chose its tree itself, has no prediction.
    """
    plain = {int(row["requests"]): row for row in rows if row.get("speedup") is None}
    found = []
    for row in rows:
        tree, base = tree_of(row, fleet.costs), plain.get(int(row["requests"]))
        predicted = None
        if row.get("speedup") is not None and tree is not None and base is not None:
            drafted = check(row, replace(fleet, shape=replace(fleet.shape, tree=tree)))
            plainly = replace(fleet.shape, tree=fleet.costs.steps.plain)
            without = check({**base, "lengths": row["lengths"]}, replace(fleet, shape=plainly))
            predicted = drafted.predicted / without.predicted
        found.append({**row, "predicted_speedup": predicted})
    return found


def tree_of(row: Mapping[str, Any], costs: Costs) -> int | None:
    """The tree among the costs' that a row of fixed drafts verified; None if it is not known or not among them."""
    if row.get("adaptive") or row.get("k") is None or row.get("tree") != "chain":
        return None
    wanted = chain(int(row["k"]))
    return costs.steps.trees.index(wanted) if wanted in costs.steps.trees else None


def batch_seconds(fleet: Fleet, lengths: Sequence[tuple[int, int]], seed: int = 0) -> float:
    """Seconds that requests of these lengths take which start together."""
    shape = replace(fleet.shape, max_num_seqs=max(fleet.shape.max_num_seqs, len(lengths)))
    traffic = Traffic(lengths, math.inf, len(lengths), seed, in_order=True)
    outcome = simulate(traffic, shape, fleet.costs, fleet.accepting)
    return max(one.ended for one in outcome.served)


def accepting_of(row: Mapping[str, Any]) -> Accepting:
    """The acceptance that a row of a record saw; none for plain decoding.

    A lookup does not find something for every step. With L emitted tokens a draft and t a step, found drafts make up
    (t - 1) / (L - 1) of the steps; the first token of an answer, which the prompt's step emits, is none.
    """
    seen = row.get("acceptance")
    if not seen:
        return Accepting(())
    drafts, length = int(seen["drafts"]), float(seen["length"])
    rates = rates_of([round(drafts * float(p)) for p in seen["per_position"]], drafts)
    lengths = row.get("lengths") or ()
    per_step = float(row.get("tokens_per_step") or length)
    tokens, answers = sum(int(output) for _, output in lengths), len(lengths)
    if tokens > answers:
        per_step = (tokens - answers) / max(tokens / per_step - answers, 1)
    share = (per_step - 1) / (length - 1) if length > 1 else 1.0
    return Accepting(rates, min(max(share, 0.0), 1.0))


def _full(fleet: Fleet, traffic: Traffic) -> float:
    """About what a replica does with every slot taken and nothing else to do: where the search begins."""
    rows, steps = fleet.shape.max_num_seqs, fleet.costs.steps
    tree = best_tree(steps, rows, fleet.accepting.rates)
    tree = tree if fleet.shape.tree is None else fleet.shape.tree
    tokens = expected_speed(steps, rows, tree, fleet.accepting.rates)
    return tokens * len(traffic.lengths) / sum(output for _, output in traffic.lengths)


def _left(outcome: Outcome) -> int:
    """Requests that had not ended when the last one came: more than can run means that a queue grows."""
    last = max(one.sent for one in outcome.served)
    return sum(one.ended > last for one in outcome.served)


def _below(holds: Any, high: float) -> tuple[float, float]:
    """A rate that holds and one that does not, below `high`; (0, high) if not even a request in 1,000 s holds."""
    while high > 1e-3:
        if holds(high / 2):
            return high / 2, high
        high /= 2
    return 0.0, high


def _row(
    fleet: Fleet, traffic: Traffic, replicas: int, ran: int, outcome: Outcome, limits: Limits
) -> FleetRow:
    served = summed(outcome.served, Load(traffic.requests, traffic.rate), limits, None)
    more = replicas / ran
    at_once = math.isinf(traffic.rate)
    return FleetRow(
        label=served.label,
        replicas=replicas,
        simulated=ran,
        gpus=replicas * fleet.gpus,
        rate=None if at_once else traffic.rate,
        requests=served.requests,
        requests_per_s=served.requests_per_s * more,
        tokens_per_s=served.tokens_per_s * more,
        goodput=None if served.goodput is None else served.goodput * more,
        ttft_ms=served.ttft_ms,
        tpot_ms=served.tpot_ms,
        itl_ms=served.itl_ms,
        e2el_ms=served.e2el_ms,
        busy=outcome.busy,
        step_ms=outcome.step_ms,
        tokens_per_step=outcome.tokens_per_step,
        preemptions=outcome.preemptions,
    )
