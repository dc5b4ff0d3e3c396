"""Trees that grow: equal to a plain growth, connected whatever ties there are, static where nothing varies."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from drafting import Request, law
from lab import ScriptedDrafter, make_lab, prompts, tiny_decoder
from oracles import V, cycle_config
from torch import Tensor

from foretell.model.layers import fill_random
from foretell.ops.meta import LayerKV, Meta, TreeRows
from foretell.ops.table import table_for
from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import Autoregressive
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window
from foretell.spec.dynamic_tree import Growth
from foretell.spec.eagle import EagleDrafter, Fusion, FusionNet, Parts
from foretell.spec.nodes import Shape, dynamic_shape, static_shape
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

CPU = torch.device("cpu")
TARGET = tiny_decoder(0, vocabulary=V, hidden=V)


@dataclass
class Table:
    """A network whose state is the path of tokens itself and whose logits are a fixed function of it."""

    sharp: float = 1.0
    runs: list[TreeRows] = field(default_factory=list)

    def ingest(
        self, tokens: Tensor, features: Tensor | None, meta: Meta, kv: Sequence[LayerKV]
    ) -> Tensor:
        assert isinstance(meta, TreeRows)
        code = tokens.double().unsqueeze(-1) % 7
        return torch.cat((code, torch.ones_like(code)), -1)

    def extend(self, tokens: Tensor, above: Tensor, meta: Meta, kv: Sequence[LayerKV]) -> Tensor:
        assert isinstance(meta, TreeRows)
        self.runs.append(meta)
        path = above[..., :1] * 3.7 + tokens.double().unsqueeze(-1)
        return torch.cat((path, above[..., 1:] + 1), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        columns = torch.arange(V, dtype=torch.float64)
        return self.sharp * torch.sin(hidden[..., :1] * 1.3 + columns * (1.1 + hidden[..., 1:]))


def made(net: object, growth: Growth, acceptance: str = "match") -> tuple[EagleDrafter, Request]:
    parts = Parts(cycle_config(1), 0, 0)
    inner = FusionNet(parts, Fusion(), torch.float64, table_for(CPU))
    fill_random(inner, 3, CPU)
    drafter = EagleDrafter(inner, (-1,), whole(V, CPU), Acceptance(acceptance), growth)
    request = Request(drafter, TARGET, width=growth.depth + 1)
    procedure = drafter._procedure
    assert isinstance(procedure, Autoregressive)
    if net is not None:
        procedure.net = net  # type: ignore[assignment]
    request.tokens = [1, 2, 3]
    return drafter, request


def propose(request: Request, growth: Growth, rule: object = None) -> Draft:
    feature = torch.randn(1, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return request.propose([5], feature, growth.bound, rule)  # type: ignore[arg-type]


def grown(net: Table, growth: Growth) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], float]]:
    """(paths of the best candidates, the score of every candidate), by plain recursion over paths."""

    def state(path: tuple[int, ...]) -> Tensor:
        value = torch.tensor([5.0 % 7, 1.0], dtype=torch.float64)
        for token in path:
            value = torch.stack((value[0] * 3.7 + token, value[1] + 1))
        return value

    scores: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(growth.depth):
        fresh = []
        for path in level:
            logprobs = torch.log_softmax(net.logits(state(path)).float(), -1)
            best = logprobs.topk(growth.top_k)
            for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                fresh.append((*path, token))
                scores[fresh[-1]] = scores.get(path, 0.0) + value
        level = sorted(fresh, key=lambda p: -scores[p])[: growth.beam]
    best = sorted(scores, key=lambda p: -scores[p])[: growth.nodes - 1]
    return best, scores


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    assert draft.parents is not None
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        assert 0 <= parents[node] < node, "parents come first"
        paths.append((*paths[parents[node]], tokens[node]))
    return paths[1:]


@pytest.mark.parametrize("sharp", [0.5, 3.0, 12.0])
@pytest.mark.parametrize(
    "growth",
    [Growth(3, 4, 12), Growth(10, 8, 60), Growth(10, 6, 60), Growth(4, 1, 4), Growth(2, 5, 9)],
)
def test_the_best_candidates_of_a_plain_growth_are_kept(growth: Growth, sharp: float) -> None:
    net = Table(sharp)
    _, request = made(net, growth)
    draft = propose(request, growth)
    expected, _ = grown(net, growth)
    assert sorted(paths_of(draft)) == sorted(expected)
    assert draft.probs is None
    assert draft.tokens[0, 0] == -1


@pytest.mark.parametrize("sharp", [1e3, 1e6])
def test_probability_one_ties_are_broken_towards_the_parent(sharp: float) -> None:
    """A saturated network gives children their parents' probability; what is kept still hangs together."""
    for growth in (Growth(3, 4, 12), Growth(10, 8, 60), Growth(2, 6, 8)):
        _, request = made(Table(sharp), growth)
        paths = paths_of(propose(request, growth))
        assert len(set(paths)) == len([p for p in paths if -1 not in p])
        assert all(path[:-1] in {(), *paths} for path in paths)
        assert max(len(path) for path in paths) == growth.depth, (
            "a sure chain is followed to the end"
        )


