"""Records and what is made of them: files, tables, drawings, pages, comparisons."""

from __future__ import annotations

import builtins
import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from bench_records import ALL, MACHINE, offline_row, record
from rich.console import Console

from foretell.bench.compare import compare, grid
from foretell.bench.grids import Grid, grids, html, markdown
from foretell.bench.machine import Busy, Machine, commit_of, describe
from foretell.bench.plots import need_matplotlib, plots
from foretell.bench.record import Record, load, plain
from foretell.bench.report import report, save_report
from foretell.bench.terminal import show

DRAWN = {
    "throughput": {"throughput", "acceptance", "course"},
    "latency": {"throughput", "acceptance"},
    "sweep": {"speedup", "throughput", "acceptance", "cost_model"},
    "acceptance": {"acceptance"},
    "serve": {"acceptance", "ttft", "tpot"},
    "steps": {"steps"},
    "simulate": {"ttft", "tpot"},
    "tune": {"candidates"},
}


@dataclass(frozen=True)
class Inner:
    values: tuple[float, ...]


# Files.


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    made = Record.made(
        "throughput", Machine(**MACHINE), {"k": 5}, [Inner((1 / 3, float("inf")))], ["a", "a"]
    )
    made.save(tmp_path / "deep" / "r.json")
    again = load(tmp_path / "deep" / "r.json")
    assert again == made
    assert again.rows == [{"values": [0.333333, None]}]
    assert again.warnings == ["a"]
    assert json.loads(made.line()) == made.as_json()
    assert "\n" not in made.line()


def test_a_record_names_what_a_reader_needs_to_repeat_it() -> None:
    machine = plain(describe("cpu"))
    assert {"commit", "device", "torch", "python", "threads", "foretell"} <= set(machine)
    assert machine["accelerator"] == "cpu"


def test_a_void_record_says_so() -> None:
    assert not record("sweep").void
    busy = record("sweep", warnings=[Busy(1.2).warning("during")])
    assert busy.void
    assert "1.2 cores were kept busy" in busy.warnings[0]
    assert all("VOID" in grid.note for grid in grids(busy)[:1])
    assert Busy(0.6).voids
    assert not Busy(0.2).voids


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("{}", "is not a record"), ('{"foretell_bench": 99}', "has format 99")],
)
def test_a_file_that_is_no_record_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)
    with pytest.raises(ValueError, match="there is no result file"):
        load(tmp_path / "none.json")


def test_a_folder_outside_of_a_repository_has_no_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None


# Tables.


@pytest.mark.parametrize("kind", ALL)
def test_every_kind_has_a_table_with_all_its_rows(kind: str) -> None:
    made = record(kind)
    first = grids(made)[0]
    assert len(first.rows) == len(made.rows)
    assert all(len(row) == len(first.columns) for row in first.rows)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(console, made)
    shown = console.export_text()
    assert all(row[0] in shown for row in first.rows)


def test_a_table_as_markdown_has_a_line_a_row_and_escapes_bars() -> None:
    lines = markdown(Grid("t", ("a", "b"), (("x|y", "1"), ("z", "2")))).splitlines()
    assert lines == ["| a | b |", "|---|--:|", "| x\\|y | 1 |", "| z | 2 |"]


def test_a_table_as_html_escapes_what_it_holds() -> None:
    made = html(Grid("<t>", ("a",), (("<script>",),), note="a & b"))
    assert "<script>" not in made
    assert "&lt;script&gt;" in made
    assert "a &amp; b" in made


# Drawings.


@pytest.mark.parametrize("kind", ALL)
def test_every_kind_is_drawn_and_saved(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = plots(record(kind))
    assert {plot.name for plot in made} == DRAWN[kind]
    for plot in made:
        assert plot.caption.endswith((".", ";")) or plot.caption
        png, svg = plot.save(tmp_path), plot.save(tmp_path, "svg")
        assert png.read_bytes().startswith(b"\x89PNG")
        assert svg.read_text("utf-8").startswith("<svg")


def test_a_drawing_is_the_same_every_time() -> None:
    pytest.importorskip("matplotlib")
    first, second = (plots(record("sweep"))[0].svg() for _ in range(2))
    assert first == second


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install 'foretell\[bench\]'"):
        need_matplotlib()


# Pages.


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.outside.append(value)


def test_a_page_holds_all_records_and_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "pages" / "r.html"
    save_report([record(kind) for kind in ALL], path, "All <kinds>")
    page = Page()
    text = path.read_text("utf-8")
    page.feed(text)
    assert page.outside == []
    assert "url(http" not in text
    assert page.tags.count("h2") == len(ALL)
    assert page.tags.count("svg") == sum(map(len, DRAWN.values()))
    assert page.tags.count("details") == len(ALL)
    assert len(page.ids) == len(set(page.ids)), "two drawings share an id"
    assert "All &lt;kinds&gt;" in text


def test_a_page_shows_warnings() -> None:
    pytest.importorskip("matplotlib")
    assert "class=warning" in report([record("latency", warnings=["1 core busy: void"])])
    assert "class=warning>" not in report([record("latency")])


# Comparisons.


def test_what_lies_within_the_spread_is_the_same() -> None:
    before = record("throughput")
    rows = [offline_row("plain", 8, 1520, None), offline_row("eagle k=5", 8, 5000, 3.3)]
    found = compare(before, record("throughput", rows=rows))
    verdicts = {(c.row, c.figure): c.verdict for c in found.changes}
    assert verdicts["plain, requests 8", "tokens/s"] == "same"
    assert verdicts["eagle k=5, requests 8", "tokens/s"] == "better"
    assert verdicts["eagle k=5, requests 8", "seconds"] == "better"  # fewer of them
    assert verdicts["eagle k=5, requests 8", "speed-up"] == "better"
    worse = compare(record("throughput", rows=rows), before)
    assert {c.verdict for c in worse.changes if c.figure == "speed-up"} == {"worse"}
    assert len(grid(found).rows) == len(found.changes)


def test_conditions_that_differ_and_rows_without_a_partner_are_told() -> None:
    other = record(
        "throughput",
        rows=[offline_row("plain", 8, 1500, None), offline_row("ngram k=3", 8, 2000, 1.3)],
        machine={**MACHINE, "commit": "ffff"},
    )
    found = compare(record("throughput"), other)
    assert found.differ == ("machine commit: 0123456789ab -> ffff",)
    assert found.only_before == ("eagle k=5, requests 8",)
    assert found.only_after == ("ngram k=3, requests 8",)
    assert json.dumps(found.as_json())


def test_records_of_two_kinds_are_not_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(record("sweep"), record("serve"))


@pytest.mark.parametrize("kind", ALL)
def test_a_record_is_the_same_as_itself(kind: str) -> None:
    found = compare(record(kind), record(kind))
    assert found.changes
    assert {c.verdict for c in found.changes} == {"same"}
    assert not re.search(r"[^-]1\d\d %", markdown(grid(found)))
