"""Counters: only what left the engine counts, none ever falls, and their differences are counters again."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.engine.request import Counts, Request
from foretell.metrics import Finished, Metrics, Recorder, Timing
from foretell.runner.plan import SlotResult
from foretell.sampling_params import SamplingParams


@dataclass
class Bench:
    """A recorder on a clock that ticks by hand."""

    now: float = 0.0
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(clock=lambda: self.now)

    def request(self, name: str = "r", prompt: int = 10, **params: object) -> Request:
        request = Request(name, (5,) * prompt, SamplingParams(**params), seed=0)  # type: ignore[arg-type]
        self.recorder.added(request)
        return request

    def emit(
        self, request: Request, tokens: int, drafted: int = 0, accepted: int = 0, **more: object
    ) -> None:
        result = SlotResult(0, (7,) * tokens, drafted=drafted, accepted=accepted, **more)  # type: ignore[arg-type]
        self.recorder.emitted(request, result)

    @property
    def seen(self) -> Metrics:
        return self.recorder.snapshot()


def test_R52_a_draft_cut_by_an_end_token_counts_what_left() -> None:
    bench = Bench()
    request = bench.request()
    bench.emit(
        request, 2, drafted=4, accepted=2
    )  # drafts a, EOS, c, d all matched; a and EOS leave
    seen = bench.seen
    assert (seen.generation_tokens, seen.num_accepted_tokens, seen.num_draft_tokens) == (2, 2, 4)
    assert seen.num_accepted_tokens_per_pos == (1, 1)
    assert seen.mean_acceptance_length == 2.0


def test_R52_a_tree_counts_its_nodes_as_drafted_and_its_depths_as_positions() -> None:
    bench = Bench()
    request = bench.request()
    bench.emit(request, 4, drafted=15, accepted=3)
    bench.emit(request, 6, drafted=15, accepted=5)
    assert (bench.seen.num_drafts, bench.seen.num_draft_tokens) == (2, 30)
    assert bench.seen.num_accepted_tokens_per_pos == (2, 2, 2, 1, 1)
    assert bench.seen.draft_acceptance_rate == 8 / 30
    assert bench.seen.acceptance_rate_per_pos == (1.0, 1.0, 1.0, 0.5, 0.5)


def test_R52_a_step_without_a_result_counts_nothing() -> None:
    bench = Bench()
    request = bench.request()
    bench.emit(request, 0, drafted=4, finish="error")
    assert bench.seen.num_drafts == bench.seen.num_draft_tokens == bench.seen.generation_tokens == 0
    assert bench.seen.corrupted_requests == 1


def test_R59_conditional_rates_give_the_known_length() -> None:
    bench = Bench()
    request = bench.request()
    for accepted, times in ((0, 200), (1, 240), (2, 224), (3, 336)):  # rates .8, .7, .6
        for _ in range(times):
            bench.emit(request, accepted + 1, drafted=3, accepted=accepted)
    assert bench.seen.mean_acceptance_length == pytest.approx(2.696)


def test_plain_steps_are_no_drafts() -> None:
    bench = Bench()
    bench.emit(bench.request(), 1)
    assert (bench.seen.num_drafts, bench.seen.generation_tokens) == (0, 1)
    assert bench.seen.mean_acceptance_length == 1.0
    assert bench.seen.draft_acceptance_rate == 0.0
    assert bench.seen.acceptance_rate_per_pos == ()


@pytest.mark.parametrize(("tokens", "drafted", "accepted"), [(2, 4, 3), (5, 3, 4), (3, 4, -1)])
def test_impossible_counts_are_a_fault_of_ours(tokens: int, drafted: int, accepted: int) -> None:
    bench = Bench()
    with pytest.raises(AssertionError):
        bench.emit(bench.request(), tokens, drafted, accepted)


def test_prompts_count_once_and_the_cache_only_where_it_was_asked() -> None:
    bench = Bench()
    hit = bench.request("hit", prompt=40)
    hit.counts = Counts(cached=32)
    bench.emit(hit, 1)
    bench.emit(hit, 1)
    scored = bench.request("scored", prompt=20, prompt_logprobs=0)
    bench.emit(scored, 1)
    seen = bench.seen
    assert (seen.prompt_tokens, seen.cached_prompt_tokens) == (60, 32)
    assert (seen.prefix_cache_queries, seen.prefix_cache_hits) == (40, 32)


def test_preemptions_are_counted_as_they_come() -> None:
    bench = Bench()
    first, second = bench.request("a"), bench.request("b")
    bench.emit(first, 1)
    first.counts.preemptions = 2
    second.counts.preemptions = 1
    bench.emit(first, 1)
    bench.emit(second, 1)
    bench.emit(first, 1)
    assert bench.seen.preemptions == 3


def test_times_and_reasons_of_requests() -> None:
    bench = Bench()
    first, second = bench.request("a"), bench.request("b")
    bench.now = 2.0
    bench.emit(first, 1)
    bench.emit(first, 1)
    bench.now = 5.0
    bench.recorder.ended("a", "stop")
    bench.recorder.ended("b", "abort")
    bench.recorder.ended("b", "abort")
    bench.recorder.ended("never added", "stop")
    assert bench.seen.time_to_first_token == Timing(1, 2.0)
    assert bench.seen.latency == Timing(2, 10.0)
    assert bench.seen.latency.mean == 5.0
    assert bench.seen.finished == Finished(stop=1, abort=1)
    assert bench.seen.finished.total == 2
    bench.emit(second, 3)
    assert bench.seen.generation_tokens == 2  # late news of a request that ended does not count


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_no_counter_ever_falls_and_sums_of_parts_are_the_whole(
    steps: list[tuple[int, int, int]],
) -> None:
    bench = Bench()
    requests = [bench.request(name) for name in "ab"]
    before = start = bench.seen
    own = {name: [0, 0, 0] for name in "ab"}
    for place, (emitted, drafted, most) in enumerate(steps):
        accepted = min(emitted, drafted, most)
        request = requests[place % 2]
        bench.emit(request, emitted, drafted, accepted)
        if emitted and drafted:
            own[request.id] = [
                a + b for a, b in zip(own[request.id], (1, drafted, accepted), strict=True)
            ]
        after = bench.seen
        counters = [f.name for f in fields(Metrics) if isinstance(getattr(after, f.name), int)]
        assert all(getattr(after, name) >= getattr(before, name) for name in counters)
        assert after.since(before).since(Metrics()) == after.since(before)
        before = after
    totals = [sum(counts) for counts in zip(*own.values(), strict=True)]
    assert totals == [before.num_drafts, before.num_draft_tokens, before.num_accepted_tokens]
    assert sum(before.num_accepted_tokens_per_pos) == before.num_accepted_tokens
    assert before.since(start) == before


@pytest.mark.parametrize("once", [False, True])
def test_R30_a_hundred_drafts_without_a_token_are_warned_of_once(
    once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    request = bench.request()
    for step in range(250):
        bench.emit(request, 1 + (once and step == 40), drafted=4, accepted=int(once and step == 40))
    warned = [r.getMessage() for r in caplog.records if r.name == "foretell"]
    assert len(warned) == (0 if once else 1)
    if not once:
        assert warned[0].startswith("the first 100 drafts had not one token accepted")
        for cause in ("another target", "target layers", "rope base", "prompt template"):
            assert cause in warned[0]
    assert bench.seen.num_accepted_tokens == int(once)
