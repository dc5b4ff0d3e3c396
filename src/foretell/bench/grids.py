"""Tables: what a record says, as titled grids of text, which terminals, reports and documents render alike.

Invariant: a grid is made of what is in the record alone, so an old file looks as it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from foretell.bench.record import Record

Json = Mapping[str, Any]
NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. The first column is text, the others are figures and stand to the right.

    Args:
        note: one line below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def grids(record: Record) -> list[Grid]:
    """The tables of a record."""
    match record.kind:
        case "throughput" | "sweep":
            return [_speeds(record), *_acceptance(record.rows)]
        case "latency":
            return [_latencies(record), *_acceptance(record.rows)]
        case "acceptance":
            return [_categories(record), *_positions(record.rows)]
        case "serve":
            return [_serving(record), *_acceptance(record.rows)]
        case "steps":
            return [_steps(record)]
        case "simulate":
            return [_simulated(record)]
        case "tune":
            return [_tuned(record)]
        case _:
            return [_anything(record)]


def heading(record: Record) -> str:
    """One line: what ran on what."""
    settings, machine = record.settings, record.machine
    model = settings.get("model") or settings.get("url") or "default model"
    return f"{record.kind}: {short(str(model))} on {machine.get('device')}"


def conditions(record: Record) -> list[tuple[str, str]]:
    """Name and value of all that a reader needs to repeat the run."""
    found = [("when", record.when)]
    found += [(str(key), say(value)) for key, value in record.machine.items() if value is not None]
    found += [(str(key), say(value)) for key, value in record.settings.items() if value is not None]
    return found


def short(name: str) -> str:
    """The last part of a path or a hub name."""
    return name.rstrip("/").rpartition("/")[2] or name


def say(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={say(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(say, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# The kinds.


def _speeds(record: Record) -> Grid:
    columns = (
        "drafts", "at once", "tokens/s", "spread", "speed-up", "tokens/step", "TTFT p50 ms", "TPOT p50 ms", "same text",
    )  # fmt: skip
    rows = [
        (
            str(row["label"]),
            str(row["requests"]),
            number(row["tokens_per_s"]["median"]),
            spread(row["tokens_per_s"]),
            speedup(row.get("speedup")),
            number(row.get("tokens_per_step"), 2),
            number(row["ttft_ms"]["percentiles"]["p50"]),
            number(row["tpot_ms"]["percentiles"]["p50"], 2),
            yes(row.get("same_text")),
        )
        for row in record.rows
    ]
    repeats = record.settings.get("repeats")
    note = f"Medians of {repeats} repeats in turns; spread is lowest to highest. {_doubt(record)}"
    return Grid(heading(record), columns, tuple(rows), note.strip())


def _latencies(record: Record) -> Grid:
    columns = (
        "drafts", "tokens/s", "speed-up", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "ITL p50 ms", "p99", "same text",
    )  # fmt: skip
    rows = [
        (
            str(row["label"]),
            number(row["tokens_per_s"]["median"]),
            speedup(row.get("speedup")),
            *_two(row["ttft_ms"], 1),
            *_two(row["tpot_ms"], 2),
            *_two(row["itl_ms"], 2),
            yes(row.get("same_text")),
        )
        for row in record.rows
    ]
    note = f"One request at a time; a piece (ITL) may hold several tokens. {_doubt(record)}"
    return Grid(heading(record), columns, tuple(rows), note.strip())


def _acceptance(rows: Sequence[Json]) -> list[Grid]:
    with_drafts = [row for row in rows if row.get("acceptance")]
    if not with_drafts:
        return []
    columns = ("drafts", "at once", "accepted length", "accepted", "by position")
    cells = [
        (
            str(row["label"]),
            str(row.get("requests", NOTHING)),
            number(row["acceptance"]["length"], 2),
            share(row["acceptance"]["rate"]),
            " / ".join(f"{100 * p:.0f}" for p in row["acceptance"]["per_position"]) + " %",
        )
        for row in with_drafts
    ]
    note = "Accepted length: emitted tokens per draft, the target's own included."
    return [Grid("Acceptance", columns, tuple(cells), note)]


def _categories(record: Record) -> Grid:
    columns = (
        "category",
        "prompts",
        "tokens",
        "accepted length",
        "95 % interval",
        "accepted",
        "tokens/step",
    )
    rows = []
    for row in record.rows:
        seen, interval = row.get("acceptance") or {}, row.get("interval")
        rows.append(
            (
                str(row["category"]),
                str(row["prompts"]),
                str(row["output_tokens"]),
                number(seen.get("length"), 2),
                f"{interval['low']:.2f} to {interval['high']:.2f}" if interval else NOTHING,
                share(seen.get("rate")),
                number(row["tokens_per_step"], 2),
            )
        )
    drafts = record.settings.get("drafts")
    return Grid(f"{heading(record)}, {drafts}", columns, tuple(rows), _doubt(record))


def _positions(rows: Sequence[Json]) -> list[Grid]:
    with_drafts = [row for row in rows if row.get("acceptance")]
    deepest = max((len(row["acceptance"]["per_position"]) for row in with_drafts), default=0)
    if not deepest:
        return []
    cells = []
    for row in with_drafts:
        seen = [share(p) for p in row["acceptance"]["per_position"]]
        cells.append((str(row["category"]), *seen, *[NOTHING] * (deepest - len(seen))))
    columns = ("category", *(str(place + 1) for place in range(deepest)))
    note = "Share of drafts whose token at that position was accepted, with all before it."
    return [Grid("Acceptance by position", columns, tuple(cells), note)]


def _serving(record: Record) -> Grid:
    columns = (
        "load", "done", "failed", "requests/s", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "ITL p50 ms",
        "p99", "E2EL p50 ms", "p99", "good/s",
    )  # fmt: skip
    rows = [
        (
            str(row["label"]),
            str(row["requests"]),
            str(row["failed"]),
            number(row["requests_per_s"], 2),
            number(row["tokens_per_s"]),
            *_two(row["ttft_ms"], 0),
            *_two(row["tpot_ms"], 2),
            *_two(row["itl_ms"], 2),
            *_two(row["e2el_ms"], 0),
            number(row.get("goodput"), 2),
        )
        for row in record.rows
    ]
    return Grid(heading(record), columns, tuple(rows), _doubt(record))


def _simulated(record: Record) -> Grid:
    columns = (
        "replicas", "GPUs", "offered/s", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "E2EL p99 ms", "busy",
        "preempted",
    )  # fmt: skip
    rows = [
        (
            str(row["replicas"]),
            str(row["gpus"]),
            number(row["rate"], 1) if row["rate"] is not None else "all at once",
            number(row["tokens_per_s"]),
            *_two(row["ttft_ms"], 0),
            *_two(row["tpot_ms"], 2),
            number(row["e2el_ms"]["percentiles"]["p99"], 0),
            share(row["busy"]),
            str(row["preemptions"]),
        )
        for row in record.rows
    ]
    note = f"Simulated from measured step costs: {record.settings.get('costs_source')}. Nothing here was run."
    extra = record.extra or {}
    if "capacity_per_replica" in extra:
        most = number(extra["capacity_per_replica"], 2)
        note += f" Within the limits one replica serves {most} requests/s"
        said = [f"{gpus:,} GPUs for {rate}/s" for rate, gpus in extra["gpus_needed"].items()]
        note += f": {', '.join(said)}." if said else "."
    return Grid(heading(record), columns, tuple(rows), note)


def _steps(record: Record) -> Grid:
    columns = ("drafts", "nodes", "at once", "ms/step", "ms/step a request")
    rows = [
        (
            str(row["label"]),
            str(row["nodes"]),
            str(row["requests"]),
            number(1e3 * row["seconds"], 3),
            number(1e3 * row["seconds"] / row["requests"], 3),
        )
        for row in record.rows
    ]
    extra = record.extra or {}
    note = (
        f"A prompt chunk adds {1e3 * extra.get('prompt_fixed_s', 0):.2f} ms and "
        f"{1e6 * extra.get('prompt_token_s', 0):.1f} us a token. {_doubt(record)}"
    )
    return Grid(heading(record), columns, tuple(rows), note.strip())


def _tuned(record: Record) -> Grid:
    columns = ("candidate", "round", "prompts", "tokens/s", "speed-up", "95 % interval", "kept")
    rows = []
    for row in record.rows:
        gain = row.get("speedup")
        rows.append(
            (
                str(row["label"]),
                str(row["round"]),
                str(row["prompts"]),
                number(row["tokens_per_s"]),
                f"{gain['value']:.2f}x" if gain else NOTHING,
                f"{gain['low']:.2f} to {gain['high']:.2f}" if gain else NOTHING,
                "yes" if row["kept"] else "no",
            )
        )
    return Grid(heading(record), columns, tuple(rows), str((record.extra or {}).get("verdict", "")))


def _anything(record: Record) -> Grid:
    columns = tuple(dict.fromkeys(key for row in record.rows for key in row))
    rows = tuple(tuple(say(row.get(c, NOTHING)) for c in columns) for row in record.rows)
    return Grid(heading(record), columns, rows)


# Cells.


def number(value: Any, digits: int = 1) -> str:
    """A figure with thousands apart."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def share(value: Any) -> str:
    """A share in percent."""
    return NOTHING if value is None else f"{100 * value:.0f} %"


