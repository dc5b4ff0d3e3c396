"""The doctor's judgement on made-up evidence: the right cause first, with a figure and a remedy.

The world is a pair that is well: an aligned drafter that costs a twentieth of the target, four tokens drafted. Every
test breaks one thing, as a user would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from foretell.doctor.evidence import Evidence, Machine, Speed
from foretell.doctor.findings import Finding, Rank, diagnose
from foretell.doctor.gather import Probe, looked_up
from foretell.doctor.report import as_dict
from foretell.spec.acceptance import expected_tokens
from foretell.spec.compat import Check, SelfTest, Suspect, find_causes
from foretell.spec.costs import StepCosts
from foretell.spec.ladder import ladder
from foretell.spec.tree import Tree, chain

Cost = Callable[[int, Tree], float]
ALIGNED = (0.8, 0.78, 0.75, 0.74, 0.73, 0.72, 0.71, 0.7)
POOR = (0.04, 0.04, 0.04, 0.04)


def costs(
    k: int, verify: Cost | None = None, draft: float = 0.05, rows: tuple[int, ...] = (1,)
) -> StepCosts:
    """Seconds of a step: memory bound unless `verify` says otherwise; `draft` plain steps for each drafted token."""
    trees = ladder(chain(k))
    table = StepCosts(trees)
    for count in rows:
        for place, tree in enumerate(trees):
            own = draft * tree.depth
            target = (lambda b, t: 1 + 0.01 * b * t.nodes) if verify is None else verify
            table.add(count, place, 0.01 * (target(count, tree) + own), 0.01 * own)
    return table


def well(**changes: object) -> Evidence:
    evidence = Evidence(
        method="draft_model",
        checkpoint="small",
        rows=1,
        costs=costs(4),
        rates=ALIGNED[:4],
        by_kind={"code": 3.1, "chat": 2.9},
        ngram=1.2,
        same_text=True,
        room=64,
        max_num_seqs=64,
        machine=Machine("cpu", 8, 8, 0.1),
    )
    return measured(replace(evidence, **changes))  # type: ignore[arg-type]


def measured(e: Evidence) -> Evidence:
    """Speeds as the costs and the acceptance say, unless they were set."""
    if e.plain.tokens or not e.costs.cells:
        return e
    plain = e.rows / e.costs.seconds(e.rows, 0)
    drafted = e.speed(e.tree)
    return replace(
        e,
        plain=Speed(1000, 1000 / plain, 1000, 1000 / plain),
        drafted=Speed(1000, 1000 / drafted, 400, 1000 / drafted),
    )


def first(e: Evidence) -> Finding:
    found = diagnose(e)
    assert found, "nothing was found"
    for finding in found:
        assert finding.figure
        assert finding.remedy
        assert finding.gain >= 1
    return found[0]


def test_a_pair_that_is_well_gets_no_finding() -> None:
    found = diagnose(well())
    assert [f for f in found if f.rank is not Rank.HINT] == []
    assert as_dict(well(), found)["healthy"] is True


BUSY = Machine("cpu", 8, 8, 5.2)
FAULTS: list[tuple[str, Evidence, str]] = [
    (
        "wrong head for the target",
        well(rates=POOR, tested=1.02, control=1.02, causes=("wrong target: trained for another",)),
        "wrong_target",
    ),
    (
        "shuffled features",
        well(rates=(0.25, 0.1, 0.1, 0.1), tested=1.28, control=1.27),
        "features_ignored",
    ),
    (
        "wrong layers",
        well(
            rates=POOR,
            tested=1.03,
            control=1.02,
            causes=("wrong layers: 2.40 tokens a step if you pass target_layers=[2, 16, 29]",),
        ),
        "wrong_layers",
    ),
    (
        "wrong rope base",
        well(
            rates=(0.3, 0.1, 0.1, 0.1),
            tested=1.2,
            control=1.1,
            causes=("wrong rope base: 2.10 tokens a step if you write rope_theta 500000",),
        ),
        "wrong_rope",
    ),
    (
        "wrong residual",
        well(rates=POOR, causes=("wrong residual: 2.10 tokens a step if you pass x",)),
        "wrong_residual",
    ),
    (
        "wrong template, by the start-up proof",
        well(rates=POOR, causes=("wrong template: 2.0 tokens a step on text, 1.0 on chat",)),
        "wrong_template",
    ),
    (
        "wrong template, prompts sent raw",
        well(rates=(0.3, 0.3, 0.3, 0.3), template=False),
        "wrong_template",
    ),
    ("slow drafter", well(costs=costs(4, draft=0.5)), "slow_drafter"),
    (
        "k too high",
        well(costs=costs(16, lambda b, t: 1 + 0.06 * t.nodes, draft=0.02), rates=(0.5, 0.45, 0.4)),
        "k_too_high",
    ),
    ("k too low", well(costs=costs(1), rates=(0.9,)), "k_too_low"),
    (
        "batch too large",
        well(
            rows=64,
            costs=costs(4, lambda b, t: max(1.0, b * t.nodes / 32), rows=(1, 64)),
        ),
        "batch_too_large",
    ),
    (
        "high-entropy sampling",
        well(rates=(0.3, 0.25, 0.2, 0.2), temperature=1.5, greedy=3.0),
        "high_entropy",
    ),
    (
        "tokenizer mismatch",
        well(rates=(0.15, 0.1, 0.1, 0.1), causes=("wrong tokenizer: 31% of the tokens agree",)),
        "tokenizer_mismatch",
    ),
    ("small shared vocabulary", well(shared_vocabulary=0.4), "tokenizer_mismatch"),
    ("memory too tight", well(preemptions=9, room=3, rows=8), "memory_tight"),
    ("CPU oversubscribed by others", well(machine=BUSY), "cpu_oversubscribed"),
    ("more threads than cores", well(machine=Machine("cpu", 2, 16)), "cpu_oversubscribed"),
    ("a drafter of no use", well(rates=POOR), "misaligned"),
    (
        "n-gram would do better",
        well(rates=(0.5, 0.4, 0.4, 0.4), ngram=4.0),
        "ngram_better",
    ),
    ("text differs", well(same_text=False), "text_differs"),
]


@pytest.mark.parametrize(("evidence", "code"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_the_cause_is_named_first(evidence: Evidence, code: str) -> None:
    finding = first(measured(evidence))
    assert finding.code == code
    assert finding.rank is not Rank.HINT


@pytest.mark.parametrize("cores", [8, 16])
def test_a_busy_machine_goes_before_every_other_cause(cores: int) -> None:
    """Figures beside other work are void, whatever they say."""
    found = diagnose(well(rates=POOR, machine=Machine("cpu", cores, cores, 3.0)))
    assert [f.code for f in found][:2] == ["cpu_oversubscribed", "misaligned"]


def test_what_follows_from_a_cause_is_a_hint() -> None:
    found = diagnose(well(rates=POOR, causes=("wrong target: x",)))
    assert found[0].code == "wrong_target"
    assert {f.code: f.rank for f in found}["plain_better"] is Rank.HINT


def test_a_remedy_that_is_followed_heals() -> None:
    sick = well(costs=costs(16, lambda b, t: 1 + 0.06 * t.nodes, draft=0.02), rates=(0.5, 0.45))
    finding = first(sick)
    k = int(finding.remedy.split("num_speculative_tokens=")[1].split()[0])
    healed = well(
        costs=costs(k, lambda b, t: 1 + 0.06 * t.nodes, draft=0.02), rates=sick.rates, ngram=1.0
    )
    assert healed.speed(healed.tree) / sick.speed(sick.tree) == pytest.approx(finding.gain)
    assert "k_too_high" not in {f.code for f in diagnose(healed)}


# The guide's four troubles.


def test_trouble_1_out_of_memory() -> None:
    said = (
        "max_model_len=8192 needs 1,281.1 MiB of KV cache, but 0.0 MiB are left beside 3,390 MiB weights, 1,202 MiB "
        "drafter of 4,608 MiB. What helps, the cheapest first: raise gpu_memory_utilization from 0.9 to 0.97 (358 MiB)"
    )
    finding = first(Evidence(method="draft_model", load_error=said))
    assert finding.code == "out_of_memory"
    assert "gpu_memory_utilization" in finding.figure
    assert "foretell plan" in finding.remedy


def test_trouble_2_worse_output() -> None:
    """It cannot come from drafts: the text is compared, and a drafter of no use is another finding."""
    assert first(well(same_text=False)).code == "text_differs"
    found = diagnose(well(rates=POOR))
    assert "text_differs" not in {f.code for f in found}
    assert found[0].code == "misaligned"
    assert "trained for this very target" in found[0].remedy


def test_trouble_3_no_gain() -> None:
    """Acceptance too low, drafter too slow, k too high, batch: each with its figure and break-even."""
    slow = diagnose(well(costs=costs(4, draft=0.6)))
    assert slow[0].code == "slow_drafter"
    assert "pays from an acceptance of" in slow[0].figure
    assert "tenth of the target" in slow[0].remedy
    hopeless = diagnose(well(costs=costs(4, draft=3.0)))
    assert "never pays" in hopeless[0].figure
    assert "plain_better" in {f.code for f in hopeless}


def test_trouble_4_medusa_does_not_load() -> None:
    finding = first(Evidence(method="medusa", load_error="KeyError: 'medusa_num_heads'"))
    assert finding.code == "not_loaded"
    assert "medusa_num_heads" in finding.remedy
    assert "config.json" in finding.remedy


# Its five questions.


def test_question_1_quality_does_not_fall() -> None:
    assert as_dict(well(), [])["same_text"] is True
    assert "text_differs" not in {f.code for f in diagnose(well())}


def test_question_2_the_best_k_is_that_of_costs_and_acceptance() -> None:
    e = well(costs=costs(8, draft=0.04), rates=ALIGNED)
    k = e.costs.trees[e.best].depth
    by_hand = max(
        range(9),
        key=lambda n: expected_tokens(chain(n), ALIGNED) / (1 + 0.01 * (n + 1) + 0.04 * n),
    )
    assert abs(k - by_hand) <= 2  # the ladder has not every length
    assert 4 <= k <= 8


def test_question_3_not_any_small_model_will_do() -> None:
    assert first(well(rates=POOR)).code == "misaligned"
    assert first(well(rates=POOR, causes=("wrong tokenizer: x",))).code == "tokenizer_mismatch"
    assert diagnose(well())[:1] in ([], [f for f in diagnose(well()) if f.rank is Rank.HINT][:1])


def test_question_4_not_always_faster() -> None:
    """A target so small that drafting costs as much as it."""
    e = well(costs=costs(4, draft=1.0))
    assert e.predicted_speedup < 1
    codes = [f.code for f in diagnose(e)]
    assert codes[0] == "slow_drafter"
    assert "plain_better" in codes


def test_question_5_batches() -> None:
    """Drafts add to batching while memory is the limit, and stop to where computing is."""
    roomy = well(rows=8, costs=costs(4, rows=(1, 8)))
    assert roomy.predicted_speedup > 1.5
    full = well(rows=64, costs=costs(4, lambda b, t: max(1.0, b * t.nodes / 32), rows=(1, 64)))
    assert full.predicted_speedup < 1
    assert first(full).code == "batch_too_large"
    alone = diagnose(replace(roomy, rows=1))
    assert "batch_too_small" in {f.code for f in alone}


def test_predicted_against_measured() -> None:
    e = well()
    slow = replace(e, drafted=Speed(1000, 100.0, 400, 2.0 * e.drafted.step_seconds))
    found = {f.code: f for f in diagnose(slow)}
    assert "predicted" in found["unpredicted"].figure
    assert math.isclose(slow.measured_speedup, e.measured_speedup / 2)


def test_a_lookup_is_counted_in_the_text_that_was_made() -> None:
    """a b c d | a b -> the lookup drafts what followed a b; b at the end of the prompt is found."""
    probe = Probe("x", (1, 2, 3, 4, 1))
    assert looked_up([probe], [(2, 3, 4, 9)]) == 4.0
    assert looked_up([Probe("x", (1, 2, 3))], [(7, 8, 9)]) == 1.0
    assert looked_up([], []) == 0.0


def test_every_cause_that_the_start_up_proof_can_name_has_a_finding() -> None:
    poor = SelfTest(1.02, 1.02, 40, 3, {"text": 1.3, "chat": 1.0}, 1.0)
    names = ("wrong layers", "wrong residual", "wrong rope base")
    tried = [(Suspect(name, "pass it", None), 2.0) for name in names]  # type: ignore[arg-type]
    check = Check("tokenizer", False, "31% of the tokens agree")
    causes = [
        *find_causes(poor, tried, [check]),
        *find_causes(replace(poor, by_kind={}), [], []),
    ]
    assert len(causes) >= 6
    for cause in causes:
        finding = first(well(rates=POOR, causes=(cause,)))
        assert finding.rank is Rank.CAUSE, cause
        assert finding.code != "misaligned", cause
