"""Reads traces that an engine wrote (`trace=`), and counts what became of every place of the tree.

A place is a path of ranks: (0,) is the first child of the root, (0, 2) the third child of that. In trees that grow,
children of a node are ranked in the order they were kept. The writer is engine/trace.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One verification of one request; node 0 is the last committed token.

    Args:
        length: committed tokens before it.
        tokens: -1 where nothing was drafted.
        accepted: the accepted nodes, from the root's child on.
        target_probs, draft_probs: of each node's token, under the target's law and the one it was drawn from.
    """

    request: str
    step: int
    length: int
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    target_probs: tuple[float, ...]
    draft_probs: tuple[float, ...] | None


@dataclass(slots=True)
class PlaceCount:
    """How often a place was drafted and accepted, and the sum of the target's probabilities there."""

    drafted: int = 0
    accepted: int = 0
    probability: float = 0.0

    @property
    def rate(self) -> float:
        """Accepted of drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True)
class Summary:
    """What a trace comes to."""

    steps: int = 0
    emitted: int = 0
    places: dict[Place, PlaceCount] = field(default_factory=dict)

    @property
    def accepted_length(self) -> float:
        """Mean tokens a verification, the target's own included."""
        return self.emitted / self.steps if self.steps else 0.0


def read_trace(path: Path) -> Iterator[TracedStep]:
    """The steps of a trace, in the order of the file. A last line that was cut off is left out.

    Raises:
        ValueError: the file is no trace; names the line.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            if number == 1 and record.get("trace") != 1:
                raise ValueError
            if number > 1:
                yield _step(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and number > 1:  # no line end: the writer was stopped here
                return
            raise ValueError(
                f"{path.name}, line {number}, is not of a trace; give a file that trace= wrote"
            ) from error


def _step(record: dict[str, object]) -> TracedStep:
    def numbers(key: str) -> tuple[int, ...]:
        values = record[key]
        assert isinstance(values, list)
        return tuple(values)

    drawn = record["draft_probs"]
    return TracedStep(
        request=str(record["request"]),
        step=int(str(record["step"])),
        length=int(str(record["length"])),
        parents=numbers("parents"),
        tokens=numbers("tokens"),
        accepted=numbers("accepted"),
        emitted=numbers("emitted"),
        target_probs=tuple(map(float, numbers("target_probs"))),
        draft_probs=tuple(drawn) if isinstance(drawn, list) else None,
    )


def summarise(steps: Iterable[TracedStep]) -> Summary:
    """Counts over all steps, by place."""
    total = Summary()
    for step in steps:
        total.steps += 1
        total.emitted += len(step.emitted)
        for node, place in enumerate(places_of(step.parents)):
            if node == 0 or step.tokens[node] < 0:
                continue
            count = total.places.setdefault(place, PlaceCount())
            count.drafted += 1
            count.accepted += node in step.accepted
            count.probability += step.target_probs[node] if step.target_probs else 0.0
    return total


def places_of(parents: Sequence[int]) -> list[Place]:
    """The place of each node; the root's is ()."""
    places: list[Place] = [()]
    children = [0] * len(parents)
    for parent in parents[1:]:
        places.append((*places[parent], children[parent]))
        children[parent] += 1
    return places
