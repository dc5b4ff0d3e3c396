"""The accept rules against exact laws: many seeds at once, one row each."""

from __future__ import annotations

import random

import pytest
import torch
from scipy import stats
from torch import Tensor

from foretell.ops.reference.sample import filter_logits, gumbel, uniform
from foretell.ops.reference.verify import accept_match
from foretell.ops.table import REFERENCE
from foretell.spec import noise, verify
from foretell.spec.nodes import Nodes, dynamic_shape, static_shape
from foretell.spec.processors import Law, Mode, perturb
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Verdict

CPU = torch.device("cpu")
TRIALS = 200_000


def law(
    trials: int = TRIALS,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Law:
    ones = torch.ones(trials)
    return Law(
        seed=torch.arange(trials),
        temperature=temperature * ones,
        top_k=top_k * ones.long(),
        top_p=top_p * ones,
        min_p=min_p * ones,
    )


def nodes_of(tree: Tree, tokens: Tensor, length: int = 5) -> Nodes:
    shape = static_shape(tree, CPU)
    return Nodes(shape, tokens, (length - 1 + shape.depths).expand_as(tokens))


def logits_of(*laws: list[float], trials: int = TRIALS) -> Tensor:
    return torch.tensor(laws).log().expand(trials, -1, -1)


def shares(tokens: Tensor, vocabulary: int) -> Tensor:
    return torch.bincount(tokens, minlength=vocabulary).double() / tokens.numel()


def distance(tokens: Tensor, expected: list[float]) -> float:
    """Total variation distance between a sample and a law."""
    return (
        0.5 * (shares(tokens, len(expected)) - torch.tensor(expected).double()).abs().sum().item()
    )


def first(verdict: Verdict) -> Tensor:
    return verdict.tokens[:, 0]


def point_drafts(trials: int, *drafts: int) -> Tensor:
    return torch.tensor([0, *drafts]).expand(trials, -1)


def test_filtered_draft_and_filtered_ratio_give_the_filtered_target() -> None:
    p, q = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]
    rows, mode = law(top_k=2), Mode(sampled=True, filtered=True)
    draft_law = torch.softmax(filter_logits(logits_of(q), rows.top_k, rows.top_p, rows.min_p), -1)
    position = torch.full((TRIALS, 1), 5)
    drawn = perturb(draft_law.log(), rows, position, noise.Stream.DRAFT).argmax(-1)
    tokens = torch.cat((torch.zeros(TRIALS, 1, dtype=torch.long), drawn), 1)
    probs = torch.cat((torch.zeros_like(draft_law), draft_law), 1)
    verdict = verify.rejection(logits_of(p, p), nodes_of(chain(1), tokens), rows, mode, probs)
    assert distance(first(verdict), [0.625, 0.375, 0.0, 0.0]) < 0.005


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.3),
        (1.3, 4, 0.9, 0.05),
    ],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_rejection_follows_the_target_under_every_filter(
    temperature: float, top_k: int, top_p: float, min_p: float, bf16: bool
) -> None:
    torch.manual_seed(3)
    target, draft = torch.randn(3, 6) * 0.7, torch.randn(1, 6) * 0.7
    if bf16:
        draft = draft.bfloat16().float()
    rows = law(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    mode = Mode(sampled=True, filtered=True)

    def filtered(logits: Tensor) -> Tensor:
        scaled = (logits / temperature).expand(TRIALS, -1, -1)
        return filter_logits(scaled, rows.top_k, rows.top_p, rows.min_p)

    q = torch.softmax(filtered(draft), -1)
    drafts = [
        perturb(q.log(), rows, torch.full((TRIALS, 1), 5 + step), noise.Stream.DRAFT).argmax(-1)
        for step in range(2)
    ]
    tokens = torch.cat((torch.zeros(TRIALS, 1, dtype=torch.long), *drafts), 1)
    probs = torch.cat((torch.zeros_like(q), q, q), 1)
    verdict = verify.rejection(
        target.expand(TRIALS, -1, -1), nodes_of(chain(2), tokens), rows, mode, probs
    )
    expected = torch.softmax(filtered(target)[:1], -1)[0].double()
    observed = torch.bincount(first(verdict), minlength=6).double()
    held = expected[0] > 0
    assert observed[~held].sum() == 0
    assert (
        stats.chisquare(observed[held], expected[0][held] / expected[0].sum() * TRIALS).pvalue
        > 1e-4
    )
    second = verdict.tokens[verdict.count > 1][:, 1]
    observed = torch.bincount(second, minlength=6).double()
    held = expected[1] > 0
    assert (
        stats.chisquare(observed[held], expected[1][held] / expected[1].sum() * len(second)).pvalue
        > 1e-4
    )


@pytest.mark.parametrize("siblings", [(0, 1), (1, 0), (0, 0)])
def test_point_mass_siblings_are_tried_against_what_is_left(siblings: tuple[int, int]) -> None:
    p = [0.5, 0.3, 0.2]
    verdict = verify.rejection(
        logits_of(p, p, p),
        nodes_of(Tree((-1, 0, 0)), point_drafts(TRIALS, *siblings)),
        law(),
        Mode(sampled=True),
        None,
    )
    assert distance(first(verdict), p) < 0.005
    if siblings == (0, 0):
        assert (verdict.path[:, 1] != 2).all(), "a copy of a refused sibling was accepted"


def test_a_two_level_tree_keeps_the_joint_law() -> None:
    torch.manual_seed(0)
    laws = torch.softmax(torch.randn(5, 3), -1)
    tree = Tree((-1, 0, 0, 1, 2))
    tokens = point_drafts(TRIALS, 0, 1, 2, 0)
    verdict = verify.rejection(
        laws.log().expand(TRIALS, -1, -1), nodes_of(tree, tokens), law(), Mode(sampled=True), None
    )
    accepted = verdict.count > 1
    for child, node in ((0, 1), (1, 2)):
        rows = accepted & (verdict.tokens[:, 0] == child)
        assert distance(verdict.tokens[rows][:, 1], laws[node].tolist()) < 0.01
    assert distance(first(verdict), laws[0].tolist()) < 0.005


def test_siblings_without_replacement_keep_the_law() -> None:
    torch.manual_seed(5)
    p, q = torch.softmax(torch.randn(6), -1), torch.softmax(torch.randn(6) * 2, -1)
    rows = law()
    noisy = q.log() + gumbel(
        noise.key(rows.seed, torch.full((TRIALS, 1), 5), noise.Stream.DRAFT), torch.arange(6).int()
    )
    drawn = noisy.squeeze(1).topk(3).indices  # Gumbel top-k draws without replacement, in order
    tokens = torch.cat((torch.zeros(TRIALS, 1, dtype=torch.long), drawn), 1)
    probs = q.expand(TRIALS, 4, -1)
    verdict = verify.rejection(
        p.log().expand(TRIALS, 4, -1),
        nodes_of(Tree((-1, 0, 0, 0)), tokens),
        rows,
        Mode(sampled=True),
        probs,
    )
    observed = torch.bincount(first(verdict), minlength=6).double()
    assert stats.chisquare(observed, p.double() / p.double().sum() * TRIALS).pvalue > 1e-4
    assert (verdict.count > 1).double().mean() > 0.6


def test_successive_tokens_are_independent() -> None:
    """p = q = uniform: a bonus token equals the draft before it one time in eight, not always."""
    trials, rows = 20_000, law(20_000)
    uniform_law = torch.full((trials, 1, 8), 1 / 8)
    drafts = [
        perturb(uniform_law.log(), rows, torch.full((trials, 1), 5 + i), noise.Stream.DRAFT).argmax(
            -1
        )
        for i in range(3)
    ]
    tokens = torch.cat((torch.zeros(trials, 1, dtype=torch.long), *drafts), 1)
    verdict = verify.rejection(
        uniform_law.expand(-1, 4, -1).log(),
        nodes_of(chain(3), tokens),
        rows,
        Mode(sampled=True),
        uniform_law.expand(-1, 4, -1),
    )
    assert (verdict.count == 4).all()
    for earlier, later in ((2, 3), (0, 1), (1, 2), (0, 3)):
        equal = (verdict.tokens[:, earlier] == verdict.tokens[:, later]).double().mean().item()
        assert abs(equal - 0.125) < 0.01


def test_corrected_token_is_independent_of_the_accepted_one() -> None:
    p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    rows = law()
    draft_law = torch.tensor(q).expand(TRIALS, 1, -1)
    drafts = [
        perturb(draft_law.log(), rows, torch.full((TRIALS, 1), 5 + i), noise.Stream.DRAFT).argmax(
            -1
        )
        for i in range(2)
    ]
    tokens = torch.cat((torch.zeros(TRIALS, 1, dtype=torch.long), *drafts), 1)
    verdict = verify.rejection(
        logits_of(p, p, p),
        nodes_of(chain(2), tokens),
        rows,
        Mode(sampled=True),
        draft_law.expand(-1, 3, -1),
    )
    corrected = verdict.count == 2
    table = torch.zeros(4, 4)
    pairs = verdict.tokens[corrected][:, :2]
    table.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs)), accumulate=True)
    table = table[:, table.sum(0) > 0]
    assert stats.chi2_contingency(table.numpy()).pvalue > 0.001


