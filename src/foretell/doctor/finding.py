"""Finding: a cause with its figure, its remedy and what that would gain; and the order of groups. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Rank(IntEnum):
    """Groups of findings, in order."""

    VOID = 0  # figures that mean nothing, text that is wrong, an engine that does not start
    CAUSE = 1
    SETTING = 2
    HINT = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause.

    Args:
        code: for scripts; see docs/doctor.md.
        gain: tokens per second after the remedy by those now; 1 where it cannot be said.
        figure: the measurement it rests on.
    """

    code: str
    rank: Rank
    title: str
    figure: str
    remedy: str
    gain: float = 1.0

    def as_dict(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {
            "code": self.code,
            "rank": self.rank.name.lower(),
            "title": self.title,
            "figure": self.figure,
            "remedy": self.remedy,
            "gain": round(self.gain, 3),
        }


def percent(rates: tuple[float, ...]) -> str:
    """Acceptance by position, for people."""
    return ", ".join(f"{rate:.0%}" for rate in rates[:6]) or "nothing"
