"""The doctor on running engines: faults put into tiny ones are named first.

Time is made up (a clock that the steps themselves turn), so what is found does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lab import Lab, draft_model, make_lab, prompts, tiny_decoder
from typer.testing import CliRunner

from foretell.cli import app
from foretell.doctor.evidence import Evidence, Machine
from foretell.doctor.findings import Rank, diagnose
from foretell.doctor.gather import Probe, measure
from foretell.engine.stopwatch import Stopwatch
from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.ngram import NgramDrafter
from foretell.spec.tree import chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
QUIET = Machine("cpu", 8, 8, 0.0)


def probes(count: int = 6) -> list[Probe]:
    kinds = ("code", "chat")
    return [Probe(kinds[i % 2], tuple(tokens)) for i, tokens in enumerate(prompts(count, seed=2))]


def with_clock(lab: Lab, verify: float = 1.0, node: float = 0.01, draft: float = 0.05) -> Lab:
    """A verification takes `verify` seconds and `node` for each row of the batch; a drafted token takes `draft`."""
    now = [0.0]
    runner, shapes = lab.engine.runner, lab.engine.runner.shapes
    launch, propose = runner.launch, runner.draft

    def slow_launch(plan):  # type: ignore[no-untyped-def]
        now[0] += verify + node * len(plan.decode) * shapes[plan.tree].tree.nodes
        return launch(plan)

    def slow_draft(plan, over):  # type: ignore[no-untyped-def]
        now[0] += draft * shapes[plan.next_tree].tree.depth
        return propose(plan, over)

    runner.launch, runner.draft = slow_launch, slow_draft  # type: ignore[method-assign]
    lab.engine._stopwatch = Stopwatch(lambda: now[0])
    return lab


def examine(
    lab: Lab, rows: int = 1, params: SamplingParams = PARAMS, method: str = "draft_model"
) -> Evidence:
    about = Evidence(method=method, machine=QUIET, acceptance="match")
    return measure(lab.engine, probes(), params, rows, about)


def codes(evidence: Evidence) -> list[str]:
    return [f.code for f in diagnose(evidence) if f.rank is not Rank.HINT]


def aligned() -> DraftModelDrafter:
    return draft_model(tiny_decoder(0))


def test_a_pair_that_is_well() -> None:
    """The target drafts for itself: everything is accepted, the text is the same, and the prediction holds."""
    lab = with_clock(make_lab(aligned(), chain(4), adaptive=True))
    found = examine(lab)
    assert found.same_text is True
    assert min(found.rates) > 0.99
    assert found.length == pytest.approx(5, abs=0.1)
    assert found.predicted_speedup == pytest.approx(found.measured_speedup, rel=0.1)
    assert found.by_kind.keys() == {"code", "chat"}
    assert codes(found) in ([], ["k_too_low"])


def test_a_drafter_of_another_target_is_misaligned() -> None:
    lab = with_clock(make_lab(draft_model(tiny_decoder(7)), chain(4), adaptive=True))
    found = examine(lab)
    assert found.same_text is True, "a wrong drafter never changes the text"
    assert codes(found)[0] == "misaligned"


def test_a_slow_drafter_is_named() -> None:
    lab = with_clock(make_lab(aligned(), chain(4), adaptive=True), draft=0.6)
    assert codes(examine(lab))[0] == "slow_drafter"


def test_random_sampling_is_named() -> None:
    """A drafter that proposes the likeliest token, against a target that draws at a high temperature."""
    size = tiny_decoder(0).config.vocab_size
    import torch

    vocabulary = same(size, size, size, torch.device("cpu"))
    drafter = DraftModelDrafter(tiny_decoder(0), vocabulary, Acceptance.MATCH, greedy=True)
    lab = with_clock(make_lab(drafter, chain(4), adaptive=True))
    hot = SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True)
    found = examine(lab, params=hot)
    assert found.greedy > 4
    assert codes(found)[0] == "high_entropy"


def test_a_long_chain_for_a_poor_drafter_is_too_high() -> None:
    """A drafter that knows one token in two (the target itself, with some of its drafts spoilt)."""
    lab = with_clock(make_lab(_Spoilt(tiny_decoder(0)), chain(12), adaptive=True), node=0.06)
    found = examine(lab)
    assert 0.3 < found.rates[0] < 0.7
    assert codes(found)[0] == "k_too_high"


def test_a_batch_that_fills_the_machine_is_too_large() -> None:
    lab = with_clock(make_lab(aligned(), chain(2), adaptive=True), verify=0.3, node=0.7, draft=0.01)
    lab.engine.runner.launch = _saturating(lab)  # type: ignore[method-assign]
    found = measure(lab.engine, probes(16), PARAMS, 8, Evidence("draft_model", machine=QUIET))
    assert codes(found)[0] == "batch_too_large"


def _saturating(lab: Lab):  # type: ignore[no-untyped-def]
    """Free up to four rows, then in proportion and worse: verification of drafts has no room."""
    launch = lab.engine.runner.launch
    shapes, watch = lab.engine.runner.shapes, lab.engine._stopwatch
    clock, extra = watch._clock, [0.0]
    watch._clock = lambda: clock() + extra[0]

    def slow(plan):  # type: ignore[no-untyped-def]
        rows = len(plan.decode) * shapes[plan.tree].tree.nodes
        own = 0.3 + 0.7 * rows  # what the clock adds by itself
        extra[0] += max(1.0, (rows / 6) ** 2) - own
        return launch(plan)

    return slow


def test_a_pool_that_is_too_small_is_named() -> None:
    lab = make_lab(
        aligned(),
        chain(3),
        adaptive=True,
        kv_cache_memory_bytes=140 << 10,
        max_model_len=72,
        enable_prefix_caching=False,
    )
    found = examine(with_clock(lab), rows=6)
    assert found.preemptions > 0 or found.room < 6
    assert codes(found)[0] == "memory_tight"


def test_an_engine_without_a_drafter_is_told_what_a_lookup_would_bring() -> None:
    found = examine(with_clock(make_lab()), method="none")
    assert found.ngram >= 1
    assert found.rates == ()
    assert codes(found) == []


def test_the_controller_is_put_back() -> None:
    lab = with_clock(make_lab(NgramDrafter(1, 3), chain(4), adaptive=True))
    before = lab.engine.scheduler.controller, lab.engine.watcher
    examine(lab, method="ngram")
    assert (lab.engine.scheduler.controller, lab.engine.watcher) == before


class _Spoilt(DraftModelDrafter):
    """The target itself, but every second token it drafts is another one."""

    def __init__(self, model) -> None:  # type: ignore[no-untyped-def]
        import torch

        size = model.config.vocab_size
        super().__init__(model, same(size, size, size, torch.device("cpu")), Acceptance.MATCH)

    def propose(self, window, shape):  # type: ignore[no-untyped-def]
        import torch

        draft = super().propose(window, shape)
        place = (window.length.unsqueeze(1) + shape.depths) * 7 + draft.tokens * 5
        wrong = (place % 2 == 0) & (shape.depths > 0)
        tokens = torch.where(wrong, (draft.tokens + 1) % 90, draft.tokens)
        return type(draft)(tokens=tokens)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--spec-method", "ngram", "--spec-tokens", "0"], "not_loaded"),
        (["--model", "/nowhere.gguf"], "not_loaded"),
    ],
)
def test_what_does_not_load_is_a_finding_with_its_exit_code(
    arguments: Sequence[str], code: str
) -> None:
    run = CliRunner().invoke(app, ["doctor", *arguments])
    assert run.exit_code == 4, run.output
    assert code in run.output