def test_streams_share_no_numbers() -> None:
    seed, position = torch.arange(2000), torch.arange(3).expand(2000, -1)
    keys = [noise.key(seed, position, stream) for stream in noise.Stream]
    words = {tuple(word) for key in keys for word in key.reshape(-1, 2).tolist()}
    assert len(words) == len(keys) * 2000 * 3


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    seed, position = torch.arange(200_000), torch.arange(2).expand(200_000, -1)
    u = uniform(noise.key(seed, position, noise.Stream.ACCEPT)).double()
    assert stats.kstest(u[:, 0].numpy(), "uniform").pvalue > 1e-4
    assert abs(torch.corrcoef(u.T)[0, 1].item()) < 0.01


def test_gumbel_argmax_draws_from_the_softmax() -> None:
    p = torch.softmax(torch.linspace(-6, 2, 50), -1)
    key = noise.key(
        torch.arange(TRIALS), torch.zeros(TRIALS, 1, dtype=torch.long), noise.Stream.SAMPLE
    )
    drawn = (p.log() + gumbel(key, torch.arange(50, dtype=torch.int32))).argmax(-1).squeeze(1)
    observed = torch.bincount(drawn, minlength=50).double()
    assert stats.chisquare(observed, p.double() / p.double().sum() * TRIALS).pvalue > 1e-4


