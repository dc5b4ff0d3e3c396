"""Faults that users of other engines met: blocks, prefix cache, chunks, preemption, late results, the drafter's KV."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from lab import Lab, Run, behind, draft_model, make_lab, prompts, says, tiny_decoder

from foretell.ops.meta import LayerKV
from foretell.sampling_params import SamplingParams
from foretell.spec.drafter import Draft, Window
from foretell.spec.nodes import Shape
from foretell.spec.tree import Tree, chain

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
WARM = SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True)
PROMPT = prompts(1, seed=21, low=53, high=54)[0]  # three blocks and five tokens
BYTES_PER_BLOCK = (
    16 * 2 * 2 * 2 * 8 * 8 * 2
)  # target and draft of two layers, two KV heads of 8, float64


def sizes(run: Run) -> list[int]:
    return [len(delta.token_ids) for delta in run.deltas if delta.token_ids]


def rows_of(layers: tuple[LayerKV, ...], blocks: list[int], count: int) -> torch.Tensor:
    """[layers, 2, count, heads, dim] the KV of the first `count` entries of a block table."""
    index = torch.tensor(blocks)
    pages = [
        torch.stack((layer.k[index].flatten(0, 1)[:count], layer.v[index].flatten(0, 1)[:count]))
        for layer in layers
    ]
    return torch.stack(pages)


def kv_now(lab: Lab) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Target and draft KV of the only running request's committed tokens, and those tokens."""
    (request,) = lab.engine.scheduler.running
    pool, count = lab.engine.runner.device.kv, len(request.tokens) - 1
    return (
        rows_of(pool.target, request.blocks, count),
        rows_of(pool.drafter, request.blocks, count + 1),
        list(request.tokens),
    )


