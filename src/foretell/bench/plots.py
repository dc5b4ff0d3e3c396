"""Plots of records, as PNG or SVG: matplotlib draws, and is needed only here.

Every figure has one message, zero on its axis where it shows an amount, and the spread of the repeats. Colours are
Okabe and Ito's, which colour-blind readers tell apart; lines also differ by marker.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench.grids import short
from foretell.bench.record import Record
from foretell.bench.variants import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SIZE = (7.2, 4.2)  # inches
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure.

    Args:
        name: for files, such as "speedup".
        caption: what it shows and how to read it, in one sentence.
    """

    name: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        """The <svg> element alone, with text as text; its ids carry the figure's name, so that a page can hold many."""
        import matplotlib

        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            out = io.StringIO()
            self.figure.savefig(out, format="svg", metadata={"Date": None})
        text = out.getvalue()
        own = re.sub(r'\bid="', f'id="{self.name}-', text[text.index("<svg") :])
        return re.sub(r'(href="#|url\(#)', rf"\g<1>{self.name}-", own)

    def save(self, folder: Path, kind: str = "png") -> Path:
        """Write it; returns the path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.{kind}"
        if kind == "svg":
            path.write_text(self.svg(), "utf-8")
        else:
            self.figure.savefig(path, dpi=144)
        return path


def need_matplotlib() -> None:
    """Refuse early, before anything was measured.

    Raises:
        ImportError: matplotlib is missing; says how to get it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "plots need matplotlib, which is not installed; run: pip install 'foretell[bench]'"
        ) from None


def plots(record: Record) -> list[Plot]:
    """All figures that a record has data for."""
    need_matplotlib()
    made: list[Plot] = []
    if record.kind == "sweep" and len({row["requests"] for row in record.rows}) > 1:
        made += [_speedups(record), _speeds(record)]
    elif record.kind in ("sweep", "throughput", "latency") and len(record.rows) > 1:
        made.append(_bars(record))
    simulated = record.kind == "simulate"  # its acceptance was given, not found
    if not simulated and any(
        (row.get("acceptance") or {}).get("per_position") for row in record.rows
    ):
        made.append(_positions(record))
    if (record.extra or {}).get("courses"):
        made.append(_courses(record))
    if any(row.get("predicted_speedup") is not None for row in record.rows):
        made.append(_predicted(record))
    if record.kind in ("serve", "simulate") and len(record.rows) > 1:
        made += _loads(record)
    if record.kind == "steps":
        made.append(_steps(record))
    if record.kind == "tune":
        made.append(_tuned(record))
    return made


# The figures.


def _speedups(record: Record) -> Plot:
    figure, axes = _figure("Speed-up against batch", "requests at once", "speed-up (plain = 1)")
    for style, (label, rows) in _styles(_by_label(record, drafting=True)):
        _line(axes, style, label, rows, lambda row: row["speedup"])
    axes.axhline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    _batches(axes, record)
    _legend(axes)
    return Plot(
        "speedup",
        "Above the dashed line drafting is faster than plain decoding of the same build; bars are the lowest and the "
        "highest of the repeats.",
        figure,
    )


def _speeds(record: Record) -> Plot:
    figure, axes = _figure("Throughput against batch", "requests at once", "output tokens/s")
    for style, (label, rows) in _styles(_by_label(record)):
        _line(axes, style, label, rows, lambda row: row["tokens_per_s"])
    axes.set_ylim(bottom=0)
    _batches(axes, record)
    _legend(axes)
    return Plot("throughput", "Output tokens of all requests together, per second.", figure)


