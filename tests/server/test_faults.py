"""Faults are contained: NaN logits, a drafter that raises, no blocks, a dead engine, clients that go."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from lab import ScriptedDrafter, tiny_decoder
from serving_lab import (
    MODEL,
    PATIENCE,
    VOCABULARY,
    Gate,
    Live,
    drafting,
    start,
    tiny_llm,
    wait_for,
)

from foretell.engine.request import Request
from foretell.model.decoder import Decoder
from foretell.sampling_params import SamplingParams
from foretell.spec.drafter import Draft, Window
from foretell.spec.nodes import Shape
from foretell.spec.tree import Tree, chain

TEXT = "/v1/completions"


def ask(live: Live, prompt: str, **body: object) -> httpx.Response:
    asked = {"prompt": prompt, "max_tokens": 20, "seed": 1, **body}
    return httpx.post(live.url + TEXT, json=asked, timeout=60)


def solo(prompt: str, **params: object) -> str:
    with tiny_llm() as llm:
        asked = SamplingParams(**({"max_tokens": 20, "seed": 1} | params))  # type: ignore[arg-type]
        return llm.generate(prompt, asked, False)[0].outputs[0].text


def value(live: Live, name: str) -> float:
    text = httpx.get(live.url + "/metrics").text
    lines = [x for x in text.splitlines() if x.startswith(f"foretell:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def together(*calls) -> list:
    """Results of calls that run at the same time."""
    found: list = [None] * len(calls)

    def run(place: int) -> None:
        found[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def poisoned() -> Decoder:
    """The tiny target; `state["after"] = n` makes the logits of the n-th call from then on NaN."""
    target = tiny_decoder(0, vocabulary=VOCABULARY)
    plain = target.logits
    state = {"after": -1}

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = plain(hidden)
        if state["after"] >= 0:
            state["after"] -= 1
            if state["after"] == 0:
                found = torch.full_like(found, torch.nan)
        return found

    target.logits = logits  # type: ignore[method-assign]
    target.state = state  # type: ignore[assignment]
    return target


def test_nan_logits_end_one_request_with_an_error_and_are_counted() -> None:
    target = poisoned()
    live = start(tiny_llm(drafting(0), chain(3), target))
    try:
        assert ask(live, "fine").status_code == 200
        target.state["after"] = 3  # type: ignore[union-attr,index]
        answer = ask(live, "broken")
        assert answer.status_code == 500
        assert "NaN" in answer.json()["error"]["message"]
        assert value(live, "corrupted_requests_total") == 1
        assert value(live, "request_success_total") == 2
        target.state["after"] = 3  # type: ignore[union-attr,index]
        with httpx.stream(
            "POST", live.url + TEXT, json={"prompt": "broken", "max_tokens": 20, "stream": True}
        ) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "NaN" in json.loads(lines[-2][6:])["error"]["message"]
        assert lines[-1] == "data: [DONE]"
        assert ask(live, "fine").json()["choices"][0]["text"] == solo("fine")
        live.idle()
    finally:
        live.close()


class Fragile(ScriptedDrafter):
    """Raises for texts that hold a token; proposes nonsense else."""

    def __init__(self, bad: int) -> None:
        super().__init__(lambda _, tree: [-1] + [9] * (tree.nodes - 1))
        self.bad = bad

    def propose(self, window: Window, shape: Shape) -> Draft:
        for slot, length in zip(window.slots.tolist(), window.length.tolist(), strict=True):
            if self.bad in window.text[slot, :length].tolist():
                raise RuntimeError("this drafter is broken")
        return super().propose(window, shape)


@pytest.mark.parametrize("tree", [chain(3), Tree((-1, 0, 0, 1))])
def test_a_drafter_that_raises_costs_one_request_its_drafts(tree: Tree) -> None:
    llm = tiny_llm(Fragile(-1), tree)
    bad = llm.get_tokenizer().encode("$", add_special_tokens=False)[0]
    llm.parts().driver.engine.runner.device.drafter.bad = bad  # type: ignore[attr-defined]
    live = start(llm)
    try:
        prompts = ["good", "ba$d", "fine", "$"]
        allowed = [t for t in range(40, 240) if t != bad]
        asked = {"speculation_metrics": "summary", "allowed_token_ids": allowed}
        answers = together(*[lambda p=p: ask(live, p, **asked) for p in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.status_code == 200
            choice = answer.json()["choices"][0]
            assert choice["text"] == solo(prompt, allowed_token_ids=allowed)
            drafted = choice["metrics"]["speculative_decoding"]["num_draft_tokens"]
            assert (drafted > 0) == ("$" not in prompt), prompt
        assert value(live, "spec_decode_num_fallbacks_total") == 2
        live.idle()
    finally:
        live.close()


def test_a_request_that_outgrows_the_blocks_ends_alone() -> None:
    """Two requests of which only one fits at a time: both are answered; one that never fits is an error."""
    live = start(tiny_llm(kv_cache_memory_bytes=128 << 10, max_model_len=200))
    try:
        blocks = live.engine.scheduler.blocks.usable
        room = blocks * 16
        assert room < 2 * 200
        texts = together(
            *[lambda i=i: ask(live, "x" * 20 + str(i), max_tokens=150) for i in range(4)]
        )
        for i, answer in enumerate(texts):
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == solo("x" * 20 + str(i), max_tokens=150)
        live.idle()
    finally:
        live.close()


def test_the_engine_s_death_reaches_every_client_and_health() -> None:
    llm = tiny_llm(drafting(0), chain(3))
    live = start(llm)
    engine = live.engine
    steps = 0
    step = engine.step

    def dying():
        nonlocal steps
        steps += 1
        if steps > 6:
            raise MemoryError("no more memory")
        return step()

    engine.step = dying  # type: ignore[method-assign]
    try:
        assert httpx.get(live.url + "/health").status_code == 200

        def streamed() -> list[str]:
            body = {"prompt": "abc", "max_tokens": 150, "stream": True}
            with httpx.stream("POST", live.url + TEXT, json=body, timeout=30) as stream:
                return [line for line in stream.iter_lines() if line]

        whole, lines = together(lambda: ask(live, "abc", max_tokens=150), streamed)
        assert whole.status_code == 500
        assert "MemoryError" in whole.json()["error"]["message"]
        assert "MemoryError" in json.loads(lines[-2][6:])["error"]["message"]
        assert lines[-1] == "data: [DONE]"
        assert httpx.get(live.url + "/health").status_code == 503
        assert httpx.get(live.url + "/ping").status_code == 503
        assert ask(live, "more").status_code == 500
        assert live.server.bridge.open == 0
        assert httpx.get(live.url + "/metrics").status_code == 200
    finally:
        live.close()


def test_a_client_that_goes_frees_what_it_used() -> None:
    live = start(tiny_llm(max_model_len=500))
    try:
        body = {"prompt": "abc", "max_tokens": 480, "ignore_eos": True}
        with httpx.stream("POST", live.url + TEXT, json=body | {"stream": True}) as stream:
            next(stream.iter_lines())
            wait_for(lambda: live.server.bridge.metrics.state.running == 1)
        live.idle()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + TEXT, json=body, timeout=0.2)
        live.idle()
        assert value(live, "request_success_total") == 2
        text = httpx.get(live.url + "/metrics").text
        assert 'finished_reason="abort",model_name="tiny"} 2.0' in text
    finally:
        live.close()


def test_a_full_queue_says_so_and_when_to_come_back() -> None:
    live = start(tiny_llm(max_num_seqs=1, max_model_len=500), max_queue=1)
    try:
        body = {"prompt": "abc", "max_tokens": 480, "ignore_eos": True}
        done = threading.Event()

        def hold() -> None:
            with httpx.stream("POST", live.url + TEXT, json=body | {"stream": True}) as stream:
                for _ in stream.iter_lines():
                    if done.is_set():
                        return

        holders = [threading.Thread(target=hold) for _ in range(2)]
        for holder in holders:
            holder.start()
        wait_for(lambda: live.server.bridge.open == 2)
        answer = ask(live, "x")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert httpx.get(live.url + "/health").status_code == 200
        done.set()
        for holder in holders:
            holder.join()
        live.idle()
        assert ask(live, "x").status_code == 200
    finally:
        live.close()


def test_a_request_that_takes_too_long_is_ended() -> None:
    live = start(tiny_llm(max_model_len=500), request_timeout=0.2)
    try:
        answer = ask(live, "abc", max_tokens=480, ignore_eos=True)
        assert answer.status_code == 504
        body = {"prompt": "abc", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", live.url + TEXT, json=body) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert json.loads(lines[-2][6:])["error"]["code"] == 504
        live.idle()
    finally:
        live.close()


def test_priorities_decide_who_goes_first() -> None:
    """The order is the engine's own, of four requests that it all knew before the first of them went on."""
    gate = Gate()
    live = start(
        tiny_llm(target=gate.target, max_num_seqs=1, scheduling_policy="priority"),
    )
    engine = live.engine
    order: list[int] = []
    admitted = engine.watcher.admitted

    def noted(request: Request) -> None:
        order.append(request.priority)
        admitted(request)

    engine.watcher.admitted = noted  # type: ignore[method-assign,union-attr]

    def one(priority: int) -> httpx.Response:
        return ask(live, "abc", max_tokens=3, priority=priority, ignore_eos=True)

    try:
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(one, -9)]
            assert gate.reached.wait(PATIENCE)
            answers += [pool.submit(one, priority) for priority in (5, 1, 3)]
            wait_for(lambda: live.server.bridge._inbox.qsize() == 3)
            gate.open()
            assert all(answer.result().is_success for answer in answers)
        assert order == [-9, 1, 3, 5]
    finally:
        gate.open()
        live.close()


