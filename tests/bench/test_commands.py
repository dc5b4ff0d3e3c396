"""The benchmark commands: options arrive, files are written, the JSON line comes last, errors are one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench_lab import PROMPTS, FakeServer, Script, TinyEngines
from bench_records import record
from typer.testing import CliRunner

from foretell.bench.costs import Costs, PromptCosts
from foretell.bench.machine import Busy, Watch, describe
from foretell.bench.record import Record, load
from foretell.bench.variants import Variant
from foretell.cli import app
from foretell.commands import bench, bench_options, tune
from foretell.configfile import read_config
from foretell.spec.costs import BUCKETS, StepCosts
from foretell.spec.tree import chain

FEW = ("--max-tokens", "6", "--ignore-eos", "--repeats", "1", "--num-prompts", "2")


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": p.id, "category": p.category, "turns": [p.text]} for p in PROMPTS]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return str(path)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> TinyEngines:
    """Tiny engines instead of what --model names; the machine is at rest."""
    made = TinyEngines()
    for module in (bench, tune):
        monkeypatch.setattr(module, "opener", lambda *_, **__: made)
    monkeypatch.setattr(bench_options, "look", lambda: Busy(0.0))
    monkeypatch.setattr(Watch, "stop", lambda self: Busy(0.0))
    return made


@pytest.fixture
def run(prompt_file: str) -> Callable[..., Any]:
    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments))

    return invoke


def last(result: Any) -> dict[str, Any]:
    """The record on the last line."""
    assert result.exit_code == 0, result.output + str(result.exception)
    found = json.loads(result.stdout.rstrip("\n").rpartition("\n")[2])
    assert isinstance(found, dict)
    return found


def test_throughput_shows_a_table_and_ends_with_the_record(
    run: Callable[..., Any], engines: TinyEngines, prompt_file: str, tmp_path: Path
) -> None:
    out = tmp_path / "r.json"
    result = run(
        *("bench", "throughput", "--speculate-model", "models/draft", "--spec-tokens", "3"),
        *("--prompts", prompt_file, "--out", str(out), *FEW),
    )
    found = last(result)
    assert found["kind"] == "throughput"
    assert found["rows"][0]["label"] == "plain"
    assert found["rows"][1]["same_text"] is True
    assert "tokens/s" in result.stdout
    assert load(out) == Record.read(found)
    assert found["settings"]["acceptance_valid"] is False  # --ignore-eos
    assert "acceptance says nothing" in found["warnings"][0]
    assert [v.k for v in engines.opened] == [None, 3]


def test_json_prints_the_record_alone(
    run: Callable[..., Any], engines: TinyEngines, prompt_file: str
) -> None:
    result = run("bench", "latency", "--prompts", prompt_file, "--json", *FEW)
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout)["kind"] == "latency"


def test_plots_and_a_page_are_written(
    run: Callable[..., Any], engines: TinyEngines, prompt_file: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    found = last(
        run(
            *("bench", "sweep", "--speculate-model", "models/draft", "--ks", "1,3"),
            *("--batches", "1,2", "--prompts", prompt_file, *FEW, "--no-adaptive"),
            *("--plots", str(tmp_path / "p"), "--report", str(tmp_path / "r.html")),
        )
    )
    assert {(r["k"], r["requests"]) for r in found["rows"] if r["speedup"]} == {
        (1, 1),
        (1, 2),
        (3, 1),
        (3, 2),
    }
    assert {p.name for p in (tmp_path / "p").iterdir()} == {
        f"{name}.{kind}"
        for name in ("speedup", "throughput", "acceptance")
        for kind in ("png", "svg")
    }
    assert (tmp_path / "r.html").read_text("utf-8").startswith("<!doctype html>")


def test_acceptance_is_shown_by_category(
    run: Callable[..., Any], engines: TinyEngines, prompt_file: str
) -> None:
    found = last(
        run(
            *("bench", "acceptance", "--speculate-model", "d", "--spec-tokens", "2"),
            *("--prompts", prompt_file, "--max-tokens", "6"),
        )
    )
    assert [row["category"] for row in found["rows"]] == ["animals", "cities", "all"]
    assert found["settings"]["acceptance_valid"] is True
    assert found["warnings"] == []


def test_a_busy_machine_voids_the_record_and_says_so_at_once(
    run: Callable[..., Any],
    engines: TinyEngines,
    prompt_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_options, "look", lambda: Busy(1.0))
    result = run("bench", "throughput", "--prompts", prompt_file, *FEW)
    found = last(result)
    assert Record.read(found).void
    assert "1.0 cores were kept busy by other processes before" in result.stderr
    quiet = run("bench", "acceptance", "--prompts", prompt_file, "--max-tokens", "4")
    assert not Record.read(last(quiet)).void  # nothing was timed


def test_tune_writes_a_config_of_what_was_fastest(
    run: Callable[..., Any], engines: TinyEngines, prompt_file: str, tmp_path: Path
) -> None:
    config = tmp_path / "tuned.yaml"
    found = last(
        run(
            *("tune", "--speculate-model", "models/draft", "--ks", "1,3", "--dtype", "float32"),
            *("--prompts", prompt_file, "--batch", "2", "--write", str(config), *FEW),
        )
    )
    assert found["kind"] == "tune"
    written = read_config(str(config))
    assert written["dtype"] == "float32"
    best = found["extra"]["best"]
    assert written.get("speculative_config") == best
    assert found["extra"]["verdict"] in config.read_text("utf-8").replace("\n# ", " ")


# Serving.


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    real = httpx.AsyncClient

    def client(**options: Any) -> httpx.AsyncClient:
        options.pop("limits")
        return real(**options, transport=fake)

    monkeypatch.setattr(httpx, "AsyncClient", client)
    return fake


def test_serve_puts_every_load_on_the_server(
    run: Callable[..., Any], server: FakeServer, prompt_file: str
) -> None:
    found = last(
        run(
            *("bench", "serve", "--url", "http://server/v1", "--rate", "500,inf", "--users", "2"),
            *("--requests", "5", "--prompts", prompt_file, "--max-tokens", "9", "-t", "0.5"),
            *("--api-key", "secret", "--ttft-limit", "100000"),
        )
    )
    assert [row["rate"] for row in found["rows"]] == [500, None]
    assert [row["users"] for row in found["rows"]] == [2, 2]
    assert [row["requests"] for row in found["rows"]] == [5, 5]
    assert found["rows"][0]["goodput"] is not None
    assert found["settings"]["model"] == "tiny"
    path, body = server.asked[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 9, 0.5)
    assert "top_k" not in body  # extensions only if they were asked for
    assert server.headers[-1]["authorization"] == "Bearer secret"
    assert len(server.asked) == 2 * (2 + 5)
    # Every load begins where the last one ended, so that no cache of prompts favours the later one.
    texts = [body["messages"][0]["content"] for _, body in server.asked]  # type: ignore[index]
    assert texts[:2] + texts[7:9] == [PROMPTS[i].text for i in (0, 1, 3, 0)]
    assert any("14 requests are made of 4 prompts" in warning for warning in found["warnings"])
    assert not any("void" in warning for warning in found["warnings"])


def test_a_closed_loop_takes_several_numbers_of_users(
    run: Callable[..., Any], server: FakeServer, prompt_file: str
) -> None:
    found = last(
        run("bench", "serve", "--users", "1,3", "--requests", "6", "--prompts", prompt_file)
    )
    assert [(r["rate"], r["users"]) for r in found["rows"]] == [(None, 1), (None, 3)]
    result = run("bench", "serve", "--rate", "1", "--users", "1,3", "--prompts", prompt_file)
    assert result.exit_code == 2
    assert "it is one cap" in result.stderr


def test_a_server_that_fails_everything_is_a_failure(
    run: Callable[..., Any], server: FakeServer, prompt_file: str
) -> None:
    server.script = lambda _: Script(status=500, error="no")
    result = run("bench", "serve", "--users", "1", "--requests", "2", "--prompts", prompt_file)
    assert result.exit_code == 1
    assert "HTTP 500: no" in result.stdout


def test_a_server_that_is_not_there_is_one_line(run: Callable[..., Any], prompt_file: str) -> None:
    result = run("bench", "serve", "--url", "http://127.0.0.1:1", "--prompts", prompt_file)
    assert result.exit_code == 2
    assert "offers no model at /v1/models" in result.stderr
    assert "Traceback" not in result.stderr


# Simulation.


def test_steps_are_measured_and_simulated(
    run: Callable[..., Any], engines: TinyEngines, prompt_file: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "steps.json")
    found = last(
        run(
            *("bench", "steps", "--speculate-model", "d", "--spec-tokens", "3", "--out", out),
            *("--prompts", prompt_file, "--batches", "1,2", "--max-tokens", "50"),
        )
    )
    assert {(r["requests"], r["nodes"]) for r in found["rows"]} >= {(1, 1), (1, 4), (2, 1), (2, 4)}
    predicted = last(
        run(
            *("bench", "simulate", "--costs", out, "--rate", "3", "--requests", "20"),
            *("--lengths", "16:16", "--accepted", "2.0"),
        )
    )
    assert predicted["rows"][0]["requests"] == 20


@pytest.fixture
def costs_file(tmp_path: Path) -> str:
    steps = StepCosts((chain(0), chain(3)))
    for rows in BUCKETS:
        steps.add(rows, 0, 0.010 + rows * 1e-5)
        steps.add(rows, 1, 0.012 + rows * 5e-5)
    costs = Costs(steps, PromptCosts(0.001, 2e-5))
    path = tmp_path / "costs.json"
    Record.made("steps", describe("cpu"), {"model": "m"}, [], extra=costs.as_json()).save(path)
    return str(path)


@pytest.mark.parametrize("name", ["simulate", "--simulate"])
def test_simulate_predicts_loads_and_counts_gpus(
    run: Callable[..., Any], costs_file: str, name: str
) -> None:
    found = last(
        run(
            *("bench", name, "--costs", costs_file, "--rate", "2,200", "--replicas", "1,4"),
            *("--requests", "120", "--lengths", "32:16", "--accepted", "2.5"),
            *("--max-num-seqs", "16", "--ttft-limit", "200"),
        )
    )
    assert [(r["replicas"], r["rate"]) for r in found["rows"]] == [
        (1, 2),
        (1, 200),
        (4, 2),
        (4, 200),
    ]
    most = found["extra"]["capacity_per_replica"]
    assert most > 2
    assert found["extra"]["gpus_needed"]["2"] == 1
    assert found["extra"]["gpus_needed"]["200"] == -(-200 // most)


def test_lengths_and_acceptance_come_from_result_files(
    run: Callable[..., Any], costs_file: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    record("throughput").save(path)
    found = last(
        run(
            *("bench", "simulate", "--costs", costs_file, "--rate", "1", "--requests", "5"),
            *("--lengths", str(path), "--accepted", str(path)),
        )
    )
    assert found["settings"]["accepted"] == pytest.approx([0.7] * 5, abs=1e-3)
    assert found["rows"][0]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--costs", "none.json"), "no result file none.json"),
        (("--rate", "fast"), "--rate must be numbers above 0"),
        (("--replicas", "0"), "--replicas must be whole numbers above 0"),
        (("--lengths", "5"), "neither a file nor pairs"),
        (("--accepted", "lots"), "neither a file nor a number"),
        (("--accepted", "9"), "cannot have a mean length of 9"),
        (("--router", "fair"), "--router must be one of least, turn, random"),
        (("--tree", "7"), "the costs know trees 0 to 1"),
        (("--ttft-limit", "5", "--requests", "9"), "too few to see a queue grow"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    run: Callable[..., Any], costs_file: str, arguments: tuple[str, ...], message: str
) -> None:
    rest = () if arguments[0] == "--costs" else ("--costs", costs_file)
    result = run("bench", "simulate", *rest, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


# Files.


def test_compare_says_what_differs(run: Callable[..., Any], tmp_path: Path) -> None:
    record("sweep").save(tmp_path / "a.json")
    record("sweep", when="2026-12-02").save(tmp_path / "b.json")
    found = last(run("bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")))
    assert {c["verdict"] for c in found["changes"]} == {"same"}
    result = run("bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "none.json"))
    assert result.exit_code == 2
    assert "there is no result file" in result.stderr


def test_report_joins_files_in_a_page(run: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for kind in ("sweep", "serve"):
        record(kind).save(tmp_path / f"{kind}.json")
    page = tmp_path / "all.html"
    found = last(
        run(
            *("bench", "report", str(tmp_path / "sweep.json"), str(tmp_path / "serve.json")),
            *("--out", str(page)),
        )
    )
    assert found == {"report": str(page), "records": 2}
    assert page.read_text("utf-8").count("<h2>") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("throughput", "--prompts", "nowhere"), "neither a file nor a built-in set"),
        (("throughput", "--repeats", "0"), "repeats must be at least 1"),
        (("throughput", "--batch", "0"), "batch must be at least 1"),
        (("sweep", "--batches", "1,x"), "--batches must be whole numbers above 0"),
        (("sweep", "--ks", "0"), "--ks must be whole numbers above 0"),
        (("sweep", "--tree", "[[0"), "is not JSON"),
    ],
)
def test_wrong_input_is_one_line(
    run: Callable[..., Any], engines: TinyEngines, arguments: tuple[str, ...], message: str
) -> None:
    result = run("bench", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert engines.opened == []


def test_without_httpx_the_error_says_what_to_install(
    run: Callable[..., Any], prompt_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    result = run("bench", "serve", "--prompts", prompt_file)
    assert result.exit_code == 1
    assert "pip install 'foretell[bench]'" in result.stderr


def test_the_drafter_asked_for_is_the_one_measured() -> None:
    """Where none is: what comes with the default model, and n-gram for any other."""
    from foretell.model.hub import DEFAULT_DRAFTER, HEADS
    from foretell.options import EngineOptions

    asked = bench_options.asked_variant
    assert asked(EngineOptions(model="models/m")).drafter == "ngram"
    shipped = DEFAULT_DRAFTER if (HEADS / DEFAULT_DRAFTER).is_dir() else "ngram"
    assert asked(EngineOptions()).drafter == shipped
    given: Variant = asked(EngineOptions(speculate_model="models/d", num_speculative_tokens=4))
    assert (given.drafter, given.k) == ("models/d", 4)
    assert (
        asked(EngineOptions(speculate_model="ngram", num_speculative_tokens=2)).drafter == "ngram"
    )
    config = '{"method": "eagle", "model": "e", "tree": [[0], [1]]}'
    given = asked(EngineOptions(speculative_config=config))
    assert (given.drafter, given.tree) == ("e", "[[0], [1]]")
