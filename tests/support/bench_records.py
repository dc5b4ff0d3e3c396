"""Records of every kind with invented figures, to be shown, drawn, compared and read back."""

from __future__ import annotations

from typing import Any

from foretell.bench.record import FORMAT, KINDS, Record

MACHINE = {
    "commit": "0123456789ab",
    "device": "Test GPU",
    "accelerator": "cuda",
    "cpu": "Test CPU",
    "cores": 8,
    "threads": 8,
    "python": "3.11.7",
    "torch": "2.13.0",
    "foretell": "0.1.0",
    "system": "Linux",
}


def spread(middle: float, by: float = 0.03) -> dict[str, Any]:
    values = [middle * (1 - by), middle, middle * (1 + by)]
    return {"median": values[1], "low": values[0], "high": values[2], "values": values}


def distribution(middle: float, count: int = 32) -> dict[str, Any]:
    percentiles = {"p50": middle, "p90": 1.5 * middle, "p95": 1.7 * middle, "p99": 2.4 * middle}
    return {"count": count, "mean": 1.1 * middle, "std": 0.3 * middle, "percentiles": percentiles}


def accepted(rate: float, depth: int = 5) -> dict[str, Any]:
    shares = [rate ** (i + 1) for i in range(depth)]
    return {
        "drafts": 1000,
        "drafted": 1000 * depth,
        "accepted": round(1000 * sum(shares)),
        "length": 1 + sum(shares),
        "rate": sum(shares) / depth,
        "per_position": shares,
        "conditional": [rate] * depth,
    }


def offline_row(label: str, requests: int, speed: float, gain: float | None) -> dict[str, Any]:
    plain = gain is None
    return {
        "label": label,
        "drafter": "none" if plain else "eagle",
        "k": None if plain else 5,
        "tree": "chain",
        "adaptive": False,
        "requests": requests,
        "prompts": 32,
        "prompt_tokens": 2048,
        "output_tokens": 4096,
        "seconds": spread(4096 / speed),
        "tokens_per_s": spread(speed),
        "total_tokens_per_s": spread(1.5 * speed),
        "requests_per_s": spread(speed / 128),
        "ttft_ms": distribution(20 + requests),
        "tpot_ms": distribution(1e3 * requests / speed),
        "itl_ms": distribution(1e3 * requests / speed),
        "acceptance": None if plain else accepted(0.7),
        "tokens_per_step": 1.0 if plain else 3.1,
        "speedup": None if gain is None else spread(gain),
        "same_text": None if plain else True,
        "lengths": [[64, 128]] * 4,
    }


def served_row(rate: float) -> dict[str, Any]:
    slow = 1 / max(0.05, 1 - rate / 12)
    return {
        "label": f"{rate:g} requests/s",
        "rate": rate,
        "users": None,
        "requests": 64,
        "failed": 0,
        "errors": [],
        "seconds": 64 / rate,
        "prompt_tokens": 4096,
        "output_tokens": 8192,
        "requests_per_s": rate,
        "tokens_per_s": 128 * rate,
        "total_tokens_per_s": 192 * rate,
        "goodput": 0.9 * rate,
        "ttft_ms": distribution(30 * slow),
        "tpot_ms": distribution(7 * slow),
        "itl_ms": distribution(18 * slow),
        "e2el_ms": distribution(900 * slow),
        "late_ms": distribution(0.2),
        "most_under_way": 9,
        "acceptance": accepted(0.7),
    }


def rows_of(kind: str) -> list[dict[str, Any]]:
    match kind:
        case "throughput" | "latency":
            return [offline_row("plain", 8, 1500, None), offline_row("eagle k=5", 8, 3900, 2.6)]
        case "sweep":
            found = []
            for batch, gain in ((1, 2.8), (8, 2.4), (32, 1.7), (128, 0.9)):
                base = 200 * batch**0.85
                found.append(offline_row("plain", batch, base, None))
                for label, better in (("eagle k=5", 1.0), ("ngram k=3", 0.6), ("eagle k=2", 0.85)):
                    found.append(offline_row(label, batch, base * gain * better, gain * better))
                    found[-1]["predicted_speedup"] = gain * better * (1.05 if batch > 8 else 0.97)
            return found
        case "acceptance":
            return [
                {
                    "label": "eagle k=5",
                    "category": name,
                    "prompts": 8,
                    "output_tokens": 1024,
                    "acceptance": accepted(rate),
                    "interval": {"value": 3.0, "low": 2.8, "high": 3.2, "level": 0.95},
                    "tokens_per_step": 2.9,
                }
                for name, rate in (("chat", 0.6), ("code", 0.8), ("copy", 0.93), ("all", 0.75))
            ]
        case "serve":
            return [served_row(rate) for rate in (1.0, 2.0, 4.0, 8.0, 11.0)]
        case "steps":
            return [
                {
                    "label": label,
                    "tree": tree,
                    "nodes": nodes,
                    "requests": rows,
                    "seconds": 0.005 * (1 + rows * nodes / 300),
                    "draft_seconds": 0.0,
                }
                for tree, (label, nodes) in enumerate((("plain", 1), ("chain of 5", 6)))
                for rows in (1, 8, 32, 128)
            ]
        case "simulate":
            return [
                {**served_row(rate), "replicas": n, "gpus": n, "busy": 0.5, "preemptions": 0}
                for n in (1, 4)
                for rate in (1.0 * n, 4.0 * n, 10.0 * n)
            ]
        case "tune":
            return [
                {
                    "label": label,
                    "round": number,
                    "prompts": 4 * number,
                    "tokens_per_s": 100 * gain,
                    "speedup": {
                        "value": gain,
                        "low": gain - 0.1,
                        "high": gain + 0.1,
                        "level": 0.95,
                    },
                    "kept": kept,
                }
                for label, number, gain, kept in (
                    ("ngram k=3", 1, 1.3, True),
                    ("ngram k=7", 1, 1.1, False),
                    ("ngram k=3", 2, 1.35, True),
                )
            ]
        case _:
            raise AssertionError(kind)


def record(kind: str, **more: Any) -> Record:
    extra: dict[str, Any] | None = None
    if kind == "throughput":
        seconds = [0.1 * i for i in range(30)]
        extra = {
            "courses": [
                {
                    "label": label,
                    "seconds": seconds,
                    "tokens_per_s": [top * min(1, (30 - i) / 8) for i in range(30)],
                }
                for label, top in (("plain", 1500), ("eagle k=5", 3900))
            ]
        }
    if kind == "steps":
        extra = {"prompt_fixed_s": 0.001, "prompt_token_s": 3e-5}
    if kind == "tune":
        extra = {"verdict": "ngram k=3 is the fastest: 1.35x"}
    data = {
        "foretell_bench": FORMAT,
        "kind": kind,
        "when": "2026-12-01T00:00:00+00:00",
        "machine": MACHINE,
        "settings": {
            "model": "org/model-8b",
            "repeats": 3,
            "drafts": "eagle k=5",
            "costs_source": "a test",
            "sampling": {"temperature": 0.0, "max_tokens": 128},
        },
        "warnings": [],
        "rows": rows_of(kind),
        **({} if extra is None else {"extra": extra}),
        **more,
    }
    return Record.read(data)


ALL = KINDS
