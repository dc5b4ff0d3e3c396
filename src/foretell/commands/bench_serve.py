"""`foretell bench serve`: load on any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
from typer import Option

from foretell.bench.client import TIMEOUT, Client, first_model
from foretell.bench.prompts import BenchPrompt
from foretell.bench.serving import Limits, Load, ServeRow, doubts, serve_load
from foretell.commands.bench_options import (
    Bench,
    OutputOptions,
    PromptOptions,
    bench,
    finish,
    numbers,
    rates,
    sampling_warnings,
)
from foretell.options import SamplingOptions


def serve(
    prompts: PromptOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    url: Annotated[
        str, Option("--url", help="The server's address, without /v1.")
    ] = "http://localhost:8000",
    model: Annotated[
        str | None, Option("--model", "-m", help="Its name there. [default: the first one]")
    ] = None,
    api_key: Annotated[
        str | None, Option("--api-key", help="Sent as a bearer token.", envvar="FORETELL_API_KEY")
    ] = None,
    rate: Annotated[
        str | None, Option("--rate", help="Requests a second, Poisson; several with commas; inf.")
    ] = None,
    users: Annotated[
        str | None,
        Option("--users", help="Requests under way: a closed loop, or a cap for --rate."),
    ] = None,
    requests: Annotated[int, Option("--requests", help="How many for each load.")] = 64,
    warm_up: Annotated[int, Option("--warm-up", help="Requests before the clock starts.")] = 2,
    ttft_limit: Annotated[float | None, Option("--ttft-limit", help="ms, for goodput.")] = None,
    tpot_limit: Annotated[float | None, Option("--tpot-limit", help="ms, for goodput.")] = None,
    e2el_limit: Annotated[float | None, Option("--e2el-limit", help="ms, for goodput.")] = None,
) -> None:
    """Load on any OpenAI-compatible server: Poisson arrivals (--rate) or a closed loop (--users)."""
    output.check()
    loaded = prompts.load()
    limits = Limits(ttft_limit, tpot_limit, e2el_limit)
    loads = _loads(rate, users, requests, sampling.seed, warm_up)
    body = _body(sampling)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    # Not timed as far as other processes go: the server may be one of them. A client that is too slow shows in `late`.
    with bench(None, sampling_warnings(sampling), timed=False) as under_way:
        rows, name = asyncio.run(
            _serve(url, model, headers, body, not prompts.raw, loads, limits, loaded, under_way)
        )
        settings = {
            "url": url,
            "model": name,
            "body": body,
            "prompts": prompts.prompts,
            "num_prompts": len(loaded),
            "chat_template": not prompts.raw,
            "limits_ms": limits,
            "seed": sampling.seed,
            "warm_up": warm_up,
            "acceptance_valid": not sampling.ignore_eos,
        }
        record = under_way.record("serve", settings, rows)
    finish(record, output)
    if any(row.requests == 0 for row in rows):
        raise typer.Exit(1)


async def _serve(
    url: str,
    model: str | None,
    headers: dict[str, str],
    body: dict[str, Any],
    chat: bool,
    loads: list[Load],
    limits: Limits,
    prompts: list[BenchPrompt],
    under_way: Bench,
) -> tuple[list[ServeRow], str]:
    httpx = need_httpx()

    pool = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT, limits=pool
    ) as http:
        name = model or await first_model(http)
        client = Client(http, {**body, "model": name}, chat)
        rows = []
        asked = sum(load.warm_up + load.requests for load in loads)
        if asked > len(prompts):
            under_way.warnings.append(
                f"{asked} requests are made of {len(prompts)} prompts: a server with a prefix cache answers the "
                "repeated ones sooner. Give more prompts, or read first-token times with that in mind"
            )
        start = 0
        for load in loads:
            under_way.tell(f"{load.label}, {load.requests} requests")
            own = [*prompts[start % len(prompts) :], *prompts[: start % len(prompts)]]
            start += load.warm_up + load.requests
            row, served = await serve_load(client, own, load, limits)
            under_way.warnings += doubts(row, served)
            rows.append(row)
    return rows, name


def need_httpx() -> Any:
    """httpx, or how to get it."""
    try:
        import httpx
    except ImportError:
        raise ImportError(
            "bench serve needs httpx, which is not installed; run: pip install 'foretell[bench]'"
        ) from None
    return httpx


def _loads(
    rate: str | None, users: str | None, requests: int, seed: int, warm_up: int
) -> list[Load]:
    """One load per rate, or per number of users."""
    if rate is None:
        many = numbers(users, "--users") if users else [8]
        return [Load(requests, None, count, seed, warm_up) for count in many]
    cap = None if users is None else numbers(users, "--users")
    if cap is not None and len(cap) > 1:
        raise ValueError(f"--users {users}: with --rate it is one cap, give one number")
    most = None if cap is None else cap[0]
    return [Load(requests, r, most, seed, warm_up) for r in rates(rate, "--rate")]


def _body(sampling: SamplingOptions) -> dict[str, Any]:
    """Sampling as the OpenAI API says it; the extensions of vLLM are sent only if they were asked for."""
    body: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    extensions = {
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "repetition_penalty": 1.0,
    }
    for name, off in {**extensions, "presence_penalty": 0.0, "frequency_penalty": 0.0}.items():
        if getattr(sampling, name) != off:
            body[name] = getattr(sampling, name)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body