@pytest.mark.parametrize("tree", [chain(4), Tree((-1, 0, 0, 0, 0, 1, 1, 2, 2, 5, 6, 8))])
def test_kv_after_every_step_is_that_of_the_committed_tokens(tree: Tree) -> None:
    """Accepted nodes are scattered over the tree and over a block's edge; their rows end up dense, in both models."""
    lab = make_lab(draft_model(tiny_decoder(0)), tree)
    lab.add("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    runs: dict[str, Run] = {}
    for _ in range(6):
        lab.step(runs)
        target, draft, tokens = kv_now(lab)
        fresh = make_lab(draft_model(tiny_decoder(0)), chain(2), enable_prefix_caching=False)
        fresh.add("a", tokens[:-1], LONG)
        fresh.step({})
        clean_target, clean_draft, _ = kv_now(fresh)
        assert torch.allclose(target, clean_target[:, :, : target.shape[2]], atol=1e-9)
        # The draft has also seen the pending token.
        known = min(draft.shape[2], clean_draft.shape[2]) - 1
        assert torch.allclose(draft[:, :, :known], clean_draft[:, :, :known], atol=1e-9)


def test_acceptance_does_not_decay_over_a_request() -> None:
    lab = make_lab(draft_model(tiny_decoder(0)), chain(4), max_model_len=300)
    run = lab.solo(PROMPT, SamplingParams(temperature=0.0, max_tokens=201, ignore_eos=True))
    assert sizes(run) == [1, *[5] * 40]


def test_a_corrupted_draft_spoils_its_own_step_only() -> None:
    drafter = draft_model(tiny_decoder(0))
    propose, calls = drafter.propose, [0]

    def corrupted(window: Window, shape: Shape) -> Draft:
        draft = propose(window, shape)
        calls[0] += 1
        if calls[0] % 3 == 0:
            draft.tokens[:, 2] = (draft.tokens[:, 2] + 1) % 90
        return draft

    drafter.propose = corrupted  # type: ignore[method-assign]
    run = make_lab(drafter, chain(4)).solo(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    )
    assert sizes(run)[1:16] == [5, 5, 2] * 5


def test_after_a_pause_the_first_draft_is_whole() -> None:
    lab = make_lab(draft_model(tiny_decoder(0)), chain(4))
    lab.add("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
    runs: dict[str, Run] = {}
    wanted = lab.engine.scheduler.wanted_tree
    lab.step(runs)
    lab.engine.scheduler.wanted_tree = 0
    for _ in range(20):
        lab.step(runs)
    lab.engine.scheduler.wanted_tree = wanted
    lab.drain(runs)
    run_sizes = sizes(runs["a"])
    assert run_sizes[2:20] == [1] * 18
    back = run_sizes.index(5, 2)
    assert set(run_sizes[back:-1]) == {5}
    assert run_sizes[2:back] == [1] * (back - 2)


@pytest.mark.parametrize("params", [LONG, WARM])
@pytest.mark.parametrize("cut", [None, 40])
def test_a_prefix_hit_changes_neither_text_nor_acceptance(
    params: SamplingParams, cut: int | None
) -> None:
    """Pages of the draft are shared as well, and freed ones hold NaN."""
    second = PROMPT if cut is None else [*PROMPT[:cut], *prompts(1, seed=22, low=13, high=14)[0]]
    cold = make_lab(draft_model(tiny_decoder(0)), chain(4)).solo(second, params, seed=5)
    lab = make_lab(draft_model(tiny_decoder(0)), chain(4))
    lab.solo(PROMPT, params, seed=5)
    warm = lab.solo(second, params, seed=5)
    assert warm.deltas[0].num_cached_tokens == (48 if cut is None else 32)
    assert warm.tokens == cold.tokens
    assert sizes(warm) == sizes(cold)


def test_eight_equal_prompts_at_once_equal_one_alone() -> None:
    lab = make_lab(draft_model(tiny_decoder(0)), chain(4))
    alone = lab.solo(PROMPT, WARM, seed=1)
    for i in range(8):
        lab.add(str(i), PROMPT, WARM, seed=1)
    runs = lab.drain()
    assert all(runs[str(i)].tokens == alone.tokens for i in range(8))


def test_the_next_turn_of_a_chat_hits_the_generated_text() -> None:
    lab = make_lab(draft_model(tiny_decoder(0)), chain(4))
    first = lab.solo(PROMPT, LONG)
    turn = [*PROMPT, *first.tokens, 17, 18, 19]
    cold = make_lab(draft_model(tiny_decoder(0)), chain(4)).solo(turn, LONG)
    hit = lab.solo(turn, LONG)
    assert hit.deltas[0].num_cached_tokens >= 80
    assert hit.tokens == cold.tokens
    assert sizes(hit) == sizes(cold)


@pytest.mark.parametrize("chunk", [16, 24, 64])
def test_chunking_changes_neither_kv_nor_text(chunk: int) -> None:
    whole = make_lab(draft_model(tiny_decoder(0)), chain(4))
    parts = make_lab(draft_model(tiny_decoder(0)), chain(4), max_num_batched_tokens=chunk)
    results = []
    for lab in (whole, parts):
        runs: dict[str, Run] = {}
        lab.add("a", PROMPT, LONG)
        while not runs or not runs["a"].tokens:
            lab.step(runs)
        results.append((*kv_now(lab)[:2], lab.drain(runs)["a"]))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-9)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-9)
    assert results[0][2].tokens == results[1][2].tokens
    assert sizes(results[0][2]) == sizes(results[1][2])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_a_pool_too_small_preempts_and_changes_no_text(k: int, late: bool) -> None:
    params = [replace(p, max_tokens=60) for p in (LONG, WARM)] * 3
    texts = prompts(6, seed=4, low=4, high=12)

    def run(blocks: int | None) -> tuple[Lab, dict[str, Run]]:
        pool = {} if blocks is None else {"kv_cache_memory_bytes": blocks * BYTES_PER_BLOCK}
        lab = make_lab(draft_model(tiny_decoder(7)), chain(k), max_model_len=96, **pool)
        lab = behind(lab) if late else lab
        for i, text in enumerate(texts):
            lab.add(str(i), text, params[i], seed=i)
        return lab, lab.drain()

    ample, tight = run(None), run(11)
    assert ample[0].engine.scheduler.preemptions == 0
    assert tight[0].engine.scheduler.preemptions >= 2
    for name, oracle in ample[1].items():
        assert tight[1][name].tokens == oracle.tokens


