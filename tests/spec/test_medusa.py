"""Medusa: exact heads reach every depth of every tree, in the engine; and the drafter against the protocol."""

from __future__ import annotations

import pytest
import torch
from drafting import Request, law
from lab import make_lab, prompts
from oracles import V, cycle_target, decoding, shift

from foretell.sampling_params import SamplingParams
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.medusa import MedusaDrafter, MedusaHeads
from foretell.spec.presets import NAMES, preset
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

CPU = torch.device("cpu")
TARGET = cycle_target()
MEDUSA = [name for name in NAMES if name != "eagle"]


def oracle(
    heads: int = 5, off: int = 0, acceptance: str = "match", draws: bool = False
) -> MedusaDrafter:
    """Head i says token t + 2 + i + off."""
    read = decoding(TARGET, -1)
    output = torch.stack([20 * shift(2 + i + off) @ read for i in range(heads)])
    weight = torch.zeros(heads, 1, V, V, dtype=torch.float64)
    net = MedusaHeads(weight, torch.zeros(heads, 1, V, dtype=torch.float64), output)
    return MedusaDrafter(net, whole(V, CPU), Acceptance(acceptance), draws)


GREEDY = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)


@pytest.mark.parametrize("name", MEDUSA)
def test_exact_heads_fill_every_published_tree_to_its_depth(name: str) -> None:
    tree = preset(name)
    run = make_lab(oracle(), tree, TARGET).solo([3, 9, 4], GREEDY)
    assert run.tokens == [(5 + i) % V for i in range(41)]
    assert {len(delta.token_ids) for delta in run.deltas[1:-1]} == {tree.depth + 1}


def test_four_heads_take_a_hundred_tokens_in_twenty_steps() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=101, ignore_eos=True)
    run = make_lab(oracle(4), chain(4), TARGET).solo([7], params)
    assert [len(delta.token_ids) for delta in run.deltas] == [1] + [5] * 20


def test_heads_off_by_one_are_never_accepted() -> None:
    run = make_lab(oracle(off=1), chain(4), TARGET).solo([3, 9, 4], GREEDY)
    assert run.accepted == 0
    assert run.tokens == [(5 + i) % V for i in range(41)]


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("chunk", [5, 256])
def test_exact_heads_stay_exact_in_a_batch_with_temperature(acceptance: str, chunk: int) -> None:
    """At a low temperature the cycle is still certain; chunked prompts and company change nothing."""
    tree = Tree((-1, 0, 0, 1, 1, 2, 3))
    budget = chunk if chunk > 5 else 8 * tree.nodes + chunk
    lab = make_lab(
        oracle(acceptance=acceptance), tree, TARGET, acceptance, max_num_batched_tokens=budget
    )
    for i, prompt in enumerate(prompts(6, high=38)):
        text = [token % V for token in prompt]
        heat = 0.1 * (i % 3)
        lab.add(
            str(i), text, SamplingParams(temperature=heat, max_tokens=30, ignore_eos=True), seed=i
        )
    runs = lab.drain()
    for i, prompt in enumerate(prompts(6, high=38)):
        first = prompt[-1] % V + 1
        assert runs[str(i)].tokens == [(first + j) % V for j in range(30)]
        assert {len(delta.token_ids) for delta in runs[str(i)].deltas[1:-1]} <= {4}


def test_a_depth_takes_the_ranks_of_its_own_head() -> None:
    """Candidates of every node of depth d are the best of head d - 1, whatever its parent; -1 nowhere."""
    torch.manual_seed(1)
    net = MedusaHeads(torch.randn(3, 2, V, V).double() / V, None, torch.randn(3, V, V).double())
    drafter = MedusaDrafter(net, whole(V, CPU), Acceptance.MATCH)
    request = Request(drafter, TARGET, width=4)
    request.tokens = [1, 2, 3]
    features = torch.randn(2, V).double()
    tree = Tree((-1, 0, 0, 1, 2, 3), (0, 0, 2, 1, 0, 3))
    draft = request.propose([5, 6], features, tree)
    logits = net.logits(features[1:], 3, TARGET)[0]
    ranked = logits.float().topk(4).indices
    expected = [-1, ranked[0, 0], ranked[0, 2], ranked[1, 1], ranked[1, 0], ranked[2, 3]]
    assert draft.tokens.tolist() == [[int(token) for token in expected]]
    assert draft.probs is None


def test_under_rejection_drawn_candidates_come_with_their_law() -> None:
    torch.manual_seed(1)
    net = MedusaHeads(torch.randn(2, 1, V, V).double() / V, None, torch.randn(2, V, V).double())
    drafter = MedusaDrafter(net, whole(V, CPU), Acceptance.REJECTION, draws=True)
    request = Request(drafter, TARGET, width=3)
    request.tokens = [1, 2, 3]
    features = torch.randn(1, V).double()
    draft = request.propose([5], features, Tree((-1, 0, 0, 1)), law(temperature=0.7))
    expected = torch.softmax(net.logits(features, 2, TARGET)[0].float() / 0.7, -1)
    assert draft.probs is not None
    assert (draft.probs[0, 1] - expected[0]).abs().max() < 1e-6
    assert (draft.probs[0, 3] - expected[1]).abs().max() < 1e-6
    assert draft.probs[0, 0].abs().max() == 0


def test_a_tree_deeper_than_the_heads_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"depth 4 .* has 3"):
        oracle(3).check_tree(chain(4))
    oracle(4).check_tree(chain(4))


@pytest.mark.parametrize("shared", [False, True])
def test_packed_output_layers_give_the_logits_of_plain_ones(shared: bool) -> None:
    """In bf16, where a CPU wants another layout: equal to what is multiplied plainly, and held once."""
    torch.manual_seed(4)
    count = 1 if shared else 3
    weight = torch.randn(3, 1, V, V).bfloat16() / V
    output = torch.randn(count, 96, V).bfloat16()
    plain, packed = (MedusaHeads(weight, None, output.clone(), scale=0.5) for _ in range(2))
    packed.pack(TARGET.ops)
    feature = torch.randn(2, V).bfloat16()
    for heads in (1, 3):
        expected = plain.logits(feature, heads, TARGET).float()
        got = packed.logits(feature, heads, TARGET).float()
        assert got.shape == (2, heads, 96)
        assert (got - expected).abs().max() <= 0.02 * expected.abs().max()
    assert packed.output is not None
    assert packed.output.is_meta == TARGET.ops.repacks(output[0])
    packed.pack(TARGET.ops)
    assert (packed.logits(feature, 3, TARGET).float() - got).abs().max() == 0