def test_a_network_of_nan_still_gives_a_tree() -> None:
    class Broken(Table):
        def logits(self, hidden: Tensor) -> Tensor:
            return super().logits(hidden) * torch.nan

    growth = Growth(3, 4, 12)
    _, request = made(Broken(), growth)
    draft = propose(request, growth)
    assert draft.tokens.tolist() == [[-1] * 12]
    paths_of(draft)


def test_grown_nodes_see_their_own_path_only() -> None:
    """Scratch keys are the root, then the grown nodes level by level; each level's rows see one key a level."""
    growth = Growth(4, 5, 20)
    net = Table()
    _, request = made(net, growth)
    propose(request, growth)
    assert len(net.runs) == growth.depth - 1
    known: dict[int, int] = {0: 1}
    for level, meta in enumerate(net.runs, start=1):
        assert meta.context.tolist() == [3]
        for row in range(growth.beam):
            place = 1 + (level - 1) * growth.beam + row
            bits = int(meta.bits[0, row])
            assert bits >> place == 1
            assert bits & ~(1 << place) in known.values(), "its parent's keys and its own"
            assert bits.bit_count() == level + 1
            known[place] = bits
            assert int(meta.positions[0, row]) == 3 + level - 1
    assert growth.scratch == 1 + max(known)


def test_one_child_a_node_is_the_static_chain() -> None:
    growth = Growth(1, 5, 6)
    for temperature in (0.0, 0.9):
        drafts = []
        for grow in (growth, None):
            drafter, request = made(None, growth)
            drafter.growth = grow
            drafts.append(propose(request, growth, law(temperature=temperature)))
        assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
        assert drafts[0].parents is not None
        shape, static = (
            dynamic_shape(static_shape(growth.bound, CPU), drafts[0].parents),
            static_shape(chain(5), CPU),
        )
        assert (shape.bits == static.bits).all()
        assert (shape.depths == static.depths).all()


def test_under_rejection_candidates_do_not_depend_on_the_noise() -> None:
    growth = Growth(3, 4, 12)
    drafts = []
    for seed in (1, 2):
        _, request = made(Table(0.5), growth, "rejection")
        drafts.append(propose(request, growth, law(temperature=1.0, seed=seed)).tokens.tolist())
    assert drafts[0] == drafts[1]


def test_under_match_candidates_follow_the_targets_noise() -> None:
    growth = Growth(3, 4, 12)
    drafts = []
    for seed in (1, 2):
        _, request = made(Table(0.5), growth)
        drafts.append(propose(request, growth, law(temperature=1.0, seed=seed)).tokens.tolist())
    assert drafts[0] != drafts[1]


