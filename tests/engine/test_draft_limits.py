"""How much is drafted for one request: its own wish, and the drafter's longest text. Neither changes the text."""

from __future__ import annotations

import pytest
import torch
from lab import Lab, behind, draft_model, make_lab, prompts, tiny_decoder
from oracles import V, cycle_target, eagle1_oracle

from foretell.runner.memory import weights_bytes
from foretell.sampling_params import SamplingParams
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.dynamic_tree import Growth
from foretell.spec.eagle import EagleDrafter
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

TREES = [chain(5), Tree((-1, 0, 0, 1, 1, 2, 3, 6, 7))]
PROMPTS = prompts(6)
CAPS = [0, 1, 2, 3, None, 9]
CYCLE = cycle_target()


def wish(cap: int | None, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=24, ignore_eos=True, num_speculative_tokens=cap
    )


def most(tree: Tree, cap: int | None) -> int:
    """Nodes of the tree that a request may be drafted."""
    return sum(0 < depth <= (tree.depth if cap is None else cap) for depth in tree.depths)


def eagle(growth: Growth, acceptance: str) -> Lab:
    drafter = EagleDrafter(
        eagle1_oracle(CYCLE), (-1,), whole(V, torch.device("cpu")), Acceptance(acceptance), growth
    )
    return make_lab(drafter, growth.bound, CYCLE, acceptance)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("acceptance", ["match", "rejection", "typical"])
@pytest.mark.parametrize("late", [False, True])
def test_a_request_gets_no_deeper_drafts_than_it_wants(
    tree: Tree, acceptance: str, late: bool
) -> None:
    lab = make_lab(draft_model(tiny_decoder(0), acceptance), tree, acceptance=acceptance)
    lab = behind(lab) if late else lab
    plain = make_lab()
    for one in (lab, plain):
        for i, cap in enumerate(CAPS):
            one.add(str(i), PROMPTS[i], wish(cap), seed=i)
    runs, expected = lab.drain(), plain.drain()
    for i, cap in enumerate(CAPS):
        assert runs[str(i)].tokens == expected[str(i)].tokens
        drafted = [delta.drafted for delta in runs[str(i)].deltas]
        assert max(drafted) == most(tree, cap)
        assert max(delta.accepted for delta in runs[str(i)].deltas) <= (
            cap or 0 if cap is not None else tree.depth
        )


def test_a_wish_changes_no_sampled_text() -> None:
    lab, plain = make_lab(draft_model(tiny_decoder(1)), TREES[1]), make_lab()
    for one in (lab, plain):
        for i, cap in enumerate(CAPS):
            one.add(str(i), PROMPTS[i], wish(cap, temperature=0.9), seed=i)
    runs, expected = lab.drain(), plain.drain()
    assert {k: run.tokens for k, run in runs.items()} == {k: r.tokens for k, r in expected.items()}


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_trees_that_grow_are_cut_at_the_depth_of_each_node(acceptance: str) -> None:
    lab = eagle(Growth(top_k=3, depth=4, nodes=12), acceptance)
    for i, cap in enumerate(CAPS):
        lab.add(str(i), [3, 9, i], wish(cap), seed=i)
    runs = lab.drain()
    for i, cap in enumerate(CAPS):
        depth = min(4, 4 if cap is None else cap)
        run = runs[str(i)]
        assert run.tokens == [(i + 1 + j) % V for j in range(24)]
        # The oracle is right at every depth: what a step brings is the depth it may draft, and one.
        assert {len(delta.token_ids) for delta in run.deltas[1:-1]} == {depth + 1}
        assert max(delta.drafted for delta in run.deltas) <= (3 if depth == 1 else 11)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_drafted_past_the_longest_text_a_drafter_was_made_for(
    tree: Tree, late: bool
) -> None:
    longest = 48
    lab = make_lab(draft_model(tiny_decoder(0)), tree, longest=longest)
    lab, plain = behind(lab) if late else lab, make_lab()
    lengths = [5, 30, 46, 47, 48, 70]
    text = prompts(1, seed=3, low=100, high=101)[0]
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)
    for one in (lab, plain):
        for length in lengths:
            one.add(str(length), text[:length], params, seed=length)
    runs, expected = lab.drain(), plain.drain()
    for start in lengths:
        run = runs[str(start)]
        assert run.tokens == expected[str(start)].tokens
        length = start
        for delta in run.deltas:
            levels = max(0, min(tree.depth, longest - length))
            assert delta.drafted <= most(tree, levels)
            length += len(delta.token_ids)
        # The first token of a step that starts at 47 could still be drafted; one committed at 48 could not.
        assert (run.drafted > 0) == (start + 1 < longest)


def test_the_drafters_kv_of_a_text_that_outgrew_it_is_not_for_others() -> None:
    """Blocks after the end of drafting lack the drafter's half; a hit on them would draft from nothing."""
    lab = make_lab(draft_model(tiny_decoder(0)), chain(3), longest=32)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    first = lab.solo(PROMPTS[0], params)
    again = [*PROMPTS[0], *first.tokens[:50]]
    lab.add("again", again, params)
    run = lab.drain()["again"]
    assert run.deltas[0].num_cached_tokens <= 32
    assert run.drafted == 0


def test_packed_weights_count_as_much_as_their_shapes_say() -> None:
    model = tiny_decoder(0)
    expected = sum(p.numel() for p in model.parameters()) * 8
    assert weights_bytes(model) == expected
    for name, parameter in list(model.named_parameters()):
        if name.endswith("qkv.weight"):
            owner = model.get_submodule(name.removesuffix(".weight"))
            owner.weight = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
    assert weights_bytes(model) == expected
