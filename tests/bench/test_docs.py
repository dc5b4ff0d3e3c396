"""Pages that are made from results are what the results say, and every figure that is printed is defined."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench_records import ALL, record

from foretell.bench.grids import grids

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def script(name: str) -> ModuleType:
    """A script of bench/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


render = script("render")


def test_the_benchmarks_page_is_what_the_results_say() -> None:
    assert render.BENCHMARKS.read_text("utf-8") == render.benchmarks(), "run python bench/render.py"


def test_the_tables_of_the_scaling_page_are_what_the_simulation_said() -> None:
    text = render.SCALING.read_text("utf-8")
    assert render.scaling(text) == text, "run python bench/render.py"
    for name in render.SCALING_TABLES:
        assert f"<!-- {name}:" in text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_has_a_section_with_a_table(path: Path) -> None:
    section = render.section(path)
    assert section.startswith(f"## {path.stem}\n")
    assert "|--:|" in section
    assert f"(../bench/results/{path.name})" in section


@pytest.mark.parametrize("kind", ALL)
def test_records_of_every_kind_can_be_results(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"2026-12-01-{kind}.json"
    record(kind, warnings=["one core busy: void"]).save(path)
    section = render.section(path)
    assert "Test GPU" in section
    assert "**Warning: one core busy: void**" in section
    assert section.count("\n|---") == len(grids(record(kind)))


@pytest.mark.parametrize(
    "data",
    [
        {"torch": "2", "rows": [{"name": "a", "us": [1.0, 3.0, 2.0], "share": 0.5}]},
        {"torch": "2", "plain": {"tokens_per_s": 3.0}, "ngram": {"a": {"x": 1}, "b": {"x": 2}}},
        [{"name": "a", "us": 1.5}],
    ],
)
def test_other_formats_are_shown_too(data: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(data))
    assert "|--:|" in render.section(path)


def test_a_result_with_a_machine_and_settings_names_them_and_its_busy_cores(tmp_path: Path) -> None:
    data = {
        "settings": {"k": 8, "rate": [0.0, 0.9], "out": None},
        "machine": {"device": "Test CPU", "torch": "2.13", "commit": "abc"},
        "rows": [{"batch": 1, "fixed": {"1": 20.5, "8": 31.25}, "of_best": 0.99}],
        "busy_cores": 1.0,
    }
    path = tmp_path / "2026-12-01-never-slower.json"
    path.write_text(json.dumps(data))
    section = render.section(path)
    assert "Test CPU, torch 2.13, commit abc." in section
    assert "k 8, rate 0, 0.9." in section
    assert "1: 20.5, 8: 31.25" in section
    assert "**Warning: 1.0 cores were kept busy" in section


def test_newer_results_come_first(tmp_path: Path) -> None:
    for day in ("2026-12-01", "2026-12-03", "2026-12-02"):
        record("latency").save(tmp_path / f"{day}-x.json")
    found = re.findall(r"^## (\S+)", render.benchmarks(tmp_path), re.MULTILINE)
    assert found == ["2026-12-03-x", "2026-12-02-x", "2026-12-01-x"]


def test_every_column_of_every_table_is_defined_in_the_metrics_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8").lower()
    words = {
        word
        for kind in ALL
        for grid in grids(record(kind))
        for column in grid.columns[1:]
        for word in re.findall(r"[A-Za-z/-]{3,}", column)
    }
    words -= {"once", "request", "drafts", "prompts", "round", "kept", "done", "failed", "nodes"}
    words -= {"replicas", "GPUs", "load", "preempted", "good/s", "ms/step"}  # plain words
    missing = sorted(word for word in words if word.lower() not in page)
    assert missing == []


# The simulation against recorded runs.


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return script("scaling")


def test_recorded_batches_that_were_left_out_are_predicted_within_10_percent(
    scaling: ModuleType,
) -> None:
    result = json.loads(scaling.RESULT.read_text("utf-8"))
    cells = scaling.cells_of(result)
    prompts = scaling.prompt_costs(cells, result["copy_bandwidth"])
    found = scaling.checks(cells, prompts, max(cell.k for cell in cells))
    assert {(c["k"], c["requests"]) for c in found} == {(0, 8), (5, 8), (0, 32), (5, 32)}
    assert all(abs(c["predicted"] / c["measured"] - 1) < 0.10 for c in found), found


def test_fitted_costs_give_back_the_recorded_batches(scaling: ModuleType) -> None:
    result = json.loads(scaling.RESULT.read_text("utf-8"))
    cells = [cell for cell in scaling.cells_of(result) if cell.requests <= 8]
    prompts = scaling.PromptCosts(0.0, 3e-5)
    costs = scaling.fitted(cells, prompts, 5, "")
    for cell in cells:
        assert scaling.simulated(costs, cell) == pytest.approx(cell.seconds, rel=0.01)


def test_prompts_that_were_timed_apart_are_taken_as_measured(scaling: ModuleType) -> None:
    cells = [scaling.Cell(0, 1, 1.0, 0.01), scaling.Cell(0, 8, 1.2, 0.06)]
    found = scaling.prompt_costs(cells, 4e12)
    assert found.token == pytest.approx(0.06 / (8 * 256))
    assert len(found.points) == 2
    bound = scaling.prompt_costs(
        [scaling.Cell(0, 1, 1.0, None), scaling.Cell(0, 9, 1.8, None)], 4e12
    )
    assert bound.points == ()
    assert 0 < bound.token < 0.1 / 256