def test_siblings_of_a_grown_tree_are_told_apart() -> None:
    """Accept numbers are keyed by place among siblings: two of one parent never share a number."""
    growth = Growth(10, 6, 60)
    _, request = made(Table(2.0), growth)
    draft = propose(request, growth)
    assert draft.parents is not None
    shape = dynamic_shape(static_shape(growth.bound, CPU), draft.parents)
    pairs = list(zip(draft.parents[0, 1:].tolist(), shape.ranks[0, 1:].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 4, 12), "top_k"),
        ((3, 0, 12), "depth"),
        ((3, 4, 65), "at most 64"),
        ((3, 4, 4), "more than 4"),
        ((3, 4, 5), "nothing to choose"),
        ((2, 2, 20), "lower the node budget"),
    ],
)
def test_numbers_that_make_no_tree_are_refused(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Growth(*numbers)


def test_the_scratch_of_the_originals_numbers_fits_one_ancestor_set() -> None:
    assert Growth(10, 8, 60).beam == 9
    assert Growth(10, 6, 60).beam == 10
    for top_k in range(1, 12):
        for depth in range(2, 20):
            growth = Growth(top_k, depth, depth + 1 if top_k == 1 else depth + 2)
            assert growth.scratch <= 64
            assert growth.bound.depth == depth
            assert growth.bound.nodes == growth.nodes
    assert math.isclose(Growth(1, 63, 64).beam, 1)


@dataclass
class AsGrown:
    """A scripted drafter that hands over a static tree as if it had grown it."""

    inner: ScriptedDrafter
    tree: Tree
    kv: KVSpec | None = None
    features: tuple[int, ...] = ()

    def bind(self, target: object, kv: KVView | None) -> None:
        """Nothing to bind."""

    def observe(self, rows: PromptRows) -> None:
        """Nothing to ingest."""

    def propose(self, window: Window, shape: Shape) -> Draft:
        """The script's tokens with the tree's parents."""
        if shape.tree.nodes == 1:
            return self.inner.propose(window, shape)
        draft = self.inner.propose(window, static_shape(self.tree, CPU))
        parents = torch.tensor((0, *self.tree.parents[1:])).expand_as(draft.tokens)
        return Draft(tokens=draft.tokens, parents=parents)


def half_right(text: list[int], tree: Tree) -> list[int]:
    """Guesses by the text, with duplicate siblings and gaps."""
    rng = random.Random(sum(text))
    return [-1, *(rng.choice([text[-1], text[0], -1, 5, 7]) for _ in range(tree.nodes - 1))]


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize(
    "tree",
    [Tree((-1, 0, 0, 1, 1, 2)), Tree((-1, 0, 1, 2, 0, 0, 4, 5)), chain(4), Tree((-1, 0, 0, 0))],
)
def test_a_grown_tree_is_verified_as_the_static_one_it_equals(tree: Tree, acceptance: str) -> None:
    """The same tokens in the same places: the same text, in steps of the same lengths, at any temperature."""
    bound = tree if tree.is_chain else Growth(4, tree.depth, tree.nodes).bound
    labs = [
        make_lab(ScriptedDrafter(half_right), tree, tiny_decoder(0), acceptance),
        make_lab(
            AsGrown(ScriptedDrafter(half_right), tree),
            bound,
            tiny_decoder(0),
            acceptance,
            grows=True,
        ),
    ]
    results = []
    for lab in labs:
        for i, prompt in enumerate(prompts(6, low=4)):
            params = SamplingParams(temperature=0.5 * (i % 3), max_tokens=30, top_k=4)
            lab.add(str(i), [p % 8 + 3 for p in prompt], params, seed=i)
        runs = lab.drain()
        results.append(
            {
                name: (run.tokens, [(len(d.token_ids), d.drafted, d.accepted) for d in run.deltas])
                for name, run in runs.items()
            }
        )
    assert results[0] == results[1]
    assert sum(d[2] for _, deltas in results[0].values() for d in deltas) > 0