def test_health_answers_while_a_huge_prompt_is_read() -> None:
    live = start(tiny_llm(max_model_len=500, max_num_batched_tokens=64))
    try:
        slow = threading.Thread(target=lambda: ask(live, "w" * 480, max_tokens=2))
        slow.start()
        times = []
        while slow.is_alive():
            begin = time.monotonic()
            assert httpx.get(live.url + "/health").status_code == 200
            times.append(time.monotonic() - begin)
        slow.join()
        assert times
    finally:
        live.close()


def test_the_first_token_leaves_before_anything_is_drafted() -> None:
    """R48: one-token requests are not drafted for; the first token is on its way before the first draft."""
    order: list[str] = []
    drafter = drafting(0)
    propose = drafter.propose

    def noted(window: Window, shape: Shape) -> Draft:
        order.append("draft")
        return propose(window, shape)

    drafter.propose = noted  # type: ignore[method-assign]
    live = start(tiny_llm(drafter, chain(3)))
    bridge = live.server.bridge
    tell = bridge._tell

    def sent(*what: object) -> None:
        order.append("sent")
        tell(*what)  # type: ignore[arg-type]

    bridge._tell = sent  # type: ignore[method-assign]
    try:
        assert ask(live, "abc", max_tokens=1).is_success
        assert order == ["sent"]
        order.clear()
        body = {"prompt": "abc", "max_tokens": 8, "stream": True}
        assert httpx.post(live.url + TEXT, json=body, timeout=30).is_success
        assert order[:2] == ["sent", "draft"]
    finally:
        live.close()


