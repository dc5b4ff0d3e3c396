"""Records on a terminal: tables by rich, warnings, and one line of JSON last."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from foretell.bench.grids import Grid, grids
from foretell.bench.record import Record

WIDTH = 200  # where there is no terminal to say it


def console() -> Console:
    """On stdout; wide where a pipe or a file reads it, so that no table is cut."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=WIDTH)


def show(console: Console, record: Record) -> None:
    """All tables of a record, then its warnings."""
    for grid in grids(record):
        console.print(table(grid))
        if grid.note:
            console.print(Text(grid.note, style="dim"))
    warn(console, record)


def warn(console: Console, record: Record) -> None:
    """What a reader must know."""
    for warning in record.warnings:
        console.print(Text(f"warning: {warning}", style="bold yellow"))


def table(grid: Grid) -> Table:
    """A grid as rich draws it."""
    drawn = Table(title=Text(grid.title), title_justify="left")
    for place, column in enumerate(grid.columns):
        drawn.add_column(Text(column), justify="right" if place else "left")
    for row in grid.rows:
        drawn.add_row(*map(Text, row))
    return drawn
