"""Whatever the controller does, the text is the same; a drafter that rested catches up; nothing stale is verified."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lab import Lab, Run, behind, draft_model, make_lab, prompts, tiny_decoder

from foretell.metrics import Recorder
from foretell.model.layers import fill_random
from foretell.ops.table import REFERENCE
from foretell.sampling_params import SamplingParams
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.controller import Choice, Controller, Wish
from foretell.spec.eagle import EagleDrafter, Fusion, FusionNet, Parts
from foretell.spec.ngram import NgramDrafter
from foretell.spec.presets import preset
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance


class Whims(Controller):
    """Chooses at random, changing its mind all the time."""

    def __init__(self, trees: Sequence[Tree], seed: int) -> None:
        super().__init__(trees)
        self.draws = random.Random(seed)

    def choose(self, wishes: Sequence[Wish], room: int | None = None) -> Choice:
        super().choose(wishes, room)
        return Choice(self.draws.randrange(len(self.trees)), float(len(wishes)), 1.0)


class Script(Controller):
    """Chooses what it is told, step by step; the last one for ever."""

    def __init__(self, trees: Sequence[Tree], script: Sequence[int]) -> None:
        super().__init__(trees)
        self.script = list(script)

    def choose(self, wishes: Sequence[Wish], room: int | None = None) -> Choice:
        tree = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return Choice(tree, float(len(wishes)), 1.0)


def answers(lab: Lab, params: Sequence[SamplingParams]) -> dict[str, Run]:
    for place, (prompt, own) in enumerate(zip(prompts(len(params), seed=7), params, strict=True)):
        lab.add(str(place), prompt, own, seed=place)
    return lab.drain()


def mixed(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, max_tokens=40),
        SamplingParams(temperature=temperature, max_tokens=9),
        SamplingParams(temperature=temperature, max_tokens=33, num_speculative_tokens=1),
        SamplingParams(temperature=temperature, max_tokens=25, num_speculative_tokens=0),
        SamplingParams(temperature=temperature, max_tokens=40, top_p=0.9),
    ]


def texts(runs: dict[str, Run]) -> dict[str, list[int]]:
    return {name: run.tokens for name, run in runs.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["draft model", "tree", "ngram"])
def test_the_text_is_the_same_whatever_the_controller_does(
    temperature: float, late: bool, kind: str
) -> None:
    plain = texts(answers(make_lab(), mixed(temperature)))
    drafter = NgramDrafter(1, 3) if kind == "ngram" else draft_model(tiny_decoder(1, layers=1))
    tree = preset("eagle") if kind == "tree" else chain(5)
    for seed in range(3):
        lab = make_lab(drafter, tree, adaptive=True, max_num_batched_tokens=64)
        lab.engine.scheduler.controller = Whims(lab.engine.scheduler.trees, seed)
        lab = behind(lab) if late else lab
        assert texts(answers(lab, mixed(temperature))) == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_under_the_real_controller(temperature: float) -> None:
    plain = texts(answers(make_lab(), mixed(temperature)))
    lab = make_lab(draft_model(tiny_decoder(0)), chain(4), adaptive=True)
    assert len(lab.engine.scheduler.trees) == 5
    assert texts(answers(lab, mixed(temperature))) == plain


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pause", [1, 3, 40])
def test_a_drafter_that_rested_knows_the_text_again(late: bool, pause: int) -> None:
    """The target drafts for itself, so every draft is right, but only if its KV has no holes."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    lab = make_lab(draft_model(tiny_decoder(0)), chain(3), adaptive=True)
    script = [3, 3, *[0] * pause, 3, 3, *[0] * pause, 3]
    lab.engine.scheduler.controller = Script(lab.engine.scheduler.trees, script)
    lab = behind(lab) if late else lab
    run = lab.solo(prompts(1, seed=3)[0], params)
    assert len(run.tokens) == 100
    assert run.drafted > 12
    # Only the last draft may be cut by the limit.
    assert run.drafted - run.accepted <= 3


