"""The simulation gives what can be worked out by hand, and what real engines do."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from bench_lab import PROMPTS, TinyEngines

from foretell import SamplingParams
from foretell.bench.costs import Costs, PromptCosts, read_costs
from foretell.bench.fleet import (
    Fleet,
    accepting_of,
    batch_seconds,
    capacity,
    check,
    needed,
    under,
    with_predictions,
)
from foretell.bench.machine import describe
from foretell.bench.record import Record
from foretell.bench.runs import Acceptance, Side, together
from foretell.bench.serving import Limits
from foretell.bench.simulate import (
    Accepting,
    Replica,
    Shape,
    Traffic,
    constant_acceptance,
    drawn,
    simulate,
)
from foretell.bench.variants import given_variant, plain_variant
from foretell.spec.acceptance import expected_tokens
from foretell.spec.controller import Controller
from foretell.spec.costs import BUCKETS, StepCosts
from foretell.spec.presets import preset
from foretell.spec.tree import Tree, chain

TREES = (chain(0), chain(3))
NONE = Accepting(())
SMALL = Shape(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512, blocks=400)


def flat(plain: float = 0.010, drafted: float = 0.012, token: float = 0.0) -> Costs:
    """The same cost at any batch."""
    steps = StepCosts(TREES)
    for rows in BUCKETS:
        steps.add(rows, 0, plain)
        steps.add(rows, 1, drafted)
    return Costs(steps, PromptCosts(0.0, token))


def at_once(count: int, prompt: int = 16, output: int = 20) -> Traffic:
    return Traffic([(prompt, output)], math.inf, count)


def plainly(shape: Shape = SMALL) -> Shape:
    return replace(shape, tree=0, behind=False)


# By hand.


def test_one_request_takes_a_prompt_and_a_step_for_every_further_token() -> None:
    outcome = simulate(at_once(1), plainly(), flat(token=0.001), NONE)
    one = outcome.served[0]
    assert one.first == pytest.approx(16 * 0.001)
    assert one.latency == pytest.approx(16 * 0.001 + 19 * 0.010)
    assert one.per_token == pytest.approx(0.010)
    assert len(one.pieces) == 20
    assert outcome.busy == pytest.approx(1.0)


def test_drafts_that_are_always_right_bring_the_whole_depth_a_step() -> None:
    shape = replace(SMALL, tree=1, behind=False)
    one = simulate(at_once(1, output=21), shape, flat(), Accepting((1.0,))).served[0]
    # One token of the prompt's step, one of the first decode step, whose draft... every later step brings four.
    assert len(one.pieces) <= 1 + math.ceil(20 / expected_tokens(chain(3), (1.0,))) + 1
    assert one.latency == pytest.approx(0.012 * (len(one.pieces) - 1))


def test_a_request_never_gets_more_tokens_than_it_asked_for() -> None:
    for output in (1, 2, 3, 7):
        shape = replace(SMALL, tree=1)
        outcome = simulate(at_once(5, output=output), shape, flat(), Accepting((0.8,)))
        assert [one.tokens for one in outcome.served] == [output] * 5
        assert all(len(one.pieces) <= output for one in outcome.served)


def test_more_requests_than_slots_wait_for_their_turn() -> None:
    outcome = simulate(at_once(16), plainly(), flat(), NONE)
    ends = sorted(one.ended for one in outcome.served)
    assert ends[7] == pytest.approx(19 * 0.010)
    assert ends[15] == pytest.approx(2 * 19 * 0.010, abs=0.011)
    firsts = sorted(one.first for one in outcome.served)
    assert firsts[8] > 0.15


def test_prompts_are_chunked_by_the_budget() -> None:
    shape = replace(plainly(), max_num_batched_tokens=32)
    replica = Replica(shape, flat(token=0.001), NONE, random.Random(0))
    for job in at_once(1, prompt=100).jobs():
        replica.add(job)
    replica.advance(math.inf)
    assert replica.steps == 4 + 19  # 32 + 32 + 32 + 4 prompt tokens, then a token a step


def test_a_pool_too_small_for_all_preempts_and_still_serves_everybody() -> None:
    shape = replace(plainly(), blocks=12, max_model_len=128)
    outcome = simulate(at_once(6, prompt=16, output=60), shape, flat(), NONE)
    assert outcome.preemptions > 0
    assert [one.tokens for one in outcome.served] == [60] * 6


def test_a_request_that_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="maximum context length"):
        simulate(at_once(1, prompt=600), plainly(), flat(), NONE)
    with pytest.raises(ValueError, match="replicas must be at least 1"):
        simulate(at_once(1), plainly(), flat(), NONE, replicas=0)
    with pytest.raises(ValueError, match="lengths must be pairs"):
        Traffic([], 1.0, 1)


def test_the_scheduler_keeps_its_invariants_behind_the_device() -> None:
    shape = replace(SMALL, tree=None, blocks=40, behind=True)
    replica = Replica(shape, flat(), Accepting((0.7, 0.5)), random.Random(0))
    for job in Traffic([(10, 9), (70, 40), (33, 1)], 50.0, 40).jobs():
        replica.advance(job.due)
        replica.scheduler.check()
        replica.add(job)
    replica.advance(math.inf)
    replica.scheduler.check()
    assert not replica.scheduler.unfinished


# What is drawn.


@pytest.mark.parametrize("tree", [chain(5), preset("mc_sim_7b_63"), Tree((-1, 0, 0, 1, 2))])
def test_draws_have_the_expected_length(tree: Tree) -> None:
    accepting, noise = Accepting((0.8, 0.6, 0.5)), random.Random(2)
    reach = accepting.reach(tree)
    lengths = [1 + drawn(reach, noise) for _ in range(20_000)]
    assert statistics.fmean(lengths) == pytest.approx(
        expected_tokens(tree, accepting.rates), rel=0.02
    )
    assert max(lengths) <= tree.depth + 1


def test_an_acceptance_is_found_for_a_mean_length() -> None:
    found = constant_acceptance(2.6, chain(3))
    assert expected_tokens(chain(3), found.rates) == pytest.approx(2.6)
    with pytest.raises(ValueError, match=r"cannot have a mean length of 4\.5"):
        constant_acceptance(4.5, chain(3))
    with pytest.raises(ValueError, match="must lie in"):
        Accepting((1.2,))


def test_the_same_seed_is_the_same_simulation_and_another_is_not() -> None:
    traffic = Traffic([(16, 20), (40, 5)], 30.0, 60, seed=3)
    args = (SMALL, flat(), Accepting((0.7,)))
    assert simulate(traffic, *args) == simulate(traffic, *args)
    assert simulate(replace(traffic, seed=4), *args) != simulate(traffic, *args)


def test_the_best_tree_is_run_and_plain_where_drafts_do_not_pay() -> None:
    traffic = at_once(8, output=100)
    for accepting in (Accepting((0.9,)), Accepting((0.05,))):
        seconds = {
            tree: max(
                o.ended
                for o in simulate(traffic, replace(SMALL, tree=tree), flat(), accepting).served
            )
            for tree in (0, 1, None)
        }
        assert seconds[None] == pytest.approx(min(seconds[0], seconds[1]), rel=0.03)


@pytest.mark.parametrize("rate", [0.05, 0.9])
def test_choosing_the_best_tree_is_what_the_real_controller_comes_to(rate: float) -> None:
    def seconds(controller: Controller | None) -> float:
        replica = Replica(SMALL, flat(), Accepting((rate,)), random.Random(0))
        replica.scheduler.controller = controller
        for job in at_once(8, output=300).jobs():
            replica.add(job)
        replica.advance(math.inf)
        return replica.clock

    known = flat().steps
    real = seconds(Controller(known.trees, StepCosts(known.trees, dict(known.cells))))
    assert real == pytest.approx(seconds(None), rel=0.05)


def test_where_nothing_is_found_the_smallest_tree_runs() -> None:
    shape = replace(SMALL, tree=1, behind=False)
    one = simulate(at_once(1), shape, flat(), Accepting((0.9,), found=0.0)).served[0]
    assert one.latency == pytest.approx(19 * 0.010)
    half = simulate(at_once(1, output=300), shape, flat(), Accepting((0.9,), found=0.5)).served[0]
    whole = simulate(at_once(1, output=300), shape, flat(), Accepting((0.9,))).served[0]
    assert whole.latency < half.latency < 299 * 0.010


def test_how_often_a_lookup_finds_something_is_read_from_its_row() -> None:
    # 101 tokens: one with the prompt, 60 in 20 drafts, 40 in 40 plain steps.
    row = {
        "acceptance": {"drafts": 20, "length": 3.0, "per_position": [0.9, 0.6, 0.5]},
        "tokens_per_step": 101 / 61,
        "lengths": [[8, 101]],
    }
    assert accepting_of(row).found == pytest.approx(20 / 60)
    assert accepting_of(row).rates == pytest.approx((18 / 20, 12 / 18, 10 / 12))
    always = {**row, "tokens_per_step": 3.0, "lengths": []}
    assert accepting_of(always).found == 1.0


def test_rows_of_a_sweep_get_the_speed_up_that_the_costs_predict() -> None:
    fleet = Fleet(plainly(), flat(plain=0.010, drafted=0.012), NONE)
    lengths = [[16, 61]] * 2
    plain = {
        "label": "plain",
        "requests": 2,
        "lengths": lengths,
        "tokens_per_s": {"median": 200.0},
        "speedup": None,
        "k": None,
        "tree": "chain",
    }
    drafted = {
        **plain,
        "label": "x k=3",
        "k": 3,
        "speedup": {"median": 2.0},
        "acceptance": {"drafts": 40, "length": 4.0, "per_position": [1.0, 1.0, 1.0]},
        "tokens_per_step": 122 / 32,
    }
    rows = with_predictions(
        [plain, drafted, {**drafted, "k": 5}, {**drafted, "adaptive": True}], fleet
    )
    predicted = [row["predicted_speedup"] for row in rows]
    assert predicted[1] == pytest.approx(4 * 0.010 / 0.012, rel=0.08)
    assert predicted[0] is predicted[2] is predicted[3] is None


# Queues.


def test_a_single_server_has_the_queue_that_theory_gives() -> None:
    """One slot, fixed service time: M/D/1, whose mean wait is rho s / 2 (1 - rho) (Pollaczek-Khinchine)."""
    shape = replace(plainly(), max_num_seqs=1)
    service = 19 * 0.010
    rate = 0.7 / service
    outcome = simulate(Traffic([(16, 20)], rate, 6_000), shape, flat(), NONE)
    waited = statistics.fmean(one.latency - service for one in outcome.served)
    assert waited == pytest.approx(0.7 * service / (2 * 0.3), rel=0.1)
    assert outcome.busy == pytest.approx(0.7, rel=0.03)


def test_looking_at_queues_beats_turns_beats_chance() -> None:
    shape = replace(plainly(), max_num_seqs=1)
    traffic = Traffic([(16, 4), (16, 60)], 8.0, 800)
    waits = {
        router: statistics.fmean(
            one.first for one in simulate(traffic, shape, flat(), NONE, 4, router).served
        )
        for router in ("least", "turn", "random")
    }
    assert waits["least"] < waits["turn"] < waits["random"]


def test_twice_the_replicas_carry_twice_the_load() -> None:
    fleet = Fleet(plainly(), flat(), NONE)
    one = under(fleet, Traffic([(16, 20)], 20.0, 500), 1, Limits())
    two = under(fleet, Traffic([(16, 20)], 40.0, 1000), 2, Limits())
    assert two.tokens_per_s == pytest.approx(2 * one.tokens_per_s, rel=0.1)
    assert two.gpus == 2


def test_a_large_fleet_is_simulated_by_its_share() -> None:
    fleet = Fleet(plainly(), flat(), NONE, gpus=2)
    row = under(fleet, Traffic([(16, 20)], 2000.0, 800), 100, Limits(ttft_ms=500))
    assert (row.simulated, row.replicas, row.gpus) == (8, 100, 200)
    assert row.requests_per_s == pytest.approx(2000, rel=0.15)
    assert row.goodput == pytest.approx(row.requests_per_s)


def test_the_capacity_is_the_rate_where_the_limit_breaks() -> None:
    fleet = Fleet(plainly(), flat(), NONE)
    limits = Limits(ttft_ms=200.0)
    traffic = Traffic([(16, 20)], 1.0, 600)
    most = capacity(fleet, traffic, limits)
    highest = 8 / (19 * 0.010)  # slots by service time: no queue can do more
    assert 0.6 * highest < most <= 1.02 * highest
    below = under(fleet, replace(traffic, rate=0.95 * most), 1, limits)
    above = under(fleet, replace(traffic, rate=1.15 * most), 1, limits)
    assert below.ttft_ms.percentiles["p99"] <= 200 < above.ttft_ms.percentiles["p99"]
    with pytest.raises(ValueError, match="needs a limit"):
        capacity(fleet, traffic, Limits())
    with pytest.raises(ValueError, match="too few to see a queue grow"):
        capacity(fleet, replace(traffic, requests=10), limits)


def test_a_limit_on_tokens_alone_still_has_a_capacity() -> None:
    fleet = Fleet(plainly(), flat(), NONE)
    most = capacity(fleet, Traffic([(16, 20)], 1.0, 400), Limits(tpot_ms=50.0))
    assert 20 < most < 60


def test_a_limit_that_cannot_be_met_needs_infinitely_many() -> None:
    fleet = Fleet(plainly(), flat(), NONE)
    most = capacity(fleet, Traffic([(16, 20)], 1.0, 100), Limits(tpot_ms=5.0))
    assert most == 0.0
    with pytest.raises(ValueError, match="serves nothing"):
        needed(most, 10.0)


def test_gpus_are_rounded_up_and_spares_added() -> None:
    assert needed(3.0, 10.0) == 4
    assert needed(3.0, 10.0, gpus=2) == 8
    assert needed(3.0, 9.0, spare=0.25) == 4


# Against real engines.


def test_a_real_engine_takes_as_many_steps_as_the_simulated_one() -> None:
    """Same lengths, same limits, an always right drafter: steps and tokens a step must agree."""
    params = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    for k in (0, 3):
        variant = (
            given_variant({"model": "m", "num_speculative_tokens": k}) if k else plain_variant()
        )
        llm = TinyEngines()(variant)
        engine = llm._open.engine
        steps = 0
        step = engine.step

        def counted(step: Any = step) -> Any:
            nonlocal steps
            steps += 1
            return step()

        engine.step = counted  # type: ignore[method-assign]
        run = together(Side(variant, llm, params), PROMPTS)
        lengths = [(a.prompt_tokens, len(a.token_ids)) for a in run.answers]
        seen = Acceptance.of(run.counted)
        accepting = NONE if seen is None else Accepting((1.0,))
        shape = Shape(
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=160,
            blocks=400,
            tree=1 if k else 0,
            behind=False,
        )
        replica = Replica(shape, flat(), accepting, random.Random(0))
        for job in Traffic(lengths, math.inf, len(lengths), in_order=True).jobs():
            replica.add(job)
        replica.advance(math.inf)
        assert replica.tokens == run.tokens
        assert replica.steps == pytest.approx(steps, abs=1)


def test_a_row_of_a_record_is_predicted_from_costs_and_its_own_acceptance() -> None:
    costs = flat(plain=0.010, drafted=0.012, token=0.0001)
    fleet = Fleet(plainly(), costs, NONE)
    seconds = batch_seconds(fleet, [(16, 20)] * 4)
    row = {
        "label": "plain",
        "requests": 4,
        "lengths": [[16, 20]] * 4,
        "tokens_per_s": {"median": 80 / seconds * 1.05},
        "acceptance": None,
    }
    found = check(row, fleet)
    assert found.error == pytest.approx(1 / 1.05 - 1)
    assert accepting_of(row) == NONE
    drafted = {"acceptance": {"drafts": 100, "length": 2.5, "per_position": [0.8, 0.4, 0.3]}}
    assert accepting_of(drafted).rates == pytest.approx((0.8, 0.5, 0.75))


def test_costs_are_read_back_from_a_record() -> None:
    costs = flat(token=0.0001)
    made = Record.made("steps", describe("cpu"), {"model": "m"}, [], extra=costs.as_json())
    again = read_costs(made)
    assert again.steps.seconds(8, 1) == costs.steps.seconds(8, 1)
    assert again.prompts.seconds(10) == pytest.approx(0.001)
    assert again.prompts.seconds(0) == 0.0
    with pytest.raises(ValueError, match="foretell bench steps"):
        read_costs(Record.made("serve", describe("cpu"), {}, []))