def _bars(record: Record) -> Plot:
    figure, axes = _figure("Throughput", "", "output tokens/s")
    labels = [str(row["label"]) for row in record.rows]
    styles = _styles(record.rows)
    for place, row in enumerate(record.rows):
        value = row["tokens_per_s"]
        axes.bar(place, value["median"], width=0.6, color=styles[place][0][0])
        axes.errorbar(place, value["median"], yerr=_error(value), color="#222222", capsize=4)
        gain = row.get("speedup")
        said = f"{value['median']:,.1f}" + (f"\n{gain['median']:.2f}x" if gain else "")
        axes.annotate(
            said, (place, value["high"]), xytext=(0, 4), textcoords="offset points", ha="center"
        )
    axes.set_xticks(range(len(labels)), [short(label) for label in labels])
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 1.25 * max(row["tokens_per_s"]["high"] for row in record.rows))
    return Plot(
        "throughput", "Medians; bars are the lowest and the highest of the repeats.", figure
    )


def _positions(record: Record) -> Plot:
    figure, axes = _figure(
        "Acceptance by position", "position in the draft", "share of drafts accepted up to here"
    )
    rows = [row for row in record.rows if (row.get("acceptance") or {}).get("per_position")]
    named = "category" if record.kind == "acceptance" else "label"
    # Batch and load change little: one line for each drafter, at the smallest batch.
    rows = rows[:1] if record.kind == "serve" else [own[0] for _, own in _grouped(rows, named)]
    for style, row in _styles(rows):
        shares = row["acceptance"]["per_position"]
        label = "server" if record.kind == "serve" else str(row[named])
        whole = row[named] == "all"
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            label=label,
            marker=style[1],
            color="#000000" if whole else style[0],
            linewidth=2.6 if whole else 1.6,
        )
    deepest = max(len(row["acceptance"]["per_position"]) for row in rows)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 1.02)
    _legend(axes)
    return Plot(
        "acceptance",
        "A line that falls slowly has room for longer drafts; one that starts low has a drafter that does not fit.",
        figure,
    )


def _courses(record: Record) -> Plot:
    figure, axes = _figure("Tokens/s over time", "seconds since the start", "output tokens/s")
    assert record.extra is not None
    for style, course in _styles(record.extra["courses"]):
        axes.plot(course["seconds"], course["tokens_per_s"], label=course["label"], color=style[0])
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _legend(axes)
    return Plot(
        "course", "One run of each; where a line falls to the right, requests end and the batch shrinks.", figure
    )  # fmt: skip


def _predicted(record: Record) -> Plot:
    figure, axes = _figure("Cost model against measured", "predicted speed-up", "measured speed-up")
    rows = [row for row in record.rows if row.get("predicted_speedup") is not None]
    for style, (label, own) in _styles(_grouped(rows)):
        axes.plot(
            [row["predicted_speedup"] for row in own],
            [row["speedup"]["median"] for row in own],
            linestyle="none",
            marker=style[1],
            color=style[0],
            label=label,
        )
    top = 1.1 * max(max(r["predicted_speedup"], r["speedup"]["median"]) for r in rows)
    axes.plot([0, top], [0, top], color="#444444", linewidth=1, linestyle="--")
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="#444444", alpha=0.12)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    _legend(axes)
    return Plot(
        "cost_model",
        "On the dashed line the model is right; the band is 10 % to each side.",
        figure,
    )


def _loads(record: Record) -> list[Plot]:
    simulated = record.kind == "simulate"
    open_loop = all(row.get("rate") is not None for row in record.rows)
    key, name = ("rate", "requests/s offered") if open_loop else ("users", "users")
    if any(row.get(key) is None for row in record.rows):
        return []
    made = []
    for figure_name, field, title in (
        ("ttft", "ttft_ms", "Time to first token"),
        ("tpot", "tpot_ms", "Time per output token"),
    ):
        figure, axes = _figure(
            title + (", simulated" if simulated else ""), name, "ms (logarithmic)"
        )
        groups = _grouped(record.rows, "replicas") if simulated else [("", list(record.rows))]
        for style, (label, rows) in _styles(groups):
            rows = sorted(rows, key=lambda row: float(row[key]))
            for q, dash in (("p50", "-"), ("p99", "--")):
                axes.plot(
                    [row[key] for row in rows],
                    [max(row[field]["percentiles"][q], 1e-3) for row in rows],
                    color=style[0],
                    marker=style[1],
                    linestyle=dash,
                    label=q + (f", {label} replica" + "s" * (label != "1") if label else ""),
                )
        axes.set_yscale("log")
        axes.set_xlim(left=0)
        _legend(axes)
        made.append(
            Plot(figure_name, "Where the curve bends up, the load is more than is served.", figure)
        )
    return made


