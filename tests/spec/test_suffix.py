"""Suffix decoding: the corpus against a plain search, the choice by hand, and text that is never changed by it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from drafting import NoHost, Request
from lab import Lab, Run, ScriptedDrafter, behind, make_lab, prompts, tiny_decoder
from torch import Tensor

from foretell.sampling_params import SamplingParams
from foretell.spec.chained import ChainedDrafter
from foretell.spec.corpus import Corpus
from foretell.spec.ngram import NgramDrafter
from foretell.spec.nodes import static_shape
from foretell.spec.processors import Mode
from foretell.spec.suffix import SuffixDrafter, SuffixLimits, choose, last_tokens
from foretell.spec.tree import Tree, chain

CPU = torch.device("cpu")
DEPTH, LENGTHS = 12, (2, 4, 8)


def corpus(tokens: int = 1 << 10, texts: int = 100) -> Corpus:
    return Corpus(tokens, texts, LENGTHS, DEPTH, CPU)


def ends_of(text: list[int], depth: int = DEPTH) -> Tensor:
    return last_tokens(torch.tensor([text]), torch.tensor([len(text)]), depth)


def longest(texts: list[list[int]], text: list[int]) -> int:
    """Tokens at the end of `text` that stand somewhere in `texts`, by trying."""
    for size in range(min(DEPTH, len(text)), 0, -1):
        end = text[-size:]
        if any(one[i : i + size] == end for one in texts for i in range(len(one) - size + 1)):
            return size
    return 0


@pytest.mark.parametrize("words", [3, 12, 60])
def test_the_corpus_finds_the_longest_context_that_a_plain_search_finds(words: int) -> None:
    rng = random.Random(words)
    store, texts = corpus(), []
    for _ in range(60):
        texts.append([rng.randrange(words) for _ in range(rng.randint(1, 14))])
        store.learn(torch.tensor(texts[-1]))
        one = rng.choice(texts)
        query = [rng.randrange(words) for _ in range(4)] + one[: rng.randint(0, len(one))]
        runs, matched = store.look_up(ends_of(query), 3)
        best = int(matched.max())
        wanted = longest(texts, query)
        # Only the latest places of a context are looked at: of many equal ones the longest may be further back.
        assert best <= wanted
        if words == 60:
            assert best == wanted or wanted < LENGTHS[0]
        for run, size in zip(runs[0].tolist(), matched[0].tolist(), strict=True):
            after = list(itertools.takewhile(lambda token: token >= 0, run))
            whole = [*query[len(query) - size :], *after]
            if size >= LENGTHS[0]:
                assert any(
                    one[i : i + len(whole)] == whole for one in texts for i in range(len(one))
                ), "what is returned stands in a text, in one piece"


def test_nothing_is_found_across_the_seam_of_two_texts() -> None:
    store = corpus()
    store.learn(torch.tensor([1, 2, 3]))
    store.learn(torch.tensor([4, 5, 6]))
    _, matched = store.look_up(ends_of([3, 4]), 2)
    assert matched.max() <= 1
    runs, matched = store.look_up(ends_of([2, 3]), 2)
    assert matched.max() == 2
    assert runs[0, matched[0].argmax()].tolist()[0] < 0, "a text ends where it ended"


def test_the_oldest_texts_give_way_and_memory_stays() -> None:
    store = corpus(tokens=64, texts=1000)
    size, texts = store.bytes, []
    rng = random.Random(1)
    for _ in range(200):
        texts.append([rng.randrange(10_000) for _ in range(rng.randint(3, 20))])
        store.learn(torch.tensor(texts[-1]))
        _, matched = store.look_up(ends_of(texts[-1][:3]), 1)
        assert int(matched.max()) == 3
    assert store.bytes == size
    for text in texts[:-10]:
        assert int(store.look_up(ends_of(text), 1)[1].max()) == 0


def test_no_more_texts_are_kept_than_were_asked_for() -> None:
    store = corpus(texts=3)
    texts = [[10 * i + j for j in range(5)] for i in range(6)]
    for text in texts:
        store.learn(torch.tensor(text))
    found = [int(store.look_up(ends_of(text), 1)[1].max()) for text in texts]
    assert found == [0, 0, 0, 5, 5, 5]


def test_a_text_longer_than_the_room_leaves_its_end() -> None:
    store = corpus(tokens=64)
    store.learn(torch.arange(500))
    assert int(store.look_up(ends_of(list(range(100))), 1)[1].max()) == 0
    assert int(store.look_up(ends_of(list(range(499))), 1)[1].max()) == DEPTH


def test_the_way_most_of_the_longest_matches_go_is_drafted() -> None:
    limits = SuffixLimits(shortest=2, probability=0.3)
    runs = torch.tensor([[[7, 7, 7], [1, 2, 3], [1, 2, 4], [1, 5, 6], [9, 9, 9]]])
    matched = torch.tensor([[6, 6, 6, 6, 5]])
    # Four places agree: 1 is the way of three of them, then 2 of two, then 3 of one.
    assert choose(runs, matched, limits).tolist() == [[1, 2, -1]]
    rare = SuffixLimits(shortest=2, probability=0.6)
    assert choose(runs, matched, rare).tolist() == [[1, -1, -1]]
    short = SuffixLimits(shortest=2, factor=0.34)
    assert choose(runs, matched, short).tolist() == [[1, 2, -1]]
    assert choose(runs, matched, SuffixLimits(shortest=7)).tolist() == [[-1, -1, -1]]
    assert choose(runs, matched, SuffixLimits(shortest=2, factor=0.0)).tolist() == [[-1, -1, -1]]


def test_the_own_text_is_searched_to_its_longest_match() -> None:
    drafter = SuffixDrafter(SuffixLimits(shortest=2, texts=0))
    request = Request(drafter, tiny_decoder(0), width=6)
    text = [5, 6, 7, 8, 9, 1, 7, 8, 2, 2, 4, 5, 6]
    request.tokens = [*text]
    assert request.propose([7, 8], None, chain(4)).tokens.tolist() == [[-1, 9, 1, 7, 8]]
    request.tokens = [1, 2, 3]
    assert request.propose([4], None, chain(4)).tokens.tolist() == [[-1] * 5]


PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def suffix_lab(tree: Tree, texts: int = 100, **config: object) -> tuple[Lab, SuffixDrafter]:
    drafter = SuffixDrafter(SuffixLimits(shortest=2, texts=texts, tokens=4096))
    return make_lab(drafter, tree, learner=drafter if texts else None, **config), drafter


@pytest.mark.parametrize("tree", [chain(5), Tree((-1, 0, 0, 1, 1, 3))])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_that_comes_again_is_foreseen_and_never_changed(
    tree: Tree, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    plain = make_lab()
    lab, drafter = suffix_lab(tree)
    for prompt in prompts(3):
        expected = plain.solo(prompt, params, seed=4).tokens
        first = lab.solo(prompt, params, seed=4)
        again = lab.solo(prompt, params, seed=4)
        assert first.tokens == again.tokens == expected
        # All but the first token, which is not drafted, and the first drafts, whose contexts are short.
        assert again.accepted > 40 * tree.depth // (tree.depth + 1) - 2 * tree.depth
        assert again.accepted > first.accepted
    assert drafter.corpus is not None
    assert drafter.corpus.kept == 5, "the last one is handed over with the next step"


def test_without_past_outputs_only_the_own_text_is_used() -> None:
    lab, drafter = suffix_lab(chain(5), texts=0)
    first, again = (lab.solo(prompts(1)[0], PARAMS) for _ in range(2))
    assert drafter.corpus is None
    assert again.accepted == first.accepted


@pytest.mark.parametrize("late", [False, True])
def test_requests_that_end_early_are_learned_too(late: bool) -> None:
    lab, drafter = suffix_lab(chain(3))
    lab = behind(lab) if late else lab
    lab.add("a", prompts(1)[0], PARAMS)
    runs: dict[str, Run] = {}
    while "a" not in runs or len(runs["a"].tokens) < 12:
        lab.step(runs)
    lab.engine.abort("a")
    lab.drain(runs)
    lab.solo(prompts(2)[1], PARAMS)
    lab.solo(prompts(2)[1], PARAMS)
    assert drafter.corpus is not None
    assert drafter.corpus.kept == 2


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_a_request_may_want_longer_matches(kind: str) -> None:
    """Of the same text, rows that ask for no more than what agrees are drafted for, the others are not."""
    text = [5, 6, 7, 8, 9, 1, 6, 7, 8]  # its last three tokens stood there before
    for wanted, fires in ((0, True), (1, True), (3, True), (4, False), (50, False)):
        drafter = (
            NgramDrafter(1, 5)
            if kind == "ngram"
            else SuffixDrafter(SuffixLimits(shortest=1, texts=0))
        )
        request = Request(drafter, tiny_decoder(0), width=4)
        request.tokens = text[:-1]
        window = replace(
            request.window(text[-1:], None),
            least_match=torch.tensor([wanted]),
            mode=Mode(lookups=True),
        )
        draft = drafter.propose(window, static_shape(chain(2), CPU))
        assert draft.tokens.tolist() == [[-1, 9, 1] if fires else [-1, -1, -1]]


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_requests_with_and_without_a_wish_for_longer_matches_share_a_batch(kind: str) -> None:
    drafter = (
        NgramDrafter(1, 5) if kind == "ngram" else SuffixDrafter(SuffixLimits(shortest=1, texts=0))
    )
    lab, plain = make_lab(drafter, chain(3)), make_lab()
    text = [5, 6, 7] * 6
    for name, least in (("any", None), ("four", 4), ("never", 90)):
        params = SamplingParams(
            temperature=0.0, max_tokens=30, ignore_eos=True, prompt_lookup_min=least
        )
        for one in (lab, plain):
            one.add(name, text, params)
    runs, expected = lab.drain(), plain.drain()
    assert {k: r.tokens for k, r in runs.items()} == {k: r.tokens for k, r in expected.items()}
    drafted = {name: run.drafted for name, run in runs.items()}
    assert drafted["any"] > drafted["four"] > 0
    assert (drafted["never"] == 0) == (kind == "suffix"), "n-gram compares five tokens at most"
    with pytest.raises(ValueError, match="prompt_lookup_min must be at least 1, got 0"):
        SamplingParams(prompt_lookup_min=0)


def test_looking_never_waits_for_the_device() -> None:
    drafter = SuffixDrafter(SuffixLimits(shortest=2))
    request = Request(drafter, tiny_decoder(0), width=6)
    drafter.learn(torch.arange(3, 60))
    request.tokens = [1, 2, 3]
    window = request.window([4, 5, 6], None)
    shape = static_shape(chain(4), CPU)
    with NoHost():
        draft = drafter.propose(window, shape)
    assert draft.tokens.tolist() == [[-1, 7, 8, 9, 10]]


# Chains of drafters.


def always(token: int) -> ScriptedDrafter:
    return ScriptedDrafter(lambda _, tree: [-1] + [token] * (tree.nodes - 1))


def test_a_row_is_the_free_drafters_where_it_fires_and_the_other_ones_elsewhere() -> None:
    drafter = ChainedDrafter(NgramDrafter(2, 3), always(50))
    request = Request(drafter, tiny_decoder(0), width=6)
    request.tokens = [1, 2, 3, 4]
    assert request.propose([1, 2], None, chain(3)).tokens.tolist() == [[-1, 3, 4, 1]]
    request.tokens = [1, 2, 3, 4]
    assert request.propose([9], None, chain(3)).tokens.tolist() == [[-1, 50, 50, 50]]
    tree = Tree((-1, 0, 0, 1))
    request.tokens = [1, 2, 3, 4]
    assert request.propose([1, 2], None, tree).tokens.tolist() == [[-1, 3, 50, 4]]
    request.tokens = [1, 2, 3, 4]
    gap = Tree((-1, 0, 0), (0, 1, 2))
    assert request.propose([1, 2], None, gap).tokens.tolist() == [[-1, 50, 50]]