def spread(value: Json) -> str:
    """Lowest to highest."""
    return f"{number(value['low'])} to {number(value['high'])}"


def speedup(value: Json | None) -> str:
    """A ratio with its range."""
    if value is None:
        return NOTHING
    return f"{value['median']:.2f}x ({value['low']:.2f} to {value['high']:.2f})"


def yes(value: Any) -> str:
    """A verdict; what is not so stands out."""
    return NOTHING if value is None else ("yes" if value else "NO")


def _two(values: Json | None, digits: int) -> tuple[str, str]:
    if values is None:
        return NOTHING, NOTHING
    found = values["percentiles"]
    return number(found["p50"], digits), number(found["p99"], digits)


def _doubt(record: Record) -> str:
    return "VOID: see the warnings." if record.void else ""


# Renderings.


def markdown(grid: Grid) -> str:
    """As a table of a document."""
    head = "| " + " | ".join(grid.columns) + " |"
    rule = "|---" + "|--:" * (len(grid.columns) - 1) + "|"
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in grid.rows]
    return "\n".join([head, rule, *body])


def html(grid: Grid, titled: bool = True) -> str:
    """As a table of a page."""
    head = "".join(f"<th>{escape(c)}</th>" for c in grid.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in grid.rows
    )
    note = f"<p class=note>{escape(grid.note)}</p>" if grid.note else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    title = f"<h3>{escape(grid.title)}</h3>" if titled else ""
    return f"{title}<div class=scroll>{table}</div>{note}"
