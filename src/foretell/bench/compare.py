"""Two records of the same kind side by side: what became faster, what slower, and what lies within the spread.

Invariant: a difference counts only if the ranges of the repeats do not overlap; records that measured different things
are still shown, with what differs said first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretell.bench.grids import NOTHING, Grid, number, say
from foretell.bench.record import Record

# A field of a row -> (name, digits, whether more is better).
FIGURES: Mapping[str, tuple[str, int, bool]] = {
    "tokens_per_s": ("tokens/s", 1, True),
    "speedup": ("speed-up", 2, True),
    "requests_per_s": ("requests/s", 2, True),
    "ttft_ms": ("TTFT p50 ms", 1, False),
    "tpot_ms": ("TPOT p50 ms", 2, False),
    "itl_ms": ("ITL p50 ms", 2, False),
    "e2el_ms": ("E2EL p50 ms", 1, False),
    "acceptance": ("accepted length", 2, True),
    "seconds": ("seconds", 3, False),
}
NAMES = ("label", "category", "requests", "nodes", "rate", "users", "replicas")
QUIET = 0.02  # a change below it is none, where there is no spread to judge by


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both records.

    Args:
        sure: the ranges of the repeats do not overlap; None where a side has no range.
    """

    row: str
    figure: str
    digits: int
    before: float
    after: float
    more_is_better: bool
    sure: bool | None

    @property
    def ratio(self) -> float:
        """After by before."""
        return self.after / self.before if self.before else float("inf")

    @property
    def verdict(self) -> str:
        """better, worse or same."""
        moved = self.sure if self.sure is not None else abs(self.ratio - 1) > QUIET
        if not moved or self.after == self.before:
            return "same"
        return "better" if (self.after > self.before) == self.more_is_better else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both records' figures, and the conditions that differ."""

    changes: tuple[Change, ...]
    differ: tuple[str, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For the last line."""
        return {
            "differ": list(self.differ),
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
            "changes": [
                {
                    "row": c.row,
                    "figure": c.figure,
                    "before": c.before,
                    "after": c.after,
                    "ratio": round(c.ratio, 4),
                    "verdict": c.verdict,
                }
                for c in self.changes
            ],
        }


def compare(before: Record, after: Record) -> Comparison:
    """Match rows by what they are of.

    Raises:
        ValueError: the records are of different kinds.
    """
    if before.kind != after.kind:
        raise ValueError(
            f"a record of kind {before.kind!r} cannot be compared with one of kind {after.kind!r}"
        )
    old, new = _rows(before), _rows(after)
    changes = [
        change
        for name, row in new.items()
        if name in old
        for change in _changes(name, old[name], row)
    ]
    return Comparison(
        changes=tuple(changes),
        differ=tuple(_differences(before, after)),
        only_before=tuple(name for name in old if name not in new),
        only_after=tuple(name for name in new if name not in old),
    )


def grid(comparison: Comparison) -> Grid:
    """As a table."""
    rows = tuple(
        (
            change.row,
            change.figure,
            number(change.before, change.digits),
            number(change.after, change.digits),
            f"{100 * (change.ratio - 1):+.1f} %",
            change.verdict,
        )
        for change in comparison.changes
    )
    only = [f"only in the first: {n}" for n in comparison.only_before]
    only += [f"only in the second: {n}" for n in comparison.only_after]
    note = "; ".join(("same = the repeats overlap, or less than 2 % where there are none", *only))
    return Grid(
        "Before and after", ("row", "figure", "before", "after", "change", "verdict"), rows, note
    )


def _rows(record: Record) -> dict[str, Mapping[str, Any]]:
    """By name; plain decoding beside several variants is told apart by its order."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in record.rows:
        parts = [
            f"{row[n]}" if n in ("label", "category") else f"{n} {row[n]}"
            for n in NAMES
            if row.get(n) is not None
        ]
        name = ", ".join(parts) or NOTHING
        count = 1
        while name in found:
            count += 1
            name = f"{name.partition(' #')[0]} #{count}"
        found[name] = row
    return found


def _changes(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    found = []
    for key, (figure, digits, more) in FIGURES.items():
        before, after = _figure(old.get(key)), _figure(new.get(key))
        if before is not None and after is not None:
            sure = _apart(old[key], new[key])
            found.append(Change(name, figure, digits, before, after, more, sure))
    return found


def _figure(value: Any) -> float | None:
    if isinstance(value, Mapping):
        for key in ("median", "value", "length"):
            if key in value:
                return float(value[key])
        return float(value["percentiles"]["p50"]) if value.get("count") else None
    return float(value) if isinstance(value, int | float) else None


def _apart(old: Any, new: Any) -> bool | None:
    if not (isinstance(old, Mapping) and "low" in old and isinstance(new, Mapping)):
        return None
    if len(old.get("values", ())) < 2 or len(new.get("values", ())) < 2:
        return None
    return bool(new["low"] > old["high"] or new["high"] < old["low"])


def _differences(before: Record, after: Record) -> list[str]:
    found = []
    for part, old, new in (
        ("machine", before.machine, after.machine),
        ("settings", before.settings, after.settings),
    ):
        for key in dict.fromkeys((*old, *new)):
            if old.get(key) != new.get(key):
                found.append(f"{part} {key}: {say(old.get(key))} -> {say(new.get(key))}")
    return found
