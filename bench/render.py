"""docs/benchmarks.md and the tables of docs/scaling.md, from bench/results/*.json. Nothing in them is typed.

    python bench/render.py [--check]

Records of `foretell bench` are shown as that command shows them; older formats of the scripts in this folder have a
reader here. `--check` writes nothing and fails where a document is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.bench.grids import Grid, grids, markdown, number, say
from foretell.bench.machine import Busy
from foretell.bench.record import Record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
SCALING = ROOT / "docs" / "scaling.md"
INTRODUCTION = """# Benchmarks

Made by `python bench/render.py` from the files in [bench/results](../bench/results), newest first; nothing here is
typed. What each figure means is in [metrics](metrics.md). Speed-ups are against plain decoding of the same build in the
same run, never against another engine. Run your own with `foretell bench`; two result files are compared with
`foretell bench compare`.
"""
Json = Mapping[str, Any]


def benchmarks(results: Path = RESULTS) -> str:
    """The whole of docs/benchmarks.md."""
    files = sorted(results.glob("*.json"), key=lambda path: path.name, reverse=True)
    sections = [section(path) for path in files]
    return "\n".join([INTRODUCTION, *sections])


def section(path: Path) -> str:
    """One result file."""
    data = json.loads(path.read_text("utf-8"))
    lines = [f"## {path.stem}", ""]
    for paragraph in introduction(data):
        lines += [paragraph, ""]
    for grid in tables(data):
        if grid.title:
            lines += [f"**{grid.title}**", ""]
        lines += [markdown(grid), ""]
        if grid.note:
            lines += [grid.note, ""]
    lines += [f"File: [{path.name}](../bench/results/{path.name})", ""]
    return "\n".join(lines)


def introduction(data: Any) -> list[str]:
    """What ran on what, in one paragraph."""
    if not isinstance(data, Mapping):
        return []
    if "foretell_bench" in data:
        record = Record.read(data)
        machine = record.machine
        where = [str(machine.get("device")), f"torch {machine.get('torch')}"]
        if machine.get("commit"):
            where.append(f"commit {machine['commit']}")
        found = [f"{record.when[:10]}, {', '.join(where)}."]
        return found + [f"**Warning: {warning}**" for warning in record.warnings]
    machine, settings = data.get("machine"), data.get("settings")
    if isinstance(machine, Mapping) and isinstance(settings, Mapping):
        told = {k: v for k, v in settings.items() if v not in (None, "", False)}
        found = [
            f"{machine.get('device')}, torch {machine.get('torch')}, commit {machine.get('commit')}."
        ]
        found.append(", ".join(f"{k.replace('_', ' ')} {say(v)}" for k, v in told.items()) + ".")
        busy = float(data.get("busy_cores") or 0.0)
        return found + (
            [f"**Warning: {Busy(busy).warning('during')}**"] if Busy(busy).voids else []
        )
    words = {k: v for k, v in data.items() if isinstance(v, str | int | float | bool)}
    if "copy_bandwidth" in words:
        words["copy_bandwidth"] = f"{words['copy_bandwidth'] / 1e12:.2f} TB/s"
    return [
        ", ".join(f"{key.replace('_', ' ')} {say(value)}" for key, value in words.items()) + "."
    ]


def tables(data: Any) -> list[Grid]:
    """The tables of a result, whichever script wrote it."""
    if isinstance(data, Mapping) and "foretell_bench" in data:
        return grids(Record.read(data))
    if isinstance(data, Mapping) and "shape" in data and "rows" in data:
        return [gpu_grid(data)]
    if isinstance(data, Mapping) and isinstance(data.get("rows"), list) and data["rows"]:
        return [any_rows("", data["rows"])]
    if isinstance(data, Mapping):
        parts = {k: v for k, v in data.items() if isinstance(v, Mapping)}
        return [part_grid(name, part) for name, part in parts.items()]
    return [any_rows("", data)] if isinstance(data, list) and data else []


def gpu_grid(data: Json) -> Grid:
    """A result of bench/gpu.py: whole requests of a dummy model, acceptance forced."""
    plain = {r["requests"]: r for r in data["rows"] if r["k"] == 0 and "error" not in r}
    rows = []
    for row in data["rows"]:
        name = f"EAGLE-3 k={row['k']}, forced" if row["k"] else "plain"
        if "error" in row:
            rows.append((name, str(row["requests"]), "failed", "", "", ""))
            continue
        base = plain.get(row["requests"])
        gain = None if base is None or not row["k"] else row["tokens_per_s"] / base["tokens_per_s"]
        spread = max(row["seconds"]) / min(row["seconds"]) - 1
        rows.append(
            (
                name,
                str(row["requests"]),
                number(row["tokens_per_s"]),
                "–" if gain is None else f"{gain:.2f}x",
                number(row["ms_per_step"], 2),
                f"{100 * spread:.1f} %",
            )
        )
    columns = ("drafts", "at once", "tokens/s", "speed-up", "ms/step", "spread")
    note = (
        "Dummy weights, random prompts, acceptance forced to a mean of 4 tokens a step: what a step costs, and nothing "
        "about a drafter. Whole requests, prompts included."
    )
    return Grid("", columns, tuple(rows), note)


def part_grid(name: str, part: Json) -> Grid:
    """One part of a result of bench/cpu.py: names and values."""
    nested = {k: v for k, v in part.items() if isinstance(v, Mapping)}
    if nested:
        keys = list(dict.fromkeys(key for entry in nested.values() for key in entry))
        rows = tuple(
            (kind, *(say(entry.get(key, "–")) for key in keys)) for kind, entry in nested.items()
        )
        return Grid(name, ("", *(key.replace("_", " ") for key in keys)), rows)
    rows = tuple((key.replace("_", " "), say(value)) for key, value in part.items())
    return Grid(name, ("figure", "value"), rows)


def any_rows(title: str, rows: Sequence[Json]) -> Grid:
    """Rows of a format without a reader of its own: every plain value, lists by their median."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    shown = [k for k in keys if any(_cell(row.get(k)) is not None for row in rows)]
    cells = tuple(tuple(_cell(row.get(k)) or "–" for k in shown) for row in rows)
    return Grid(title, tuple(key.replace("_", " ") for key in shown), cells)


