"""PARD: one pass over masks gives what a plain run over text and masks gives, and leaves no mask in the KV."""

from __future__ import annotations

import pytest
import torch
from drafting import Request
from lab import VOCABULARY, make_lab, prompts, tiny_decoder
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.ops.meta import LayerKV, RaggedRows
from foretell.sampling_params import SamplingParams
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.pard import PardDrafter
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

MASK = 90
TARGET = tiny_decoder(0)
DRAFT = tiny_decoder(4)


def drafter(model: Decoder = DRAFT, acceptance: str = "match") -> PardDrafter:
    return PardDrafter(model, MASK, whole(VOCABULARY, torch.device("cpu")), Acceptance(acceptance))


def plain(model: Decoder, tokens: list[int]) -> Tensor:
    """[R, V] logits of one prompt in one piece."""
    layers, heads, dim = model.kv_shape
    kv = [
        LayerKV(*(torch.zeros(2, 64, heads, dim, dtype=torch.float64) for _ in "kv"))
        for _ in range(layers)
    ]
    place = torch.arange(len(tokens))
    meta = RaggedRows(
        positions=place,
        kv_slots=place + 64,
        blocks=torch.tensor([[1]], dtype=torch.int32),
        starts=torch.tensor([0]),
        offsets=torch.tensor([0, len(tokens)]),
        lengths=((0, len(tokens)),),
    )
    hidden, _ = model(torch.tensor(tokens), meta, kv)
    return model.logits(hidden)


@pytest.mark.parametrize("tree", [chain(1), chain(5), Tree((-1, 0, 0, 1, 1, 2, 3))])
def test_drafts_are_those_of_text_followed_by_masks(tree: Tree) -> None:
    text = prompts(1, low=39, high=40)[0]
    request = Request(drafter(), TARGET, width=tree.depth + 1)
    request.observe(text[:6], None)
    request.observe(text[6:9], None)
    for count in [1, 2, 1, min(4, tree.depth + 1), 2, 1]:
        start = len(request.tokens)
        draft = request.propose(text[start : start + count], None, tree).tokens[0].tolist()
        committed = request.tokens
        logits = plain(DRAFT, committed + [MASK] * (tree.depth - 1))[len(committed) - 1 :]
        ranked = logits.topk(3).indices
        for node in range(1, tree.nodes):
            assert draft[node] == int(ranked[tree.depths[node] - 1, tree.ranks[node]])


def test_text_stays_that_of_plain_decoding() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    for prompt in prompts(3):
        run = make_lab(drafter(TARGET), chain(3)).solo(prompt, params)
        assert run.tokens == make_lab().solo(prompt, params).tokens
        assert run.accepted > 0, "the first level of a perfect model is always right"


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="pard_token=96"):
        PardDrafter(DRAFT, 96, whole(VOCABULARY, torch.device("cpu")), Acceptance.MATCH)
    drafter().check_tree(chain(32))
    with pytest.raises(ValueError, match="at most 32"):
        drafter().check_tree(chain(33))
