"""Tuning with scripted speeds: the fastest is found, rounds halve, and the verdict says how sure it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bench_lab import PROMPTS, TinyEngines

from foretell import SamplingParams
from foretell.bench import tune as tuning
from foretell.bench.offline import Plan
from foretell.bench.prompts import BenchPrompt
from foretell.bench.runs import Answer, Counted, Run, Side
from foretell.bench.tune import Pair, Trial, rounds, settings, speedup, tune, winners
from foretell.bench.variants import Variant, given_variant, plain_variant
from foretell.configfile import read_config, write_config
from foretell.options import EngineOptions
from foretell.speculation import resolve_speculation

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def quiet(_: str) -> None:
    """Tells nobody."""


def candidates(*ks: int) -> list[Variant]:
    return [given_variant({"method": "ngram", "num_speculative_tokens": k}) for k in ks]


def prompts(count: int) -> list[BenchPrompt]:
    return [BenchPrompt(str(i), "all", f"prompt {i}") for i in range(count)]


@pytest.fixture
def scripted(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[dict[int, float]], list[tuple[str, int]]]:
    """scripted({k: speed-up}): runs take the time that gives each variant its speed-up, with 5 % of noise."""

    def script(gains: dict[int, float]) -> list[tuple[str, int]]:
        noise, ran = random.Random(1), []

        def together(side: Side, group: list[BenchPrompt]) -> Run:
            ran.append((side.label, len(group)))
            gain = gains[side.variant.k] if side.variant.k else 1.0
            answers = tuple(Answer((1,) * 10, 4, 0.1, 1.0) for _ in group)
            return Run(answers, len(group) / gain * noise.uniform(0.95, 1.05), Counted())

        monkeypatch.setattr(tuning, "together", together)
        monkeypatch.setattr(tuning, "warm_up", lambda *_: None)
        return ran

    return script


def test_the_fastest_wins_and_the_verdict_says_how_sure_it_is(
    scripted: Callable[[dict[int, float]], list[tuple[str, int]]],
) -> None:
    scripted({1: 1.1, 2: 1.3, 3: 1.6, 4: 1.2, 5: 1.0, 6: 0.9, 7: 0.8, 8: 0.7})
    plan = Plan(prompts(32), PARAMS, batch=2, repeats=2)
    tuned = tune(TinyEngines(), candidates(1, 2, 3, 4, 5, 6, 7, 8), plan, quiet)
    assert tuned.best.k == 3
    assert tuned.gain is not None
    assert tuned.gain.low < 1.6 < tuned.gain.high
    assert tuned.faster == 1.0
    assert tuned.fastest > 0.99
    assert "1.6" in tuned.verdict
    assert "ngram k=3" in tuned.verdict


def test_every_round_halves_the_candidates_and_doubles_the_prompts(
    scripted: Callable[[dict[int, float]], list[tuple[str, int]]],
) -> None:
    gains = {k: 2.0 - 0.1 * k for k in range(1, 9)}
    scripted(gains)
    plan = Plan(prompts(32), PARAMS, batch=4, repeats=1)
    tuned = tune(TinyEngines(), candidates(*gains), plan, quiet)
    by_round = {
        number: [(r.k, r.prompts, r.kept) for r in tuned.rows if r.round == number]
        for number in (1, 2, 3)
    }
    assert [(len(rows), rows[0][1]) for rows in by_round.values()] == [(8, 8), (4, 16), (3, 32)]
    assert {k for k, _, kept in by_round[1] if kept} == {1, 2, 3, 4}
    assert [k for k, _, kept in by_round[3] if kept] == [1]


def test_plain_and_candidate_take_turns_group_by_group(
    scripted: Callable[[dict[int, float]], list[tuple[str, int]]],
) -> None:
    ran = scripted({2: 1.2})
    tune(TinyEngines(), candidates(2), Plan(prompts(6), PARAMS, batch=2, repeats=1), quiet)
    labels = [label for label, _ in ran]
    drafted = next(label for label in labels if label != "plain")
    assert labels == ["plain", drafted, drafted, "plain", "plain", drafted]
    assert {count for _, count in ran} == {2}


def test_the_last_round_has_an_engine_of_its_own_for_plain(
    scripted: Callable[[dict[int, float]], list[tuple[str, int]]],
) -> None:
    scripted({k: 1.0 + k / 10 for k in (1, 2, 3, 4)})
    engines = TinyEngines()
    tune(engines, candidates(1, 2, 3, 4), Plan(prompts(8), PARAMS, batch=1, repeats=1), quiet)
    plain = [v.plain for v in engines.opened]
    assert plain == [False] * 4 + [True, False] * 3
    assert engines.closed == len(engines.opened)


def test_where_nothing_is_faster_plain_wins(
    scripted: Callable[[dict[int, float]], list[tuple[str, int]]],
) -> None:
    scripted({2: 0.7, 4: 0.5})
    tuned = tune(TinyEngines(), candidates(2, 4), Plan(prompts(8), PARAMS, batch=1), quiet)
    assert tuned.best.plain
    assert tuned.gain is None
    assert "no drafts" in tuned.verdict
    assert not any(row.kept for row in tuned.rows if row.round == max(r.round for r in tuned.rows))
    assert settings(tuned, {"model": "m"}) == {"model": "m"}


def test_two_that_are_equal_are_not_sure() -> None:
    draw = random.Random(5)

    def trial(variant: Variant) -> Trial:
        pairs = tuple(Pair(10, draw.uniform(0.8, 1.2) / 1.5, 10, 1.0) for _ in range(12))
        return Trial(variant, pairs)

    first, second = sorted(map(trial, candidates(2, 4)), key=lambda t: -t.speedup)
    faster, fastest = winners([first, second])
    assert faster == 1.0
    assert 0.5 <= fastest < 0.999


def test_a_verdict_that_is_not_sure_names_the_next_best(
    scripted: Callable[[dict[int, float]], list[tuple[str, int]]],
) -> None:
    scripted({2: 1.30, 4: 1.30})
    tuned = tune(
        TinyEngines(), candidates(2, 4), Plan(prompts(6), PARAMS, batch=1, repeats=1), quiet
    )
    assert tuned.fastest < 0.9 or "Not sure" not in tuned.verdict
    unsure = replace(tuned, fastest=0.5, second="ngram k=9 at 1.29x")
    assert "Not sure: close behind is ngram k=9 at 1.29x" in unsure.verdict
    assert "Not sure" not in replace(unsure, fastest=0.97).verdict


def test_a_speed_up_weighs_groups_by_their_time() -> None:
    pairs = [Pair(10, 1.0, 10, 2.0), Pair(30, 3.0, 30, 3.0)]
    assert speedup(pairs) == pytest.approx((40 / 4) / (40 / 5))


@pytest.mark.parametrize(
    ("count", "total", "batch", "sizes"),
    [
        (8, 32, 4, [8, 16, 32]),
        (3, 32, 4, [32]),
        (4, 8, 1, [4, 8]),
        (4, 8, 8, [8, 8]),
        (20, 10, 1, [2, 3, 5, 10]),
    ],
)
def test_rounds_have_whole_batches_and_end_with_all_prompts(
    count: int, total: int, batch: int, sizes: list[int]
) -> None:
    assert rounds(count, total, batch) == sizes


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to choose from"):
        tune(TinyEngines(), [], Plan(prompts(2), PARAMS), quiet)


def test_it_runs_on_real_tiny_engines_and_what_it_writes_is_what_llm_takes(tmp_path: Path) -> None:
    variants = [
        given_variant({"model": "models/draft", "num_speculative_tokens": k}) for k in (1, 3)
    ]
    plan = Plan(PROMPTS, PARAMS, batch=2, repeats=1, warm_up_tokens=2)
    tuned = tune(TinyEngines(), variants, plan, quiet)
    assert {row.k for row in tuned.rows} == {1, 3}
    won = replace(tuned, best=variants[1])
    write_config(tmp_path / "c.yaml", settings(won, {"dtype": "float32"}), tuned.verdict)
    found = EngineOptions(config=str(tmp_path / "c.yaml")).arguments()
    assert found == read_config(str(tmp_path / "c.yaml"))
    speculation = resolve_speculation(speculative_config=found["speculative_config"])
    assert speculation.drafter is not None
    assert speculation.drafter.num_speculative_tokens == 3
    assert settings(replace(tuned, best=plain_variant()), {"a": 1}) == {"a": 1}