def _cell(value: Any) -> str | None:
    if isinstance(value, bool | str):
        return say(value)
    if isinstance(value, int | float):
        return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, Mapping) and all(isinstance(v, int | float) for v in value.values()):
        return ", ".join(f"{key}: {v:,.4g}" for key, v in value.items()) or None
    if isinstance(value, list) and value and all(isinstance(v, int | float) for v in value):
        return f"{statistics.median(value):,.4g}"
    return None


# docs/scaling.md: prose with generated tables between markers.


def scaling(text: str, results: Path = RESULTS) -> str:
    """The page with its tables made anew from the simulated record it names.

    Raises:
        ValueError: a marker has no end, or names a table that does not exist.
    """
    for name, make in SCALING_TABLES.items():
        start, end = f"<!-- {name}:", f"<!-- end {name} -->"
        if start not in text:
            continue
        head, _, rest = text.partition(start)
        file, _, rest = rest.partition("-->")
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"docs/scaling.md: {start} has no {end}")
        record = json.loads((results / file.strip()).read_text("utf-8"))
        text = f"{head}{start}{file}-->\n{make(record)}\n{end}{tail}"
    return text


def costs_table(record: Json) -> str:
    """Step costs by batch."""
    costs = record["extra"]["costs"]
    nodes = [len(tree["parents"]) for tree in costs["trees"]]
    sizes = sorted({cell["rows"] for cell in costs["cells"]})
    seconds = {(cell["rows"], cell["tree"]): cell["seconds"] for cell in costs["cells"]}
    rows = tuple(
        (str(n), *(number(1e3 * seconds[n, tree], 2) for tree in range(len(nodes)))) for n in sizes
    )
    names = tuple("plain, ms" if n == 1 else f"chain of {n - 1}, ms" for n in nodes)
    token = 1e6 * record["extra"]["prompt_token_s"]
    return markdown(Grid("", ("at once", *names), rows)) + f"\n\nPrompts: {token:.0f} us a token."


def checks_table(record: Json) -> str:
    """Batches predicted without having been fitted."""
    rows = tuple(
        (
            "plain" if c["k"] == 0 else f"EAGLE-3 k={c['k']}",
            str(c["requests"]),
            number(c["measured"], 0),
            number(c["predicted"], 0),
            f"{100 * (c['predicted'] / c['measured'] - 1):+.1f} %",
        )
        for c in record["extra"]["checks"]
    )
    columns = ("drafts", "at once", "measured tokens/s", "predicted tokens/s", "error")
    return markdown(Grid("", columns, rows))


def capacity_table(record: Json) -> str:
    """Requests a second of one GPU."""
    found = record["extra"]["capacities"]
    limits = list(dict.fromkeys(c["limits"] for c in found))
    labels = list(dict.fromkeys(c["label"] for c in found))
    per = {(c["label"], c["limits"]): c["per_gpu"] for c in found}
    rows = tuple((label, *(number(per[label, limit], 1) for limit in limits)) for label in labels)
    return markdown(Grid("", ("requests/s of one GPU", *limits), rows))


def gpus_table(record: Json) -> str:
    """GPUs for a load."""
    found = record["extra"]["capacities"]
    loads = list(found[0]["gpus"])
    rows = tuple(
        (
            f"{c['limits'].partition(':')[0]}, {c['label']}",
            *("–" if c["gpus"][n] is None else f"{c['gpus'][n]:,}" for n in loads),
        )
        for c in found
    )
    columns = ("GPUs for", *(f"{int(load):,} requests/s" for load in loads))
    return markdown(Grid("", columns, rows))


def loads_table(record: Json) -> str:
    """The simulated loads themselves."""
    grid = grids(Record.read(record))[0]
    return markdown(grid)


SCALING_TABLES = {
    "costs": costs_table,
    "checks": checks_table,
    "capacity": capacity_table,
    "gpus": gpus_table,
    "loads": loads_table,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    wanted = {BENCHMARKS: benchmarks(), SCALING: scaling(SCALING.read_text("utf-8"))}
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text("utf-8") != text]
    for path in stale:
        if check:
            name = path.relative_to(ROOT)
            print(
                f"{name} is not what bench/results says; run python bench/render.py",
                file=sys.stderr,
            )
        else:
            path.write_text(wanted[path], "utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