def test_many_clients_at_once_get_their_own_answers() -> None:
    """Some go early, some read slowly; each whole answer is the one of its solo run, and nothing leaks."""
    live = start(tiny_llm(drafting(0), chain(3), max_num_seqs=4, kv_cache_memory_bytes=300 << 10))
    wanted = {f"p{i}": solo(f"p{i}", max_tokens=30) for i in range(6)}

    async def one(client: httpx.AsyncClient, place: int) -> None:
        prompt = f"p{place % 6}"
        body = {"prompt": prompt, "max_tokens": 30, "seed": 1, "stream": True}
        text = ""
        async with client.stream("POST", TEXT, json=body) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    text += "".join(c["text"] for c in json.loads(line[6:])["choices"])
                    if place % 5 == 4:
                        return
                    if place % 5 == 3:
                        await asyncio.sleep(0.02)
        assert text == wanted[prompt]

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
            await asyncio.gather(*(one(client, place) for place in range(40)))

    try:
        asyncio.run(all_of_them())
        live.idle()
        numbers = live.server.bridge.metrics
        assert numbers.finished.total == 40
        assert numbers.finished.error == 0
    finally:
        live.close()


def test_the_page_s_numbers_and_the_library_s_equal_the_metrics() -> None:
    live = start(metrics_prefix="vllm:")
    try:
        for place in range(3):
            assert ask(live, f"p{place}").is_success
        live.idle()
        text = httpx.get(live.url + "/metrics").text
        page = httpx.get(live.url + "/stats").json()
        own = live.llm.get_metrics()

        def read(name: str) -> float:
            line = next(x for x in text.splitlines() if x.startswith(f"vllm:{name}{{"))
            return float(line.rsplit(" ", 1)[1])

        for name, key in (
            ("generation_tokens_total", "generation_tokens"),
            ("prompt_tokens_total", "prompt_tokens"),
            ("spec_decode_num_drafts_total", "num_drafts"),
            ("spec_decode_num_draft_tokens_total", "num_draft_tokens"),
            ("spec_decode_num_accepted_tokens_total", "num_accepted_tokens"),
        ):
            assert read(name) == page[key] == getattr(own, key)
        assert page["generation_tokens"] == 60
        assert read("num_requests_running") == page["running"] == own.state.running == 0
        assert read("kv_cache_usage_perc") == page["kv_cache_usage"]
        assert read("time_to_first_token_seconds_count") == 3
        assert own.histograms.time_to_first_token.count == own.time_to_first_token.count == 3
        assert read("e2e_request_latency_seconds_count") == 3
        assert read("request_generation_tokens_sum") == 60
        per_place = [
            float(x.rsplit(" ", 1)[1])
            for x in text.splitlines()
            if x.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
        ]
        assert per_place == page["accepted_per_pos"]
        assert sum(per_place) == page["num_accepted_tokens"]
        assert MODEL in text
    finally:
        live.close()
