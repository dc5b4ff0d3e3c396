"""Step costs as a simulation needs them: seconds of a decode step by (requests, nodes), and of prompt tokens.

Read from records that hold measurements; between two of them costs are linear, beyond the last they go on as between
the last two. Nothing is derived from a data sheet.

Invariant: more requests or more nodes never cost less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.bench.record import Record

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps cost on one machine with one pair of models.

    Args:
        decode: nodes of the tree -> (requests, seconds) of a whole step, the drafter's part included.
        prompt_fixed: seconds that a prompt chunk adds to a step whatever its length.
        prompt_token: seconds per prompt token.
        source: where the figures come from.
    """

    decode: Mapping[int, Points]
    prompt_fixed: float
    prompt_token: float
    source: str = ""

    def __post_init__(self) -> None:
        if 1 not in self.decode:
            raise ValueError("step costs need plain decoding (a tree of 1 node) among them")
        for nodes, points in self.decode.items():
            if not points or any(seconds <= 0 for _, seconds in points):
                raise ValueError(f"step costs of {nodes} nodes must be above 0, got {points!r}")
        rising = {nodes: _rising(points) for nodes, points in self.decode.items()}
        object.__setattr__(self, "decode", dict(sorted(rising.items())))

    @property
    def nodes(self) -> tuple[int, ...]:
        """Sizes of the trees that were measured."""
        return tuple(self.decode)

    def step(self, requests: int, nodes: int) -> float:
        """Seconds of a decode step of so many requests; 0 for none. Between two measured trees, linear in nodes."""
        if requests == 0:
            return 0.0
        if nodes in self.decode:
            return _along(self.decode[nodes], requests)
        return _along([(n, _along(self.decode[n], requests)) for n in self.nodes], nodes)

    def prompt(self, tokens: int) -> float:
        """Seconds that so many prompt tokens add to a step."""
        return self.prompt_fixed + self.prompt_token * tokens if tokens else 0.0


def read_costs(record: Record) -> Costs:
    """From a record of `foretell bench steps`.

    Raises:
        ValueError: the record is of another kind or holds no prompt costs.
    """
    extra: Mapping[str, Any] = record.extra or {}
    if record.kind != "steps" or "prompt_token_s" not in extra:
        raise ValueError(
            f"a record of kind {record.kind!r} holds no step costs; make one with `foretell bench steps --out FILE`"
        )
    decode: dict[int, list[tuple[int, float]]] = {}
    for row in record.rows:
        seconds = float(row["step_ms"]["percentiles"]["p50"]) / 1e3
        decode.setdefault(int(row["nodes"]), []).append((int(row["requests"]), seconds))
    name = f"{record.settings.get('model')} on {record.machine.get('device')}, {record.when[:10]}"
    return Costs(decode, float(extra["prompt_fixed_s"]), float(extra["prompt_token_s"]), name)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of the least-squares line a + b x, neither below 0; one point is a line through the origin."""
    assert points, "a line needs a point"
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if slope <= 0 or mean_y - slope * mean_x < 0:  # through the origin
        square = sum(x * x for x, _ in points)
        return 0.0, sum(x * y for x, y in points) / square if square else 0.0
    return mean_y - slope * mean_x, slope


def _rising(points: Points) -> Points:
    """In order of requests, each at least as dear as the one before (a measured dip is noise)."""
    found: list[tuple[int, float]] = []
    for place, seconds in sorted(points):
        found.append((place, max(seconds, found[-1][1] if found else 0.0)))
    return tuple(found)


def _along(points: Points, at: float) -> float:
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    right = min(max(bisect_left([p for p, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
