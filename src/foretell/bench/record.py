"""Records: what a benchmark measured, with all that is needed to read and repeat it, as one JSON object.

A record is written once and never edited. Rows are dataclasses when they are made and plain JSON when they are read:
tables, plots, reports and comparisons work on what is in the file, whichever version wrote it.

Invariant: a record names commit, machine, settings, seed and repeats, and says itself when its figures are void.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from foretell.bench.machine import Machine

FORMAT = 1
KINDS = (
    "throughput",
    "latency",
    "sweep",
    "acceptance",
    "serve",
    "steps",
    "simulate",
    "tune",
)
DIGITS = 6  # significant ones in a record; more is noise


@dataclass(frozen=True, slots=True)
class Record:
    """One run of one benchmark.

    Args:
        kind: one of KINDS.
        settings: what was asked for, as JSON.
        rows: what was measured, as JSON objects.
        warnings: what a reader must know before believing a figure.
        extra: what is not a table, such as a series over time.
    """

    kind: str
    when: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    warnings: Sequence[str] = ()
    extra: Mapping[str, Any] | None = None

    @classmethod
    def made(
        cls,
        kind: str,
        machine: Machine,
        settings: Mapping[str, Any],
        rows: Sequence[object],
        warnings: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> Self:
        """A record of now."""
        assert kind in KINDS, kind
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(
            kind=kind,
            when=now,
            machine=plain(machine),
            settings=plain(settings),
            rows=[plain(row) for row in rows],
            warnings=list(dict.fromkeys(warnings)),
            extra=None if extra is None else plain(extra),
        )

    @classmethod
    def read(cls, data: Mapping[str, Any], name: str = "the record") -> Self:
        """From JSON.

        Raises:
            ValueError: it is not a record, or of a newer format; names the file.
        """
        if not isinstance(data, Mapping) or "foretell_bench" not in data:
            raise ValueError(
                f"{name} is not a record of foretell bench (no 'foretell_bench' in it)"
            )
        if data["foretell_bench"] > FORMAT:
            raise ValueError(
                f"{name} has format {data['foretell_bench']}, this version reads up to {FORMAT}; update foretell"
            )
        return cls(
            kind=str(data["kind"]),
            when=str(data["when"]),
            machine=data["machine"],
            settings=data["settings"],
            rows=data["rows"],
            warnings=data.get("warnings", ()),
            extra=data.get("extra"),
        )

    @property
    def void(self) -> bool:
        """Its figures mean nothing, by its own account."""
        return any("void" in warning for warning in self.warnings)

    def as_json(self) -> dict[str, Any]:
        """The object that is written."""
        data: dict[str, Any] = {
            "foretell_bench": FORMAT,
            "kind": self.kind,
            "when": self.when,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "warnings": list(self.warnings),
            "rows": [dict(row) for row in self.rows],
        }
        if self.extra is not None:
            data["extra"] = dict(self.extra)
        return data

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_json(), ensure_ascii=False, separators=(",", ":"))

    def save(self, path: Path) -> None:
        """Write it, indented, with its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), ensure_ascii=False, indent=1) + "\n", "utf-8")


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        ValueError: the file is missing, is not JSON, or holds no record.
    """
    if not path.is_file():
        raise ValueError(f"there is no result file {path}")
    try:
        data = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    return Record.read(data, str(path))


def plain(value: Any) -> Any:
    """Dataclasses to objects, tuples to lists, floats to DIGITS significant digits, what is no number to None."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)
