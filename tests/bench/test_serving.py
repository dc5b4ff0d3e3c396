"""Load on a server, with scripted times: every figure has the value that docs/metrics.md defines."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable

import httpx
import pytest
from bench_lab import PROMPTS, Clock, FakeServer, Script

from foretell.bench.client import Client, Served, parse_counters, read_counters
from foretell.bench.serving import (
    Limits,
    Load,
    ServeRow,
    arrivals,
    closed_loop,
    doubts,
    open_loop,
    serve_load,
    summed,
)

METRICS = """# HELP vllm:spec_decode_num_drafts_total ...
vllm:spec_decode_num_drafts_total{{model_name="m",engine="0"}} {0}.0
vllm:spec_decode_num_draft_tokens_total{{model_name="m",engine="0"}} {1}.0
vllm:spec_decode_num_accepted_tokens_total{{model_name="m",engine="0"}} {2}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {3}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {4}.0
vllm:num_requests_running{{engine="0"}} 3.0
"""


def run(
    server: FakeServer, load: Load, limits: Limits | None = None, chat: bool = True
) -> tuple[ServeRow, list[Served]]:
    async def go() -> tuple[ServeRow, list[Served]]:
        async with httpx.AsyncClient(transport=server, base_url="http://server") as http:
            client = Client(http, {"model": "tiny", "max_tokens": 9}, chat, server.clock)
            return await serve_load(client, PROMPTS, load, limits or Limits())

    return asyncio.run(go())


def one_user(requests: int = 1, warm_up: int = 0) -> Load:
    return Load(requests, users=1, warm_up=warm_up)


def test_the_figures_of_one_request_are_those_of_the_definitions() -> None:
    row, served = run(FakeServer(), one_user())
    assert served[0].first == pytest.approx(0.5)
    assert served[0].latency == pytest.approx(0.9)
    assert served[0].per_token == pytest.approx(0.4 / 4)
    assert served[0].gaps == pytest.approx((0.1, 0.3))
    assert row.seconds == pytest.approx(0.9)
    assert row.tokens_per_s == pytest.approx(5 / 0.9)
    assert row.total_tokens_per_s == pytest.approx(12 / 0.9)
    assert row.requests_per_s == pytest.approx(1 / 0.9)
    assert row.itl_ms.mean == pytest.approx(200)
    assert row.goodput is None


def test_a_role_without_text_is_no_first_token() -> None:
    _, served = run(FakeServer(), one_user())
    assert len(served[0].pieces) == 3


@pytest.mark.parametrize(
    ("chat", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")]
)
def test_chat_sends_messages_and_raw_sends_text(chat: bool, path: str) -> None:
    server = FakeServer()
    row, _ = run(server, one_user(), chat=chat)
    asked, body = server.asked[0]
    assert asked == path
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body.get("messages") == PROMPTS[0].messages) is chat
    assert (body.get("prompt") == PROMPTS[0].text) is not chat
    assert row.output_tokens == 5


def test_warm_up_requests_are_in_no_figure() -> None:
    server = FakeServer(script=lambda n: Script(pieces=((9.0 if n < 2 else 0.5, "x"),), tokens=1))
    row, served = run(server, one_user(requests=3, warm_up=2))
    assert len(server.asked) == 5
    assert len(served) == 3
    assert row.ttft_ms.percentiles["p99"] == pytest.approx(500)


def test_warm_up_and_figures_have_prompts_of_their_own() -> None:
    server = FakeServer()
    run(server, one_user(requests=2, warm_up=2))
    texts = [body["messages"][0]["content"] for _, body in server.asked]  # type: ignore[index]
    assert texts == [p.text for p in PROMPTS]


def test_prompts_repeat_when_there_are_too_few() -> None:
    server = FakeServer()
    run(server, one_user(requests=6))
    texts = [body["messages"][0]["content"] for _, body in server.asked]  # type: ignore[index]
    assert texts == [PROMPTS[i % 4].text for i in range(6)]


def test_a_closed_loop_keeps_so_many_requests_under_way_and_no_more() -> None:
    server = FakeServer()
    row, _ = run(server, Load(12, users=3, warm_up=0))
    assert server.most_under_way == 3
    assert row.most_under_way == 3
    assert row.requests == 12


def test_all_at_once_has_all_under_way_and_a_cap_holds() -> None:
    server = FakeServer()
    run(server, Load(12, rate=math.inf, warm_up=0))
    assert server.most_under_way == 12
    server = FakeServer()
    run(server, Load(12, rate=math.inf, users=4, warm_up=0))
    assert server.most_under_way == 4


def test_results_of_a_closed_loop_are_in_the_order_of_the_prompts() -> None:
    async def ask(prompt: object, due: float | None = None) -> Served:
        await asyncio.sleep(0.001 * (4 - PROMPTS.index(prompt)))  # type: ignore[arg-type]
        return Served(sent=0.0, pieces=(1.0,), ended=1.0, tokens=len(prompt.text))  # type: ignore[attr-defined]

    served = asyncio.run(closed_loop(ask, PROMPTS, 4))
    assert [one.tokens for one in served] == [len(p.text) for p in PROMPTS]


def test_failed_requests_are_counted_and_in_no_latency() -> None:
    server = FakeServer(
        script=lambda n: Script(status=429, error="too many") if n == 1 else Script()
    )
    row, served = run(server, one_user(requests=3))
    assert (row.requests, row.failed) == (2, 1)
    assert row.errors == ("HTTP 429: too many",)
    assert row.ttft_ms.count == 2
    assert "1 requests failed, first reason: HTTP 429: too many" in doubts(row, served)[0]


def test_a_server_that_is_not_there_is_an_error_not_an_exception() -> None:
    class Nowhere(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused")

    async def go() -> Served:
        async with httpx.AsyncClient(transport=Nowhere(), base_url="http://server") as http:
            assert await read_counters(http) is None
            return await Client(http, {}).ask(PROMPTS[0])

    assert asyncio.run(go()).error == "ConnectError: refused"


def test_an_error_inside_the_stream_fails_the_request() -> None:
    row, _ = run(FakeServer(script=lambda n: Script(pieces=())), one_user())
    assert row.failed == 1
    assert row.errors == ("the server's answer had no text",)


def test_without_usage_pieces_are_counted_and_a_warning_says_so() -> None:
    row, served = run(FakeServer(script=lambda n: Script(tokens=None)), one_user())
    assert row.output_tokens == 3
    assert any("no usage" in doubt for doubt in doubts(row, served))


def test_goodput_counts_requests_within_all_limits() -> None:
    server = FakeServer(
        script=lambda n: Script(pieces=((0.2 + n, "x"), (0.1, "y")), tokens=2, prompt_tokens=0)
    )
    limits = Limits(ttft_ms=1500, tpot_ms=150)
    row, _ = run(server, one_user(requests=3), limits)
    assert row.goodput == pytest.approx(2 / row.seconds)


def test_the_servers_own_counters_give_its_acceptance() -> None:
    server = FakeServer(
        metrics=[METRICS.format(10, 30, 20, 9, 8), METRICS.format(20, 60, 35, 17, 13)]
    )
    row, _ = run(server, one_user())
    assert row.acceptance is not None
    assert row.acceptance.length == pytest.approx(1 + 15 / 10)
    assert row.acceptance.rate == pytest.approx(15 / 30)
    assert row.acceptance.per_position == pytest.approx((0.8, 0.5))


def test_counters_are_summed_over_engines_and_missing_ones_are_none() -> None:
    both = METRICS.format(1, 2, 1, 1, 0) + METRICS.format(3, 6, 3, 2, 1)
    found = parse_counters(both)
    assert found is not None
    assert (found.drafts, found.drafted, found.accepted) == (4, 8, 4)
    assert found.per_position == (3, 1)
    assert parse_counters("vllm:num_requests_running 1.0\n") is None


def test_arrivals_are_a_poisson_process_stretched_by_the_rate() -> None:
    due = arrivals(4.0, 20_000, seed=1)
    gaps = [b - a for a, b in zip([0.0, *due], due, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.02)
    assert statistics.pstdev(gaps) == pytest.approx(
        0.25, rel=0.03
    )  # exponential: equal to the mean
    assert arrivals(8.0, 100, 1) == pytest.approx([at / 2 for at in due[:100]])
    assert arrivals(math.inf, 3, 1) == [0.0, 0.0, 0.0]


def test_requests_leave_when_they_are_due_whatever_the_answers_do() -> None:
    async def go() -> list[float]:
        loop = asyncio.get_running_loop()
        sent: list[float] = []
        start = loop.time()

        async def ask(prompt: object, due: float | None = None) -> Served:
            sent.append(loop.time() - start)
            await asyncio.sleep(0.2)
            return Served(sent=0.0)

        await open_loop(ask, PROMPTS, [0.0, 0.01, 0.02, 0.03], None, loop.time)
        return sent

    sent = asyncio.run(go())
    assert sent == sorted(sent)
    assert sent[-1] < 0.2  # none waited for an answer


def test_a_late_client_is_told() -> None:
    served = [Served(sent=1.0, pieces=(1.1,), ended=1.1, tokens=1, counted=True, late=0.4)]
    row = summed(served, Load(1, rate=5.0), Limits(), None)
    assert any("the client was the bottleneck" in doubt for doubt in doubts(row, served))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Load(0, rate=1.0), "requests must be at least 1"),
        (lambda: Load(1), "needs a rate"),
        (lambda: Load(1, rate=0.0), "rate must be above 0"),
        (lambda: Load(1, users=0), "users must be at least 1"),
    ],
)
def test_a_load_that_is_none_is_refused(make: Callable[[], Load], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_clock_of_the_tests_is_the_servers() -> None:
    clock = Clock()
    server = FakeServer(clock)
    run(server, one_user(requests=2))
    assert clock.now == pytest.approx(1.8)