def _walk(tree: Tree, draft: list[int], sample: list[int], node: int = 0) -> int:
    """Depth of the deepest accepted node, by recursion."""
    below = [
        _walk(tree, draft, sample, i)
        for i in range(node + 1, tree.nodes)
        if tree.parents[i] == node and draft[i] == sample[node] and draft[i] >= 0
    ]
    return max(below, default=tree.depths[node])


@pytest.mark.parametrize("dynamic", [False, True])
def test_match_equals_a_recursive_walk(dynamic: bool) -> None:
    rng = random.Random(1)
    for _ in range(1500):
        count = rng.randint(1, 12)
        tree = Tree((-1, *(rng.randrange(i) for i in range(1, count))))
        draft = [0, *(rng.randint(-1, 2) for _ in range(count - 1))]
        sample = [rng.randint(-1, 2) for _ in range(count)]
        shape = static_shape(tree, CPU)
        if dynamic:
            bound = static_shape(chain(count - 1), CPU)
            shape = dynamic_shape(bound, torch.tensor([tree.parents]))
            assert shape.bits.tolist() == [list(tree.ancestors)]
            assert shape.depths.tolist() == [list(tree.depths)]
        best = accept_match(
            torch.tensor([draft]), torch.tensor([sample]), shape.parents, shape.depths, shape.bits
        )
        assert tree.depths[int(best)] == _walk(tree, draft, sample)