@pytest.mark.parametrize("late", [False, True])
def test_a_host_one_step_behind_gives_the_same_text(late: bool) -> None:
    lab = make_lab(draft_model(tiny_decoder(7)), chain(3))
    lab = behind(lab) if late else lab
    texts = prompts(10, seed=8)
    for i, text in enumerate(texts):
        lab.add(str(i), text, SamplingParams(temperature=0.8, max_tokens=3 + 4 * i), seed=i)
    runs = lab.drain()
    for i, text in enumerate(texts):
        oracle = make_lab().solo(
            text, SamplingParams(temperature=0.8, max_tokens=3 + 4 * i), seed=i
        )
        assert (runs[str(i)].tokens, runs[str(i)].finish) == (oracle.tokens, oracle.finish)


@pytest.mark.parametrize("late", [False, True])
def test_an_abort_in_flight_drops_its_result_and_frees_its_blocks(late: bool) -> None:
    lab = make_lab(draft_model(tiny_decoder(7)), chain(3))
    lab = behind(lab) if late else lab
    free = lab.engine.scheduler.blocks.available
    solo = make_lab().solo(prompts(2)[1], LONG)
    lab.add("gone", prompts(2)[0], LONG)
    lab.add("stays", prompts(2)[1], LONG)
    runs: dict[str, Run] = {}
    for _ in range(4):
        lab.step(runs)
    before = len(runs["gone"].tokens)
    lab.engine.abort("gone")
    lab.engine.abort("never was")
    lab.drain(runs)
    assert len(runs["gone"].tokens) == before
    assert runs["stays"].tokens == solo.tokens
    assert lab.engine.scheduler.blocks.available == free


@pytest.mark.parametrize("late", [False, True])
def test_two_hundred_mixed_requests_leave_no_block_behind(late: bool) -> None:
    rng = random.Random(3)
    lab = make_lab(
        says(5, 6, 7, 8, 9),
        chain(5),
        max_model_len=96,
        kv_cache_memory_bytes=40 * 16 * 2 * 2 * 2 * 8 * 8,
    )
    lab = behind(lab) if late else lab
    free = lab.engine.scheduler.blocks.available
    runs: dict[str, Run] = {}
    for i in range(200):
        text = [rng.randrange(3, 96) for _ in range(rng.randint(1, 70))]
        lab.add(
            str(i),
            text,
            SamplingParams(temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 24)),
            seed=i,
        )
        if rng.random() < 0.5:
            lab.step(runs)
        if rng.random() < 0.1:
            lab.engine.abort(str(rng.randint(0, i)))
    lab.drain(runs)
    assert lab.engine.scheduler.blocks.available == free
    assert sum(run.finish is not None for run in runs.values()) >= 150


@pytest.mark.parametrize("count", [1, 3, 8, 16, 20])
def test_the_token_budget_may_be_filled_exactly(count: int) -> None:
    texts = prompts(count, seed=2, low=3, high=20)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    lab = make_lab(
        draft_model(tiny_decoder(7)), chain(3), max_num_batched_tokens=64, max_num_seqs=16
    )
    for i, text in enumerate(texts):
        lab.add(str(i), text, params)
    runs = lab.drain()
    oracle = make_lab(max_num_seqs=16)
    for i, text in enumerate(texts):
        assert runs[str(i)].tokens == oracle.solo(text, params).tokens


def test_priority_runs_the_urgent_first_with_the_same_text() -> None:
    lab = make_lab(
        draft_model(tiny_decoder(7)), chain(3), max_num_seqs=1, scheduling_policy="priority"
    )
    order: list[str] = []
    for name, priority in (("later", 5), ("soon", 1), ("now", 0)):
        lab.add(name, prompts(1)[0], LONG, priority=priority)
    runs = lab.drain()
    order = sorted(runs, key=lambda name: list(runs).index(name))
    assert order == ["now", "soon", "later"]
    assert runs["now"].tokens == runs["later"].tokens == make_lab().solo(prompts(1)[0], LONG).tokens


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    lab = make_lab(max_model_len=64, kv_cache_memory_bytes=8 * 16 * 2 * 2 * 2 * 8 * 8)
    lab.add("fits", [5, 6], SamplingParams(temperature=0.0, max_tokens=4))
    assert lab.drain()["fits"].finish is not None
