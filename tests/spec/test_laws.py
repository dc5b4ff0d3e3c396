"""Under rejection the engine's texts follow the target's law, whatever drafts: many seeds, a small vocabulary.

Thousands of requests differ in their seed alone. Texts under a drafter are compared with those of plain decoding under
other seeds, by a chi-square test of two samples over pairs of tokens; the first token is never drafted and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from lab import ScriptedDrafter, make_lab
from scipy import stats

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.layers import fill_random
from foretell.ops.table import table_for
from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.chained import ChainedDrafter
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.drafter import Drafter
from foretell.spec.dynamic_tree import Growth
from foretell.spec.eagle import Concat, Eagle3Net, EagleDrafter, Fusion, FusionNet, Parts
from foretell.spec.medusa import MedusaDrafter, MedusaHeads
from foretell.spec.ngram import NgramDrafter
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

CPU = torch.device("cpu")
WORDS, WIDTH, REQUESTS = 6, 16, 1500
PROMPT = [3, 2, 2, 5, 3, 2, 2, 3]
CONFIG = ModelConfig(
    vocab_size=WORDS,
    hidden_size=WIDTH,
    intermediate_size=24,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    max_position=64,
)
RULE = Acceptance.REJECTION
BUSHY = Tree((-1, 0, 0, 1, 1, 2, 3))
GROWN = Growth(2, 3, 8)
PARAMS = {
    "hot": SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True),
    "processed": SamplingParams(
        temperature=0.7,
        min_p=0.02,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={2: 0.7},
        max_tokens=3,
        ignore_eos=True,
    ),
}


def decoder(seed: int) -> Decoder:
    """Random, with logits so far apart that laws are neither flat nor certain."""
    model = Decoder.random(CONFIG, seed=seed, dtype=torch.float64)
    with torch.no_grad():
        model.head.weight.mul_(1 / float(model.head.weight.std()) / WIDTH**0.5)
    model.head.pack()
    return model


TARGET = decoder(1)


def eagle(third: bool, growth: Growth | None = None) -> EagleDrafter:
    layer = replace(CONFIG, layers=1, windows=(), layer_ropes=(), ropes=())
    ops = table_for(CPU)
    net: FusionNet | Eagle3Net
    if third:
        concat = Concat(chunks=2, target_hidden=WIDTH)
        net = Eagle3Net(Parts(layer, 0, WORDS), concat, torch.float64, ops)
    else:
        net = FusionNet(Parts(layer, 0, 0), Fusion(), torch.float64, ops)
    fill_random(net, 5, CPU)
    taps = (1, 2) if third else (-1,)
    return EagleDrafter(net, taps, whole(WORDS, CPU), RULE, growth)


def medusa(draws: bool) -> MedusaDrafter:
    generator = torch.Generator().manual_seed(2)
    output = torch.randn(3, WORDS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.zeros(3, 1, WIDTH, WIDTH, dtype=torch.float64)
    return MedusaDrafter(MedusaHeads(weight, None, output), whole(WORDS, CPU), RULE, draws)


def draft_model() -> DraftModelDrafter:
    return DraftModelDrafter(decoder(9), same(WORDS, WORDS, WORDS, CPU), RULE)


def doubles() -> ScriptedDrafter:
    """Every sibling proposes the same token."""
    return ScriptedDrafter(lambda text, tree: [-1] + [(text[-1] + 1) % WORDS] * (tree.nodes - 1))


CASES: dict[str, tuple[Callable[[], Drafter], Tree | Growth]] = {
    "eagle1 chain": (lambda: eagle(False), chain(3)),
    "eagle1 tree": (lambda: eagle(False), BUSHY),
    "eagle2 grown": (lambda: eagle(False, GROWN), GROWN),
    "eagle3 chain": (lambda: eagle(True), chain(3)),
    "eagle3 tree": (lambda: eagle(True), BUSHY),
    "eagle3 grown": (lambda: eagle(True, GROWN), GROWN),
    "medusa chain": (lambda: medusa(True), chain(3)),
    "medusa tree": (lambda: medusa(False), BUSHY),
    "draft model tree": (draft_model, BUSHY),
    "duplicate siblings": (doubles, Tree((-1, 0, 0, 0, 1, 1, 2))),
    "ngram": (lambda: NgramDrafter(1, 2), chain(3)),
    "chained chain": (lambda: ChainedDrafter(NgramDrafter(1, 2), eagle(False)), chain(3)),
    "chained tree": (lambda: ChainedDrafter(NgramDrafter(1, 2), eagle(False)), BUSHY),
    "chained grown": (
        lambda: ChainedDrafter(NgramDrafter(1, 2), eagle(True, GROWN), grows=True),
        GROWN,
    ),
}


def sample(
    drafter: Drafter | None, tree: Tree | Growth, kind: str, first_seed: int
) -> tuple[torch.Tensor, int]:
    """([WORDS ** 2] counts of tokens 2 and 3, accepted drafts)."""
    bound = tree.bound if isinstance(tree, Growth) else tree
    inner = drafter.trained if isinstance(drafter, ChainedDrafter) else drafter
    lab = make_lab(
        drafter,
        bound,
        TARGET,
        "rejection",
        grows=isinstance(tree, Growth),
        draws=getattr(inner, "draws", False),
        scratch=max(getattr(inner, "scratch", 0), bound.nodes),
        max_model_len=32,
        max_num_seqs=250,
        max_num_batched_tokens=2000,
    )
    for i in range(REQUESTS):
        lab.add(str(i), PROMPT, PARAMS[kind], seed=first_seed + i)
    runs = lab.drain()
    texts = torch.tensor([runs[str(i)].tokens[1:] for i in range(REQUESTS)])
    counts = torch.bincount((texts * torch.tensor([WORDS, 1])).sum(1), minlength=WORDS**2)
    return counts, sum(run.accepted for run in runs.values())


@cache
def plain(kind: str) -> torch.Tensor:
    return sample(None, chain(0), kind, 1_000_000)[0]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", CASES)
def test_texts_follow_the_targets_law(name: str, kind: str) -> None:
    make, tree = CASES[name]
    counts, accepted = sample(make(), tree, kind, 1)
    assert accepted > REQUESTS // 30, "something must be accepted for the rule to be seen"
    table = torch.stack((counts, plain(kind)))
    seen = table.sum(0) >= 10
    merged = torch.cat((table[:, seen], table[:, ~seen].sum(1, keepdim=True)), dim=1)
    merged = merged[:, merged.sum(0) > 0]
    assert merged.shape[1] > 12, "the law is not concentrated on a few texts"
    assert stats.chi2_contingency(merged.numpy()).pvalue > 1e-4
