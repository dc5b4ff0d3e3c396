"""What an engine's work costs: decode steps from the measured table (spec/costs.py), and prompt tokens besides.

The table is the controller's own; what it does not measure, prompts, is added here. Nothing is derived from a data
sheet: a figure was measured, or lies on a line through some that were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.bench.record import Record
from foretell.spec.costs import StepCosts


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """Seconds that prompt tokens add to a step.

    Args:
        fixed: of a step with prompt chunks, whatever their length.
        token: of each prompt token.
        points: (tokens, seconds) that were measured.
    """

    fixed: float
    token: float
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, tokens: int) -> float:
        """Of so many prompt tokens in one step; 0 for none."""
        return self.fixed + self.token * tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Steps and prompts.

    Args:
        steps: seconds of a decode step by (requests, tree), the drafter's part included.
        source: where the figures come from, for people.
    """

    steps: StepCosts
    prompts: PromptCosts
    source: str = ""

    def as_json(self) -> dict[str, Any]:
        """What `read_costs` takes back."""
        return {
            "costs": self.steps.as_json(),
            "prompt_fixed_s": self.prompts.fixed,
            "prompt_token_s": self.prompts.token,
            "prompt_points": [list(point) for point in self.prompts.points],
        }


def read_costs(record: Record) -> Costs:
    """From a record of `foretell bench steps`.

    Raises:
        ValueError: the record is of another kind.
    """
    extra: Mapping[str, Any] = record.extra or {}
    if "costs" not in extra:
        raise ValueError(
            f"a record of kind {record.kind!r} holds no step costs; make one with `foretell bench steps --out FILE`"
        )
    prompts = PromptCosts(
        float(extra["prompt_fixed_s"]),
        float(extra["prompt_token_s"]),
        tuple((float(x), float(y)) for x, y in extra.get("prompt_points", ())),
    )
    model = str(record.settings.get("model") or "the default model")
    source = f"{model} on {record.machine.get('device')}, {record.when[:10]}"
    return Costs(StepCosts.read(extra["costs"]), prompts, source)


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
