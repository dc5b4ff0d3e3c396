"""Offline benchmarks on tiny engines: what runs when, what is counted, and that nothing changes the text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_lab import PROMPTS, TinyEngines

from foretell import SamplingParams
from foretell.bench import acceptance as by_kind
from foretell.bench import offline
from foretell.bench.offline import Plan, course, enough
from foretell.bench.runs import (
    Answer,
    Counted,
    Run,
    Side,
    alternate,
    in_groups,
    joined,
    streamed,
    together,
)
from foretell.bench.stats import Spread
from foretell.bench.variants import Variant, given_variant, grid, plain_variant

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAFTED = given_variant({"model": "models/draft", "num_speculative_tokens": 3})


def quiet(_: str) -> None:
    """Tells nobody."""


def plan(**more: object) -> Plan:
    return replace(Plan(PROMPTS, PARAMS, repeats=2, warm_up_tokens=2), **more)  # type: ignore[arg-type]


def test_throughput_compares_plain_with_drafts_on_the_same_text() -> None:
    engines = TinyEngines()
    rows, courses = offline.throughput(engines, DRAFTED, plan(), quiet)
    plain, drafted = rows
    assert engines.opened == [plain_variant(), DRAFTED]
    assert engines.closed == 2
    assert drafted.same_text is True
    assert plain.same_text is None
    assert plain.output_tokens == drafted.output_tokens == 48
    assert plain.prompt_tokens == drafted.prompt_tokens > 0
    assert plain.acceptance is None
    assert drafted.acceptance is not None
    assert drafted.acceptance.length > 3  # the drafter is the target itself
    assert drafted.tokens_per_step > 2
    assert plain.tokens_per_step == 1.0
    assert drafted.speedup is not None
    assert len(drafted.speedup.values) == 2
    assert [c.label for c in courses] == [plain.label, drafted.label]


def test_a_speed_up_is_the_median_of_ratios_of_neighbours() -> None:
    def run(seconds: float) -> Run:
        return Run((_answer(),), seconds, Counted())

    sides = [Side(plain_variant(), None, PARAMS), Side(DRAFTED, None, PARAMS)]  # type: ignore[arg-type]
    done = {
        sides[0].label: [run(2.0), run(4.0), run(8.0)],
        sides[1].label: [run(1.0), run(1.0), run(8.0)],
    }
    drafted = offline.rows_of(sides, done, 1)[1]
    assert drafted.speedup == Spread.of([2.0, 4.0, 1.0])


def _answer() -> Answer:
    return Answer(token_ids=(1, 2, 3), prompt_tokens=2, first=0.25, latency=0.75)


def test_sides_alternate_and_every_other_round_goes_backwards() -> None:
    order: list[str] = []

    def run(side: Side) -> Run:
        order.append(side.label)
        return Run((), 1.0, Counted())

    sides = [
        Side(plain_variant(), None, PARAMS),  # type: ignore[arg-type]
        Side(Variant("a"), None, PARAMS),  # type: ignore[arg-type]
        Side(Variant("b"), None, PARAMS),  # type: ignore[arg-type]
    ]
    alternate(sides, 3, run, quiet)
    assert order == ["plain", "a", "b", "b", "a", "plain", "plain", "a", "b"]


def test_one_engine_runs_plain_without_drafts() -> None:
    engines = TinyEngines()
    rows, _ = offline.throughput(engines, DRAFTED, plan(one_engine=True), quiet)
    assert len(engines.opened) == 1
    assert rows[0].acceptance is None
    assert rows[1].acceptance is not None
    assert rows[1].same_text is True


def test_plain_alone_is_one_row() -> None:
    rows, _ = offline.throughput(TinyEngines(), plain_variant(), plan(), quiet)
    assert [row.label for row in rows] == ["plain"]


def test_latency_follows_every_piece_of_one_request_at_a_time() -> None:
    plain, drafted = offline.latency(TinyEngines(), DRAFTED, plan(), quiet)
    assert plain.requests == 1
    assert plain.itl_ms is not None
    assert drafted.itl_ms is not None
    assert plain.itl_ms.count == 2 * 4 * 11  # every token but the first, of 4 answers, twice
    assert drafted.itl_ms.count < plain.itl_ms.count / 2  # several tokens a piece
    assert drafted.ttft_ms.count == 8
    assert drafted.same_text is True


def test_a_sweep_has_every_variant_at_every_batch_beside_plain() -> None:
    engines = TinyEngines(poor=True)
    variants = grid(["models/draft"], [1, 3], ["chain"], {})
    rows = offline.sweep(engines, variants, [1, 3], plan(repeats=1), quiet)
    assert [(r.label, r.requests) for r in rows if r.speedup] == [
        (variants[0].label, 1),
        (variants[0].label, 3),
        (variants[1].label, 1),
        (variants[1].label, 3),
    ]
    assert sum(r.label == "plain" for r in rows) == 4
    assert all(r.same_text for r in rows if r.speedup)
    assert len(engines.opened) == engines.closed == 3  # one plain engine, and each variant's


def test_a_batch_is_filled_by_repeating_prompts_and_has_no_part_left() -> None:
    assert [p.id for p in enough(plan(), 3).prompts] == ["a1", "a2", "c1"]
    assert [p.id for p in enough(plan(), 6).prompts] == ["a1", "a2", "c1", "c2", "a1", "a2"]
    assert len(enough(plan(), 2).prompts) == 4


def test_repeats_do_not_find_their_prompts_in_the_cache() -> None:
    side = Side(plain_variant(), TinyEngines()(plain_variant()), PARAMS)
    long = [replace(PROMPTS[0], text="the same long text " * 3)]
    first, second = together(side, long), together(side, long)
    assert first.counted.prefix_cache_queries > 0
    assert second.counted.prefix_cache_hits == 0
    assert second.texts == first.texts


def test_streams_and_batches_say_the_same() -> None:
    side = Side(DRAFTED, TinyEngines()(DRAFTED), PARAMS)
    followed, whole = streamed(side, PROMPTS), together(side, PROMPTS)
    assert followed.texts == whole.texts
    assert sum(tokens for _, tokens in followed.events) == followed.tokens == whole.tokens
    assert [at for at, _ in followed.events] == sorted(at for at, _ in followed.events)


def test_runs_that_follow_each_other_add_up() -> None:
    side = Side(DRAFTED, TinyEngines()(DRAFTED), PARAMS)
    runs = in_groups(side, PROMPTS, 3)
    assert [len(run.answers) for run in runs] == [3, 1]
    whole = joined(runs)
    assert whole.seconds == pytest.approx(sum(run.seconds for run in runs))
    assert whole.counted.generation_tokens == whole.tokens == 48
    assert whole.counted.num_drafts == sum(run.counted.num_drafts for run in runs)
    assert whole.counted.num_accepted_tokens == sum(r.counted.num_accepted_tokens for r in runs)


def test_raw_continues_the_text_itself() -> None:
    side = Side(plain_variant(), TinyEngines()(plain_variant()), PARAMS, raw=True)
    assert together(side, PROMPTS[:1]).prompt_tokens == len("a cat")
    chat = replace(side, raw=False)
    assert together(chat, PROMPTS[:1]).prompt_tokens > len("a cat")
    assert streamed(side, PROMPTS[:1]).prompt_tokens == len("a cat")


def test_a_course_adds_up_to_the_tokens_of_the_run() -> None:
    events = tuple((0.1 * i, 2) for i in range(1, 101))
    found = course("x", Run((), 10.0, Counted(), events))
    width = found.seconds[1] - found.seconds[0]
    assert sum(found.tokens_per_s) * width == pytest.approx(200)
    assert course("x", Run((), 1.0, Counted())).seconds == ()


def test_acceptance_is_by_category_and_all_of_them_is_the_sum() -> None:
    side = Side(DRAFTED, TinyEngines(poor=True)(DRAFTED), PARAMS)
    rows = by_kind.by_category(side, PROMPTS, 1, quiet)
    assert [row.category for row in rows] == ["animals", "cities", "all"]
    seen = [row.acceptance for row in rows]
    assert all(one is not None for one in seen)
    animals, cities, every = seen
    assert animals and cities and every  # noqa: PT018
    assert every.drafts == animals.drafts + cities.drafts
    assert every.accepted == animals.accepted + cities.accepted
    assert every.length == pytest.approx(
        (animals.length * animals.drafts + cities.length * cities.drafts) / every.drafts
    )
    interval = rows[2].interval
    assert interval is not None
    assert interval.low <= interval.value <= interval.high
    assert interval.value == pytest.approx(every.length)


def test_acceptance_of_a_perfect_drafter_is_whole_at_every_position() -> None:
    side = Side(DRAFTED, TinyEngines()(DRAFTED), replace(PARAMS, max_tokens=13))
    seen = by_kind.by_category(side, PROMPTS, 4, quiet)[-1].acceptance
    assert seen is not None
    assert seen.per_position == pytest.approx((1.0, 1.0, 1.0))
    assert seen.conditional == pytest.approx((1.0, 1.0, 1.0))
    assert seen.length == pytest.approx(4.0)


def test_without_drafts_there_is_no_acceptance() -> None:
    side = Side(plain_variant(), TinyEngines()(plain_variant()), PARAMS)
    row = by_kind.by_category(side, PROMPTS[:2], 1, quiet)[0]
    assert row.acceptance is None
    assert row.interval is None
    assert row.tokens_per_step == 1.0
