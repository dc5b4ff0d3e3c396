"""Chained drafters: the second one's KV stays right whoever drafted, and no text or law changes."""

from __future__ import annotations

import pytest
import torch
from lab import Lab, ScriptedDrafter, make_lab, prompts
from oracles import V, cycle_target, eagle1_oracle, eagle3_oracle

from foretell.sampling_params import SamplingParams
from foretell.spec.chained import ChainedDrafter
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.dynamic_tree import Growth
from foretell.spec.eagle import EagleDrafter
from foretell.spec.suffix import SuffixDrafter, SuffixLimits
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

CPU = torch.device("cpu")
TARGET = cycle_target()
TREES = {
    "chain": chain(4),
    "tree": Tree((-1, 0, 0, 1, 1, 3, 5)),
    "grown": Growth(top_k=3, depth=4, nodes=12),
}


def exact(kind: str, acceptance: str, growth: Growth | None) -> EagleDrafter:
    if kind == "eagle1":
        net, taps = eagle1_oracle(TARGET), (-1,)
    else:
        net, taps = eagle3_oracle(TARGET, (2, 3, 4)), (2, 3, 4)  # type: ignore[assignment]
    return EagleDrafter(net, taps, whole(V, CPU), Acceptance(acceptance), growth)


def lab_of(free: object, kind: str, tree: str, acceptance: str = "match", **more: object) -> Lab:
    shape = TREES[tree]
    growth = shape if isinstance(shape, Growth) else None
    trained = exact(kind, acceptance, growth)
    drafter = ChainedDrafter(free, trained, growth is not None)  # type: ignore[arg-type]
    bound = shape.bound if isinstance(shape, Growth) else shape
    return make_lab(
        drafter,
        bound,
        TARGET,
        acceptance,
        grows=growth is not None,
        draws=trained.draws,
        scratch=trained.scratch,
        **more,
    )


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_a_wrong_first_drafter_spoils_its_own_steps_only(
    tree: str, kind: str, acceptance: str, temperature: float
) -> None:
    """Its drafts are refused; in the steps after them the network drafts to the full depth, from sound KV."""
    fired = []

    def wrong(text: list[int], shape: Tree) -> list[int]:
        fires = len(text) % 3 == 0
        fired.append(fires)
        return [-1, *[(text[-1] + 2) % V if fires else -1] * (shape.nodes - 1)]

    lab = lab_of(ScriptedDrafter(wrong), kind, tree, acceptance)
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
    run = lab.solo([3, 9, 4], params)
    assert run.tokens == [(5 + i) % V for i in range(60)]
    sizes = [len(delta.token_ids) for delta in run.deltas[1:-1]]
    depth = TREES[tree].depth
    beside = tree == "tree" and acceptance == "match"  # the network's other candidates stay
    for size, fires in zip(sizes, fired, strict=False):
        assert size == (depth + 1 if not fires else 1) or (fires and beside)
    assert 2 < sum(fired[: len(sizes)]) < len(sizes)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("tree", TREES)
def test_a_right_first_drafter_is_accepted_whole(tree: str, acceptance: str) -> None:
    def right(text: list[int], shape: Tree) -> list[int]:
        return [-1, *((text[-1] + shape.depths[i]) % V for i in range(1, shape.nodes))]

    lab = lab_of(ScriptedDrafter(right), "eagle3", tree, acceptance)
    params = SamplingParams(temperature=0.2, max_tokens=60, ignore_eos=True)
    run = lab.solo([3, 9, 4], params)
    assert run.tokens == [(5 + i) % V for i in range(60)]
    assert {len(d.token_ids) for d in run.deltas[1:-1]} == {TREES[tree].depth + 1}


@pytest.mark.parametrize("tree", TREES)
def test_mixed_batches_with_a_chain_give_the_text_of_plain_decoding(tree: str) -> None:
    suffix = SuffixDrafter(SuffixLimits(shortest=1, tokens=2048))
    lab = lab_of(suffix, "eagle3", tree, learner=suffix, max_num_batched_tokens=128)
    plain = make_lab(target=TARGET)
    for turn in range(2):
        for i, prompt in enumerate(prompts(6)):
            params = SamplingParams(
                temperature=3.0 * (i % 3), max_tokens=30, repetition_penalty=1 + i % 2
            )
            for one in (lab, plain):
                one.add(f"{turn}{i}", [t % (V - 1) for t in prompt], params, seed=i)
        got, expected = lab.drain(), plain.drain()
        assert {k: r.tokens for k, r in got.items()} == {k: r.tokens for k, r in expected.items()}
        assert sum(r.accepted for r in got.values()) > 0
