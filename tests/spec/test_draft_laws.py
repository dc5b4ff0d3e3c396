"""Under rejection the text follows the target's law, whatever head drafts it: two tokens at once, many rows."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.spec import verify
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.drafter import Draft, Window
from foretell.spec.medusa import MedusaDrafter, MedusaHeads
from foretell.spec.mlp_speculator import MlpSpeculator, MlpSpeculatorDrafter
from foretell.spec.nodes import Nodes, static_shape
from foretell.spec.processors import Law, Mode
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

CPU = torch.device("cpu")
ROWS, WORDS, WIDTH, LENGTH = 60_000, 6, 8, 5
SMALL = ModelConfig(
    vocab_size=WORDS,
    hidden_size=WIDTH,
    intermediate_size=8,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=4,
)
TARGET = Decoder.random(SMALL, seed=1)
TREES = {
    "chain": chain(2),
    "wide": Tree((-1, 0, 0, 0)),
    "bushy": Tree((-1, 0, 0, 1, 1, 2, 2)),
    "gaps": Tree((-1, 0, 0, 1, 1), (0, 0, 2, 1, 3)),
    "doubles": Tree((-1, 0, 0, 1, 1), (0, 0, 0, 1, 1)),
}


def medusa(draws: bool) -> MedusaDrafter:
    generator = torch.Generator().manual_seed(2)
    output = torch.randn(2, WORDS, WIDTH, generator=generator)
    net = MedusaHeads(torch.zeros(2, 1, WIDTH, WIDTH), None, output)
    return MedusaDrafter(net, whole(WORDS, CPU), Acceptance.REJECTION, draws)


def mlp() -> MlpSpeculatorDrafter:
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for _ in range(2)]

    proj = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(2)]
    net = MlpSpeculator(
        2, some(WORDS, WIDTH), proj, some(WORDS, WIDTH), some(WIDTH), some(WIDTH), False
    )
    return MlpSpeculatorDrafter(net, whole(WORDS, CPU), Acceptance.REJECTION)


def window(temperature: float) -> Window:
    feature = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))
    law = Law(
        seed=torch.arange(ROWS),
        temperature=torch.full((ROWS,), temperature),
        top_k=torch.zeros(ROWS, dtype=torch.int64),
        top_p=torch.ones(ROWS),
        min_p=torch.zeros(ROWS),
    )
    return Window(
        slots=torch.arange(ROWS),
        tokens=torch.full((ROWS, 1), 3),
        start=torch.full((ROWS,), LENGTH - 1),
        count=torch.ones(ROWS, dtype=torch.int64),
        features=feature.expand(ROWS, 1, WIDTH),
        live=torch.ones(ROWS, dtype=torch.bool),
        blocks=torch.zeros(ROWS, 1, dtype=torch.int32),
        text=torch.zeros(ROWS, LENGTH, dtype=torch.int32),
        law=law,
        mode=Mode(sampled=True),
        keys=LENGTH,
    )


def pairs(draft: Draft, tree: Tree, at: Window, table: Tensor) -> Tensor:
    """[WORDS, WORDS] counts of the first two tokens; the target's logits after a path are `table[last token]`."""
    shape = static_shape(tree, CPU)
    tokens = draft.tokens.clone()
    tokens[:, 0] = 3
    nodes = Nodes(shape, tokens, (LENGTH - 1 + shape.depths).expand_as(tokens))
    verdict = verify.rejection(table[tokens.clamp(min=0)], nodes, at.law, at.mode, draft.probs)
    first = verdict.tokens[:, 0]
    # Where one token came out, the second is the target's own, drawn here by an independent generator.
    fresh = torch.multinomial(torch.softmax(table[first] / at.law.temperature[0], -1), 1).squeeze(1)
    second = torch.where(verdict.count > 1, verdict.tokens[:, min(1, tree.depth)], fresh)
    return torch.bincount(first * WORDS + second, minlength=WORDS * WORDS).view(WORDS, WORDS)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("head", ["medusa drawn", "medusa likeliest", "mlp"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_two_tokens_follow_the_targets_law(tree: str, head: str, temperature: float) -> None:
    drafter = mlp() if head == "mlp" else medusa(head == "medusa drawn")
    drafter.bind(TARGET, None)
    at = window(temperature)
    draft = drafter.propose(at, static_shape(TREES[tree], CPU))
    assert (draft.probs is not None) == drafter.draws == (head != "medusa likeliest")
    table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(5))
    counts = pairs(draft, TREES[tree], at, table)
    law = torch.softmax(table.double() / temperature, -1)
    expected = law[3].unsqueeze(1) * law * ROWS
    assert stats.chisquare(counts.flatten().numpy(), expected.flatten().numpy()).pvalue > 1e-4
