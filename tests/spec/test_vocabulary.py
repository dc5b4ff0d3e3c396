"""Drafter and target with different vocabularies: paired by what tokens spell, told where they differ."""

from __future__ import annotations

import logging

import pytest
import torch
from lab import EOS, VOCABULARY, make_lab, prompts, tiny_decoder

from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary, intersect, pair_vocabularies, same

CPU = torch.device("cpu")
REAL = 120  # tokens that a tokenizer of 128 ids really has


class Words:
    """A tokenizer that spells id i as its i-th word."""

    unk_token_id = None
    pad_token_id = None

    def __init__(self, words: list[str], bos: int | None = 0, eos: int | None = EOS) -> None:
        self.words, self.bos_token_id, self.eos_token_id = words, bos, eos

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


def words(count: int = REAL, first: str = "w") -> list[str]:
    return [f"{first}{i}" for i in range(count)]


def test_r37_sizes_that_differ_by_padding_are_one_vocabulary() -> None:
    pair = pair_vocabularies(Words(words()), Words(words()), (128, REAL), None, CPU)
    assert pair.to_target(torch.arange(REAL)).tolist() == list(range(REAL))
    # A prompt with an id that only the target has does not reach outside the draft's embedding.
    read = pair.to_draft(torch.tensor([5, 125, 127, -1]))
    assert read.tolist()[0] == 5
    assert read.tolist()[3] == -1
    assert ((read[:3] >= 0) & (read[:3] < REAL)).all()


def test_r37_padding_of_the_draft_is_never_proposed() -> None:
    pair = pair_vocabularies(Words(words()), Words(words()), (REAL, 128), None, CPU)
    masked = pair.mask(torch.zeros(128))
    assert torch.isinf(masked[REAL:]).all()
    assert (masked[:REAL] == 0).all()
    assert pair.to_target(torch.arange(REAL, 128)).tolist() == [-1] * (128 - REAL)


def test_r37_a_different_string_is_named_with_its_id() -> None:
    other = words()
    other[7] = "seven"
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is compared)
        pair_vocabularies(Words(words()), Words(other), (REAL, REAL), False, CPU)
    said = str(caught.value)
    assert said.startswith("Target and draft model should have the same vocabulary size.")
    assert "Token id 7 is 'w7' in the target and 'seven' in the draft." in said
    assert "use_heterogeneous_vocab=True" in said


def test_r37_different_ends_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    pair_vocabularies(Words(words()), Words(words(), eos=5), (REAL, REAL), None, CPU)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == "eos_token_id is 2 in the target and 5 in the draft model"


def test_vocabularies_that_share_next_to_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shares only .*, too few to draft with"):
        pair_vocabularies(
            Words(words()), Words(words(first="v")), (REAL, REAL), True, torch.device("cpu")
        )


def test_tokens_pair_by_what_they_spell_in_either_kind_of_tokenizer() -> None:
    byte_level = Words(["<b>", "</b>", "<e>", "Ġthe", "a", "Ġ", "Ċ"], bos=0, eos=2)
    sentencepiece = Words(["<s>", "▁", "a", "</s>", "▁the", "<0x0A>", "zz"], bos=0, eos=3)
    pair = pair_vocabularies(byte_level, sentencepiece, (7, 7), True, CPU)
    assert pair.to_target(torch.arange(7)).tolist() == [0, 5, 4, 2, 3, 6, -1]
    assert pair.to_draft(torch.tensor([3, 4, 2])).tolist() == [4, 2, 3]


def shuffled(share: float) -> Vocabulary:
    """A draft whose ids are the target's in another order, and which lacks some of them."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0)).tolist()
    names: list[str | None] = [f"w{i}" for i in order]
    for i in range(int(VOCABULARY * (1 - share))):
        names[(5 * i + 1) % VOCABULARY] = f"only{i}"
    target: list[str | None] = list(words(VOCABULARY))
    return intersect(target, names, (VOCABULARY, VOCABULARY), 3, CPU)


@pytest.mark.parametrize("tree", [chain(3), Tree((-1, 0, 0, 1, 1))])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_draft_of_another_vocabulary_changes_no_text(tree: Tree, acceptance: str) -> None:
    drafter = DraftModelDrafter(tiny_decoder(3), shuffled(0.7), Acceptance(acceptance))
    lab, plain = make_lab(drafter, tree, acceptance=acceptance), make_lab()
    for i, prompt in enumerate(prompts(6)):
        temperature = 0.4 * (i % 3) if acceptance == "match" else 0.0
        params = SamplingParams(temperature=temperature, max_tokens=24)
        for one in (lab, plain):
            one.add(str(i), prompt, params, seed=i)
    got, expected = lab.drain(), plain.drain()
    assert {k: r.tokens for k, r in got.items()} == {k: r.tokens for k, r in expected.items()}
    assert sum(run.drafted for run in got.values()) > 0


def test_the_same_model_in_another_order_of_ids_is_accepted_whole() -> None:
    """Embedding and head permuted, noise keyed by the target's ids: sampled drafts are the target's own samples."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))
    model = tiny_decoder(0)
    with torch.no_grad():
        model.embedding.copy_(tiny_decoder(0).embedding[order])
        model.head.weight.copy_(tiny_decoder(0).head.weight[order])
    model.head.pack()
    names: list[str | None] = [f"w{i}" for i in order.tolist()]
    target: list[str | None] = list(words(VOCABULARY))
    pair = intersect(target, names, (VOCABULARY, VOCABULARY), 3, CPU)
    drafter = DraftModelDrafter(model, pair, Acceptance.MATCH)
    params = SamplingParams(temperature=1.0, max_tokens=41, ignore_eos=True)
    run = make_lab(drafter, chain(4)).solo(prompts(1)[0], params, seed=3)
    assert {len(delta.token_ids) for delta in run.deltas[1:-1]} == {5}


def test_a_law_over_the_draft_becomes_one_over_the_target() -> None:
    pair = intersect(["a", "b", "c", "d"], ["d", "x", "a"], (5, 3), 0, CPU)
    law = pair.law_over_target(torch.tensor([0.5, 0.0, 0.5]))
    assert law.tolist() == [0.5, 0.0, 0.0, 0.5, 0.0]
    assert pair.reduced == 2
    assert same(4, 4, 4, CPU).reduced == 0
