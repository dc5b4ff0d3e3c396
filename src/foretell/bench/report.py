"""A report: records as one HTML file that needs nothing else, tables and drawings in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from foretell.bench.grids import conditions, grids, heading, html
from foretell.bench.plots import Plot, plots
from foretell.bench.record import Record

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid #ddd;
  padding-top: 1rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e5e5e5; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #999; }
tbody tr:hover { background: #f6f8fa; }
.scroll { overflow-x: auto; } .note, figcaption { color: #555; font-size: .85rem; margin: .3rem 0; }
.warning { background: #fff4e5; border-left: 4px solid #d55e00; padding: .5rem .8rem; margin: .6rem 0; }
figure { margin: 1rem 0; } figure svg { width: 100%; max-width: 46rem; height: auto; }
details { margin: .8rem 0; } details td { text-align: left; white-space: normal; }
"""


def report(records: Sequence[Record], title: str = "foretell bench") -> str:
    """The page.

    Raises:
        ImportError: matplotlib is missing.
    """
    body = "".join(_section(record, place) for place, record in enumerate(records))
    when = records[0].when[:10] if records else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
        f"<p class=note>{escape(when)}. Every figure is defined in docs/metrics.md of foretell.</p>{body}</html>\n"
    )


def save_report(records: Sequence[Record], path: Path, title: str = "foretell bench") -> None:
    """Write the page, with its folder."""
    text = report(records, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _section(record: Record, place: int) -> str:
    warnings = "".join(f"<p class=warning>{escape(w)}</p>" for w in record.warnings)
    title = heading(record)
    tables = "".join(html(grid, titled=grid.title != title) for grid in grids(record))
    drawings = "".join(_drawing(plot, place) for plot in plots(record))
    return f"<h2>{escape(title)}</h2>{warnings}{tables}{drawings}{_conditions(record)}"


def _drawing(plot: Plot, place: int) -> str:
    # Two records may have a figure of the same name: ids within a page must differ.
    own = Plot(f"{plot.name}-{place}", plot.caption, plot.figure)
    return f"<figure>{own.svg()}<figcaption>{escape(plot.caption)}</figcaption></figure>"


def _conditions(record: Record) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in conditions(record)
    )
    return f"<details><summary>How it was measured</summary><table>{rows}</table></details>"
