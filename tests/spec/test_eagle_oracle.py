"""Exact EAGLE networks in the engine: every step reaches the full depth, chains and trees, static and grown."""

from __future__ import annotations

import pytest
import torch
from lab import Lab, make_lab
from oracles import V, cycle_target, eagle1_oracle, eagle3_oracle, mtp_oracle, rope_oracle

from foretell.sampling_params import SamplingParams
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.dynamic_tree import Growth
from foretell.spec.eagle import EagleDrafter
from foretell.spec.presets import preset
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary

CPU = torch.device("cpu")
TARGET = cycle_target()
TAPS = (2, 3, 4)
TREES = {
    "chain1": chain(1),
    "chain5": chain(5),
    "eagle": preset("eagle"),
    "grown": Growth(top_k=3, depth=4, nodes=12),
    "grown wide": Growth(top_k=10, depth=8, nodes=60),
    "grown chain": Growth(top_k=1, depth=5, nodes=6),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def drafter(
    kind: str, growth: Growth | None, acceptance: str = "match", **wrong: object
) -> EagleDrafter:
    if kind == "eagle1":
        net, taps = eagle1_oracle(TARGET, int(str(wrong.get("by", 1)))), (-1,)
    else:
        net, taps = eagle3_oracle(TARGET, TAPS), wrong.get("taps", TAPS)  # type: ignore[assignment]
    return EagleDrafter(net, taps, whole(V, CPU), Acceptance(acceptance), growth)


def lab_for(
    kind: str,
    tree: Tree | Growth,
    acceptance: str = "match",
    budget: int = 256,
    max_num_seqs: int = 8,
    **wrong: object,
) -> Lab:
    growth = tree if isinstance(tree, Growth) else None
    bound = tree.bound if isinstance(tree, Growth) else tree
    made = drafter(kind, growth, acceptance, **wrong)
    return make_lab(
        made, bound, TARGET, acceptance, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs
    )


def depth_of(tree: Tree | Growth) -> int:
    return tree.depth


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("tree", TREES)
def test_an_exact_network_fills_every_tree_to_its_depth(kind: str, tree: str) -> None:
    run = lab_for(kind, TREES[tree]).solo([3, 9, 4, 30, 2], GREEDY)
    assert run.tokens == [(3 + i) % V for i in range(40)]
    assert {len(delta.token_ids) for delta in run.deltas[1:-1]} == {depth_of(TREES[tree]) + 1}


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("tree", ["chain5", "eagle", "grown"])
def test_it_stays_exact_in_a_batch_with_chunked_prompts(
    kind: str, acceptance: str, tree: str
) -> None:
    shape = TREES[tree]
    nodes = shape.nodes
    lab = lab_for(kind, shape, acceptance, budget=4 * nodes + 6, max_num_seqs=4)
    for i in range(6):
        heat = 0.1 * (i % 3)
        params = SamplingParams(temperature=heat, max_tokens=25, ignore_eos=True)
        lab.add(str(i), [(7 * i + 3 * j) % V for j in range(5 + 6 * i)], params, seed=i)
    runs = lab.drain()
    for i in range(6):
        last = (7 * i + 3 * (4 + 6 * i)) % V
        assert runs[str(i)].tokens == [(last + 1 + j) % V for j in range(25)]
        drafted = [delta for delta in runs[str(i)].deltas[:-1] if delta.drafted]
        assert len(drafted) >= 2, "the budget leaves room to draft"
        assert {len(delta.token_ids) for delta in drafted} == {shape.depth + 1}


@pytest.mark.parametrize("taps", [(1, 3, 4), (2, 3, 5), (3, 4, 5)])
def test_one_wrong_layer_costs_every_draft(taps: tuple[int, ...]) -> None:
    run = lab_for("eagle3", chain(4), taps=taps).solo([3, 9, 4], GREEDY)
    assert run.tokens == [(5 + i) % V for i in range(40)]
    assert run.accepted < run.drafted / 10


def test_a_feature_one_token_off_costs_every_draft() -> None:
    run = lab_for("eagle1", chain(4), by=2).solo([3, 9, 4], GREEDY)
    assert run.accepted == 0
    assert run.tokens == [(5 + i) % V for i in range(40)]


@pytest.mark.parametrize("tree", [chain(4), Growth(top_k=3, depth=4, nodes=12)])
def test_a_reduced_vocabulary_drafts_what_it_has_and_never_changes_the_text(
    tree: Tree | Growth,
) -> None:
    """The head knows tokens 0 to 19 and names them through a map; beyond them the target goes on alone."""
    growth = tree if isinstance(tree, Growth) else None
    bound = tree.bound if isinstance(tree, Growth) else tree
    vocabulary = Vocabulary(torch.zeros(V, dtype=torch.int64), torch.arange(20), V)
    made = EagleDrafter(eagle3_oracle(TARGET, TAPS, 20), TAPS, vocabulary, Acceptance.MATCH, growth)
    lab = make_lab(made, bound, TARGET)
    run = lab.solo([3, 38], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert run.tokens == [(39 + i) % V for i in range(40)]
    sizes = [len(delta.token_ids) for delta in run.deltas]
    assert max(sizes) == 5
    assert sizes.count(1) >= 15


ROPE_TREES = {"chain": chain(4), "tree": preset("eagle"), "grown": Growth(3, 4, 12)}


@pytest.mark.parametrize("tree", ROPE_TREES)
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_a_network_that_depends_on_its_rope_fills_every_tree(tree: str, base: float) -> None:
    """It looks for the token three places back, so positions of prompt, window and tree must all be right."""
    shape = ROPE_TREES[tree]
    growth = shape if isinstance(shape, Growth) else None
    bound = shape.bound if isinstance(shape, Growth) else shape
    prompt = [(25 + i) % V for i in range(20)]
    for turned in (base, 510_000.0 - base):
        net = rope_oracle(TARGET, turned, base)
        drafting = EagleDrafter(net, (-1,), whole(V, CPU), Acceptance.MATCH, growth)
        run = make_lab(drafting, bound, TARGET).solo(prompt, GREEDY)
        assert run.tokens == [(5 + i) % V for i in range(40)]
        sizes = [len(delta.token_ids) for delta in run.deltas[1:-1]]
        if turned == base:
            assert set(sizes) == {shape.depth + 1}
        else:  # a wide tree may hold the right token by chance, as the child of a wrong guess's parent
            assert sum(sizes) < 2 * len(sizes)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_an_exact_mtp_layer_is_used_as_often_as_is_drafted(k: int) -> None:
    drafting = EagleDrafter(mtp_oracle(TARGET), (-1,), whole(V, CPU), Acceptance.MATCH)
    run = make_lab(drafting, chain(k), TARGET).solo([3, 9, 4, 5], GREEDY)
    assert run.tokens == [(6 + i) % V for i in range(40)]
    assert {len(delta.token_ids) for delta in run.deltas[2:-1]} == {k + 1}