def test_match_emits_the_targets_own_samples_whatever_was_drafted() -> None:
    torch.manual_seed(2)
    trials, tree = 500, Tree((-1, 0, 0, 1, 1, 2))
    table = torch.randn(4, 4) * 2  # logits after each token
    rows, mode = law(trials), Mode(sampled=True)

    def emitted(tokens: Tensor) -> list[list[int]]:
        logits = table[tokens.clamp(min=0)]
        verdict = verify.match(logits, nodes_of(tree, tokens), rows, mode, REFERENCE)
        return [t[:c] for t, c in zip(verdict.tokens.tolist(), verdict.count.tolist(), strict=True)]

    root = torch.zeros(trials, 1, dtype=torch.long)
    drafted = emitted(torch.cat((root, torch.randint(0, 4, (trials, 5))), 1))
    empty = emitted(torch.cat((root, torch.full((trials, 5), -1)), 1))
    assert all(len(tokens) == 1 for tokens in empty)
    assert all(tokens[0] == plain[0] for tokens, plain in zip(drafted, empty, strict=True))
    assert max(len(tokens) for tokens in drafted) == 3


def test_greedy_rows_beside_sampled_ones_stay_greedy() -> None:
    rows = Law(
        seed=torch.arange(3),
        temperature=torch.tensor([0.0, 0.7, 0.0]),
        top_k=torch.zeros(3, dtype=torch.long),
        top_p=torch.ones(3),
        min_p=torch.zeros(3),
    )
    logits = torch.tensor([[0.0, 1.0, 7.0, 3.0]]).expand(3, 2, -1)
    for rule in ("match", "rejection"):
        nodes = nodes_of(chain(1), point_drafts(3, 2))
        mode = Mode(sampled=True)
        verdict = (
            verify.match(logits, nodes, rows, mode, REFERENCE)
            if rule == "match"
            else verify.rejection(logits, nodes, rows, mode, None)
        )
        for row in (0, 2):
            assert verdict.tokens[row].tolist() == [2, 2]
            assert verdict.count[row] == 2


@pytest.mark.parametrize("rule", ["match", "rejection", "typical"])
def test_a_nan_row_is_marked_and_no_padding_id_comes_out(rule: str) -> None:
    logits = torch.randn(3, 3, 130)
    logits[1, 1, 7] = torch.nan
    draft = logits.nan_to_num().argmax(-1)
    tokens = torch.cat((torch.zeros(3, 1, dtype=torch.long), draft[:, :2]), 1)
    nodes, rows, mode = nodes_of(chain(2), tokens), law(3, temperature=0.0), Mode()
    match rule:
        case "match":
            verdict = verify.match(logits, nodes, rows, mode, REFERENCE)
        case "rejection":
            verdict = verify.rejection(logits, nodes, rows, mode, None)
        case _:
            verdict = verify.typical(logits, nodes, rows, mode, REFERENCE, verify.Typical())
    assert verdict.count.tolist() == [3, 2, 3]
    assert verdict.tokens[1, :2].tolist() == [int(draft[1, 0]), -1]
    assert (verdict.tokens < 130).all()


def test_typical_acceptance_is_lossy_and_greedy_rows_are_exact() -> None:
    p = [0.6, 0.4]
    nodes = nodes_of(chain(1), point_drafts(TRIALS, 1))
    verdict = verify.typical(
        logits_of(p, p), nodes, law(), Mode(sampled=True), REFERENCE, verify.Typical()
    )
    assert distance(first(verdict), p) > 0.3, (
        "a likely draft is always taken: this is not the target's law"
    )
    greedy = verify.typical(
        logits_of(p, p), nodes, law(temperature=0.0), Mode(), REFERENCE, verify.Typical()
    )
    assert (first(greedy) == 0).all()