def test_a_resting_drafter_is_not_run() -> None:
    calls = []
    drafter = draft_model(tiny_decoder(0))
    propose = drafter.propose
    drafter.propose = lambda window, shape: calls.append(shape) or propose(window, shape)  # type: ignore[method-assign,func-returns-value]
    lab = make_lab(drafter, chain(3), adaptive=True)
    lab.engine.scheduler.controller = Script(lab.engine.scheduler.trees, [0])
    run = lab.solo(prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert len(run.tokens) == 30
    assert calls == []


def test_blocks_that_a_resting_drafter_has_not_seen_are_not_shared() -> None:
    """A second request with the same text must find a drafter that knows it, or compute it anew."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    lab = make_lab(draft_model(tiny_decoder(0)), chain(3), adaptive=True)
    lab.engine.scheduler.controller = Script(lab.engine.scheduler.trees, [0])
    prompt = prompts(1, seed=5)[0]
    first = lab.solo(prompt, params)
    again = make_lab(draft_model(tiny_decoder(0)), chain(3), adaptive=True)
    for engine in (lab, again):
        engine.engine.scheduler.controller = Script(engine.engine.scheduler.trees, [3])
    text = [*prompt, *first.tokens]
    for engine in (lab, again):
        run = engine.solo(text, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        assert run.drafted - run.accepted <= 3


def test_a_draft_of_another_tree_is_dropped() -> None:
    """Nodes of a chain would be siblings in a tree: they are verified as what they were drafted for, or not at all."""
    lab = make_lab(draft_model(tiny_decoder(0)), preset("eagle"), adaptive=True)
    runner = lab.engine.runner
    trees = [shape.tree for shape in runner.shapes]
    two, full = trees.index(chain(2)), len(trees) - 1
    assert runner._fits(full, full)
    assert runner._fits(two, trees.index(chain(1)))
    assert not runner._fits(two, full)
    assert not runner._fits(None, two)


def test_rejection_keeps_its_law_under_whims() -> None:
    """First two tokens of many requests, against plain decoding's own frequencies."""
    target = tiny_decoder(0, vocabulary=96)
    prompt = prompts(1, seed=11)[0]
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=6, ignore_eos=True)
    counts = []
    for adaptive in (False, True):
        drafter = draft_model(tiny_decoder(4, layers=1), "rejection")
        lab = make_lab(
            drafter if adaptive else None,
            chain(3) if adaptive else None,
            target=target,
            acceptance="rejection",
            adaptive=adaptive,
            max_num_seqs=32,
            max_num_batched_tokens=512,
        )
        if adaptive:
            lab.engine.scheduler.controller = Whims(lab.engine.scheduler.trees, 1)
        for seed in range(600):
            lab.add(str(seed), prompt, params, seed=1000 * adaptive + seed + 17)
        runs = lab.drain()
        pairs: dict[tuple[int, ...], int] = {}
        for run in runs.values():
            pairs[tuple(run.tokens[1:4:2])] = pairs.get(tuple(run.tokens[1:4:2]), 0) + 1
        counts.append(pairs)
    keys = sorted(set(counts[0]) | set(counts[1]))
    table = torch.tensor([[c.get(key, 0) for key in keys] for c in counts], dtype=torch.float64)
    common = table[:, table.sum(0) >= 10]
    expected = common.sum(0, keepdim=True) / 2
    statistic = float(((common - expected) ** 2 / expected).sum())
    degrees = common.shape[1] - 1
    assert degrees >= 5
    # Mean and deviation of chi-square; five deviations are one in a million.
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


def test_the_choice_its_expectation_and_the_outcome_are_counted() -> None:
    recorder = Recorder()
    lab = make_lab(draft_model(tiny_decoder(0)), chain(3), adaptive=True)
    lab.engine.watcher = recorder
    lab.engine.scheduler.controller = Script(lab.engine.scheduler.trees, [3, 3, 3, 0, 0, 0, 3])
    lab.solo(prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    steps = recorder.snapshot().steps
    assert steps.by_depth[0] >= 3
    assert steps.by_depth[3] >= 5
    assert steps.switches >= 2
    assert steps.foreseen > 0
    assert steps.expected_tokens == steps.foreseen
    assert steps.foreseen_tokens <= steps.emitted <= 40
    assert steps.seconds > 0


def test_adaptive_is_off_where_the_text_of_a_seed_would_depend_on_timing() -> None:
    lab = make_lab(draft_model(tiny_decoder(0)), chain(3), adaptive=None)
    assert lab.engine.scheduler.controller is not None
    drafter = draft_model(tiny_decoder(0), "rejection")
    lab = make_lab(drafter, chain(3), acceptance="rejection", adaptive=None)
    assert lab.engine.scheduler.controller is None
    assert make_lab(draft_model(tiny_decoder(0)), chain(3)).engine.scheduler.controller is None


def test_k_is_the_most_that_is_drafted() -> None:
    lab = make_lab(draft_model(tiny_decoder(0)), chain(5), adaptive=True)
    assert max(tree.depth for tree in lab.engine.scheduler.trees) == 5


def eagle(seed: int = 5) -> EagleDrafter:
    """EAGLE-1 with random weights: its attention reads all that it was shown, with the features of it."""
    config = replace(tiny_decoder(0).config, layers=1, windows=(), layer_ropes=())
    net = FusionNet(Parts(config, 0, 0), Fusion(), torch.float64, REFERENCE)
    fill_random(net, seed, torch.device("cpu"))
    vocabulary = whole(config.vocab_size, torch.device("cpu"))
    return EagleDrafter(net, (-1,), vocabulary, Acceptance.MATCH)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pause", [1, 5, 70])
def test_a_drafter_of_features_that_rested_drafts_as_if_it_had_not(pause: int, late: bool) -> None:
    """Drafts depend on the text and on every feature before them: at the same length they must be the same."""
    drafts: list[dict[int, list[int]]] = []
    for script in ([3], [3, 3, *[0] * pause, 3]):
        drafter, seen = eagle(), {}
        propose = drafter.propose

        def noted(window, shape, propose=propose, seen=seen):  # type: ignore[no-untyped-def]
            draft = propose(window, shape)
            if shape.tree.nodes > 1:
                for length, tokens in zip(
                    window.length.tolist(), draft.tokens.tolist(), strict=True
                ):
                    seen[length] = tokens
            return draft

        drafter.propose = noted  # type: ignore[method-assign]
        lab = make_lab(drafter, chain(3), adaptive=True)
        lab.engine.scheduler.controller = Script(lab.engine.scheduler.trees, script)
        lab = behind(lab) if late else lab
        run = lab.solo(
            prompts(1, seed=3)[0], SamplingParams(temperature=0.0, max_tokens=110, ignore_eos=True)
        )
        assert len(run.tokens) == 110
        drafts.append(seen)
    common = drafts[0].keys() & drafts[1].keys()
    assert len(common) > 20
    assert {n: drafts[0][n] for n in common} == {n: drafts[1][n] for n in common}


def test_requests_that_come_and_go_while_an_eagle_rests_keep_their_text() -> None:
    plain = texts(answers(make_lab(), mixed(0.7)))
    for seed in range(3):
        lab = make_lab(eagle(), chain(3), adaptive=True, max_num_batched_tokens=48)
        lab.engine.scheduler.controller = Whims(lab.engine.scheduler.trees, seed)
        assert texts(answers(lab, mixed(0.7))) == plain
