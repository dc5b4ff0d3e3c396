"""The contract: every drafter, tree, temperature and batch mix gives what plain decoding gives, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from lab import EOS, VOCABULARY, Run, ScriptedDrafter, draft_model, make_lab, prompts, tiny_decoder

from foretell.sampling_params import SamplingParams
from foretell.spec.chained import ChainedDrafter
from foretell.spec.drafter import Drafter
from foretell.spec.ngram import NgramDrafter
from foretell.spec.suffix import SuffixDrafter, SuffixLimits
from foretell.spec.tree import Tree, chain

TREES = {
    "chain1": chain(1),
    "chain3": chain(3),
    "chain5": chain(5),
    "wide": Tree((-1, 0, 0, 0, 0)),
    "bushy": Tree((-1, 0, 0, 1, 1, 2, 3, 3, 6)),
}


def noisy(text: list[int], tree: Tree) -> list[int]:
    """Drafts that are often wrong, with gaps and duplicate siblings."""
    rng = random.Random(sum(text) + len(text))
    return [
        -1,
        *(rng.choice([-1, 3, text[-1], rng.randrange(VOCABULARY)]) for _ in range(tree.nodes - 1)),
    ]


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(SuffixLimits(shortest=1, texts=0)),
    "chained": lambda: ChainedDrafter(NgramDrafter(1, 2), draft_model(tiny_decoder(7, layers=1))),
    "noise": lambda: ScriptedDrafter(noisy),
    "copy": lambda: draft_model(tiny_decoder(0)),
    "random": lambda: draft_model(tiny_decoder(7, layers=1)),
}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "warm": SamplingParams(temperature=0.7, max_tokens=24),
    "hot": SamplingParams(temperature=1.0, max_tokens=24),
    "filtered": SamplingParams(temperature=1.0, top_p=0.9, top_k=12, min_p=0.02, max_tokens=24),
    "penalised": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        max_tokens=24,
    ),
    "biased": SamplingParams(
        temperature=0.9,
        logit_bias={5: 4.0, 9: -100.0},
        allowed_token_ids=list(range(60)),
        min_tokens=6,
        logprobs=2,
        max_tokens=24,
    ),
}
PROMPTS = prompts(6)


def run_all(
    drafter: Drafter | None, tree: Tree, params: list[SamplingParams], **config: object
) -> list[Run]:
    lab = make_lab(drafter, tree, **config)
    for i, (prompt, param) in enumerate(zip(PROMPTS, params, strict=True)):
        lab.add(str(i), prompt, param, seed=100 + i, bad_words=[[7], [11, 12]] if i % 2 else [])
    runs = lab.drain()
    return [runs[str(i)] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain() -> Callable[[str], list[Run]]:
    known: dict[str, list[Run]] = {}

    def look_up(kind: str) -> list[Run]:
        if kind not in known:
            known[kind] = run_all(None, chain(0), mix(kind))
        return known[kind]

    return look_up


def mix(kind: str) -> list[SamplingParams]:
    if kind == "mixed":
        return [
            PARAMS[name] for name in ("greedy", "hot", "penalised", "biased", "filtered", "warm")
        ]
    return [PARAMS[kind]] * len(PROMPTS)


@pytest.mark.parametrize("kind", [*PARAMS, "mixed"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_that_of_plain_decoding(
    drafter: str, tree: str, kind: str, plain: Callable[[str], list[Run]]
) -> None:
    runs = run_all(DRAFTERS[drafter](), TREES[tree], mix(kind))
    for run, oracle in zip(runs, plain(kind), strict=True):
        assert run.tokens == oracle.tokens
        assert (run.finish, run.stop_reason) == (oracle.finish, oracle.stop_reason)
        assert len(run.logprobs) == len(oracle.logprobs)
        for ours, theirs in zip(run.logprobs, oracle.logprobs, strict=True):
            assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
            assert abs(ours.logprob - theirs.logprob) < 1e-4
            assert list(ours.top) == list(theirs.top)
            assert all(abs(ours.top[t] - theirs.top[t]) < 1e-4 for t in ours.top)


@pytest.mark.parametrize("tree", ["chain3", "bushy"])
def test_a_perfect_draft_is_accepted_whole(tree: str) -> None:
    """Greedy, draft = target: every step but the last commits depth + 1 tokens."""
    shape = TREES[tree]
    lab = make_lab(draft_model(tiny_decoder(0)), shape)
    run = lab.solo(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True))
    sizes = [len(delta.token_ids) for delta in run.deltas]
    assert sizes[0] == 1
    assert set(sizes[1:-1]) == {shape.depth + 1}
    assert sum(sizes) == 41


def test_shared_noise_makes_a_perfect_draft_perfect_when_sampling() -> None:
    lab = make_lab(draft_model(tiny_decoder(0)), chain(4))
    run = lab.solo(
        PROMPTS[1], SamplingParams(temperature=1.0, max_tokens=41, ignore_eos=True), seed=3
    )
    assert {len(delta.token_ids) for delta in run.deltas[1:-1]} == {5}


@pytest.mark.parametrize("preempted", [False, True])
def test_seeded_text_does_not_depend_on_company(preempted: bool) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    alone = make_lab(draft_model(tiny_decoder(7, layers=1)), chain(3)).solo(
        PROMPTS[0], params, seed=7
    )
    # A pool of 14 blocks cannot hold eight requests of 40 tokens and more: some are preempted.
    pool = {"kv_cache_memory_bytes": 14 * 16 * 1536} if preempted else {}
    lab = make_lab(draft_model(tiny_decoder(7, layers=1)), chain(3), max_model_len=112, **pool)
    for i in range(8):
        lab.add(str(i), PROMPTS[0] if i in (3, 5) else PROMPTS[i % 6], params, seed=7)
    runs = lab.drain()
    assert runs["3"].tokens == runs["5"].tokens == alone.tokens
    assert (lab.engine.scheduler.preemptions > 0) == preempted


def test_rejection_is_greedy_text_at_temperature_zero() -> None:
    params = [PARAMS["greedy"]] * len(PROMPTS)
    oracle = run_all(None, chain(0), params)
    for tree in TREES.values():
        runs = run_all(
            draft_model(tiny_decoder(7, layers=1), "rejection"),
            tree,
            params,
            acceptance="rejection",
        )
        assert [run.tokens for run in runs] == [run.tokens for run in oracle]


def test_an_end_token_inside_a_block_ends_the_text() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    tokens = make_lab().solo(PROMPTS[2], params).tokens
    for place in range(8):
        stop = tokens[place]
        expected = tokens[: tokens.index(stop) + 1]
        lab = make_lab(draft_model(tiny_decoder(0)), chain(7))
        run = lab.solo(
            PROMPTS[2],
            SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop]),
        )
        assert run.tokens == expected
        assert (run.finish, run.stop_reason) == ("stop", stop)


def test_a_drafted_end_token_that_the_target_refuses_ends_nothing() -> None:
    oracle = make_lab().solo(PROMPTS[3], PARAMS["greedy"])
    lab = make_lab(ScriptedDrafter(lambda _, tree: [-1] + [EOS] * (tree.nodes - 1)), chain(4))
    assert lab.solo(PROMPTS[3], PARAMS["greedy"]).tokens == oracle.tokens