def _steps(record: Record) -> Plot:
    figure, axes = _figure("What a step costs", "requests at once", "ms a step")
    for style, (label, rows) in _styles(_grouped(record.rows)):
        axes.plot(
            [row["requests"] for row in rows],
            [1e3 * row["seconds"] for row in rows],
            label=f"{label} ({rows[0]['nodes']} nodes)",
            color=style[0],
            marker=style[1],
        )
    axes.set_ylim(bottom=0)
    _batches(axes, record)
    _legend(axes)
    return Plot(
        "steps", "A flat line reads weights only; a rising one has begun to compute.", figure
    )


def _tuned(record: Record) -> Plot:
    last: dict[str, Json] = {str(row["label"]): row for row in record.rows}
    rows = sorted(last.values(), key=lambda row: row["speedup"]["value"] if row["speedup"] else 1.0)
    figure, axes = _figure("Candidates", "speed-up (plain = 1)", "")
    for place, row in enumerate(rows):
        gain = row["speedup"] or {"value": 1.0, "low": 1.0, "high": 1.0}
        colour = COLOURS[2] if row["kept"] else "#7F7F7F"
        axes.plot(gain["value"], place, marker="o", color=colour)
        axes.plot([gain["low"], gain["high"]], [place, place], color=colour, linewidth=2)
    axes.axvline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [str(row["label"]) for row in rows])
    axes.set_xlim(left=0)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    return Plot(
        "candidates",
        "Each where it was last measured, with its 95 % interval; the green one won the last round.",
        figure,
    )


# What they share.


def _figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _styles(entries: Sequence[Any]) -> list[tuple[tuple[str, str], Any]]:
    """Colour and marker of each; plain decoding is grey everywhere and takes no colour from the others."""
    found: list[tuple[tuple[str, str], Any]] = []
    place = 0
    for entry in entries:
        name = entry[0] if isinstance(entry, tuple) else entry.get("label")
        if name == PLAIN:
            found.append((("#7F7F7F", "o"), entry))
            continue
        found.append(((COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]), entry))
        place += 1
    return found


def _grouped(rows: Sequence[Json], key: str = "label") -> list[tuple[str, list[Json]]]:
    found: dict[str, list[Json]] = {}
    for row in rows:
        found.setdefault(str(row[key]), []).append(row)
    return list(found.items())


def _by_label(record: Record, drafting: bool = False) -> list[tuple[str, list[Json]]]:
    """Rows by variant, and one row per batch of each: plain decoding was measured beside every variant."""
    rows = [row for row in record.rows if not drafting or row.get("speedup")]
    single: dict[tuple[str, int], Json] = {}
    for row in rows:
        single.setdefault((str(row["label"]), int(row["requests"])), row)
    return [
        (label, sorted(own, key=lambda r: int(r["requests"])))
        for label, own in _grouped(list(single.values()))
    ]


def _line(
    axes: Axes,
    style: tuple[str, str],
    label: str,
    rows: Sequence[Json],
    value: Callable[[Json], Json],
) -> None:
    values = [value(row) for row in rows]
    errors = [_error(v) for v in values]
    axes.errorbar(
        [row["requests"] for row in rows],
        [v["median"] for v in values],
        yerr=[[e[0][0] for e in errors], [e[1][0] for e in errors]],
        label=label,
        color=style[0],
        marker=style[1],
        capsize=3,
    )


def _error(value: Json) -> list[list[float]]:
    return [
        [max(0.0, value["median"] - value["low"])],
        [max(0.0, value["high"] - value["median"])],
    ]


def _batches(axes: Axes, record: Record) -> None:
    sizes = sorted({int(row["requests"]) for row in record.rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if any(labels):
        axes.legend(handles, labels, frameon=False, fontsize=9)
