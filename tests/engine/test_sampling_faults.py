"""Faults that users of other engines met: sampling features, stopping and limits inside a block of several tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from lab import (
    EOS,
    VOCABULARY,
    Run,
    ScriptedTarget,
    draft_model,
    knows,
    make_lab,
    prompts,
    says,
    scripted_text,
    tiny_decoder,
)

from foretell.sampling_params import SamplingParams
from foretell.spec.tree import chain

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
STOP = 40


@pytest.mark.parametrize(
    ("place", "expected", "reason"),
    [
        (3, [31, 32, STOP], "stop"),
        (6, [31, 32, 33, 34, 35], "length"),
        (5, [31, 32, 33, 34, STOP], "stop"),
    ],
)
def test_a_stop_before_the_limit_wins_over_the_limit(
    place: int, expected: list[int], reason: str
) -> None:
    text = [31, 32, 33, 34, 35, 36, 37]
    text[place - 1] = STOP
    lab = make_lab(knows(text, 4), chain(6), target=scripted_text(text, 4))
    run = lab.solo(
        [5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=5, stop_token_ids=[STOP])
    )
    assert (run.tokens, run.finish) == (expected, reason)


@pytest.mark.parametrize("place", range(8))
def test_a_turn_after_an_end_inside_a_block_is_as_if_nothing_had_been_drafted_behind_it(
    place: int,
) -> None:
    """Two end tokens; the block went on behind the first of them, and the next turn hits the prefix cache."""
    prompt = prompts(1, seed=5, low=30, high=31)[0]
    text = make_lab().solo(prompt, replace(GREEDY, ignore_eos=True)).tokens
    ends = replace(GREEDY, ignore_eos=True, stop_token_ids=[VOCABULARY - 1, text[place]])
    lab = make_lab(draft_model(tiny_decoder(0)), chain(7))
    first = lab.solo(prompt, ends)
    assert first.tokens == text[: text.index(text[place]) + 1]
    assert (first.finish, first.stop_reason) == ("stop", text[place])
    turn = [*prompt, *first.tokens, 17, 18, 19]
    warm = lab.solo(turn, GREEDY)
    assert warm.deltas[0].num_cached_tokens >= 16
    assert warm.tokens == make_lab().solo(turn, GREEDY).tokens


@pytest.mark.parametrize("drafts", [(5,) * 5, (6,) * 5, (5, 6, 5, 6, 5), ()])
def test_frequency_penalty_counts_tokens_not_steps(drafts: tuple[int, ...]) -> None:
    def rows(positions: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*positions.shape, 16).double()
        logits[..., 5], logits[..., 6] = 2.0, 1.7
        return logits

    lab = make_lab(says(*drafts), chain(5), target=ScriptedTarget(16, rows))
    run = lab.solo([1, 3], SamplingParams(temperature=0.0, max_tokens=8, frequency_penalty=0.2))
    assert run.tokens == [5, 5, 6, 5, 6, 5, 6, 5]


@pytest.mark.parametrize("k", [1, 3, 6])
def test_min_tokens_holds_the_end_token_back_exactly_so_long(k: int) -> None:
    def rows(positions: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*positions.shape, 16).double()
        logits[..., EOS], logits[..., 5] = 9.0, 1.0
        return logits

    lab = make_lab(says(5, 5, 5, 5, 5, 5), chain(k), target=ScriptedTarget(16, rows))
    run = lab.solo([1, 3], SamplingParams(temperature=0.0, max_tokens=20, min_tokens=6))
    assert run.tokens == [5] * 6 + [EOS]
    assert run.finish == "stop"


def test_a_bad_word_is_refused_in_the_very_step_that_drafts_it() -> None:
    def rows(positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*positions.shape, 16).double()
        logits[..., 5] = 2.0
        logits[..., 9] = torch.where(tokens == 5, 5.0, 0.0)
        return logits

    params = SamplingParams(temperature=0.0, max_tokens=6)
    words = {"bad_words": [[5, 9]]}
    plain = make_lab(target=ScriptedTarget(16, rows)).solo([1, 3], params, **words)
    lab = make_lab(says(5, 9, 5, 9), chain(4), target=ScriptedTarget(16, rows))
    assert lab.solo([1, 3], params, **words).tokens == plain.tokens == [5] * 6


@pytest.mark.parametrize("drafts", [(7, 7, 7), (8, 8, 8), ()])
def test_logprobs_are_the_targets_own_at_every_kind_of_token(drafts: tuple[int, ...]) -> None:
    def rows(positions: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*positions.shape, 12), math.log(0.5 / 10)).double()
        logits[..., 7], logits[..., 3] = math.log(0.25) + 1e-9, math.log(0.25)
        return logits

    lab = make_lab(says(*drafts), chain(3), target=ScriptedTarget(12, rows))
    run = lab.solo([1, 4], SamplingParams(temperature=0.0, max_tokens=10, logprobs=2))
    assert run.tokens == [7] * 10
    assert len(run.logprobs) == 10
    for entry in run.logprobs:
        assert (entry.token, entry.rank, list(entry.top)) == (7, 1, [7, 3])
        values = (entry.logprob, *entry.top.values())
        assert all(abs(value - math.log(0.25)) < 1e-4 for value in values)


@pytest.mark.parametrize("drafts", [(9, 9, 9), (8, 8, 8), ()])
def test_the_rank_of_a_token_counts_the_whole_vocabulary(drafts: tuple[int, ...]) -> None:
    """Logits rise with the id, 9 is all that is allowed: 10 and 11 are likelier, and 8 is as likely."""

    def rows(positions: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        logits = torch.arange(12).double().expand(*positions.shape, 12).clone()
        logits[..., 8] = 9.0
        return logits

    lab = make_lab(says(*drafts), chain(3), target=ScriptedTarget(12, rows))
    params = SamplingParams(
        temperature=0.0, max_tokens=8, allowed_token_ids=[9], logprobs=1, prompt_logprobs=0
    )
    run = lab.solo([1, 4, 11, 0], params)
    assert [(row.token, row.rank, list(row.top)) for row in run.logprobs] == [(9, 3, [11])] * 8
    assert [(row.token, row.rank) for row in run.prompt_logprobs] == [(4, 8), (11, 1), (0, 12)]


def test_prompt_logprobs_are_those_of_the_whole_prompt_in_any_chunking() -> None:
    prompt = prompts(1, seed=5, low=30, high=40)[0]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    whole = make_lab().solo(prompt, params)
    chunked = make_lab(max_num_batched_tokens=16).solo(prompt, params)
    assert len(whole.prompt_logprobs) == len(chunked.prompt_logprobs) == len(prompt) - 1
    for a, b in zip(whole.prompt_logprobs, chunked.prompt_logprobs, strict=True):
        assert (a.token, a.rank, list(a.top)) == (b.token, b.rank, list(b.top))
        assert abs(a.logprob - b.logprob) < 1e-6
        assert all(abs(a.top[t] - b.top[t]) < 1e-6 for t in a.top)
    assert [row.token for row in whole.prompt_logprobs] == prompt[1:]


def test_a_nan_ends_its_own_request_after_the_sound_tokens() -> None:
    def rows(positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.one_hot((tokens + 1) % 130, 130).double() * 9
        broken = (positions == 4 + 2) & (tokens >= 60)  # request B's output position 3
        return torch.where(broken.unsqueeze(-1), torch.nan, logits)

    starts = {"a": 10, "b": 61, "c": 30}
    solo = {
        name: make_lab(target=ScriptedTarget(130, rows)).solo([1, 1, 1, start], GREEDY)
        for name, start in starts.items()
        if name != "b"
    }
    for k in (0, 3):
        drafter = None if k == 0 else draft_model(tiny_decoder(3, vocabulary=130))
        lab = make_lab(drafter, chain(k), target=ScriptedTarget(130, rows))
        for name, start in starts.items():
            lab.add(name, [1, 1, 1, start], GREEDY)
        runs = lab.drain()
        assert (runs["b"].finish, runs["b"].tokens) == ("error", [62, 63, 64])
        assert all(runs[name].tokens == solo[name].tokens for name in solo)
        assert all(0 <= token < 130 for run in runs.values() for token in run.tokens)


def test_blocks_of_a_broken_request_do_no_harm_to_the_next_owner() -> None:
    target = tiny_decoder(0)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompt = prompts(1, seed=9, low=20, high=30)[0]
    oracle = make_lab(target=target).solo(prompt, params)
    lab = make_lab(
        draft_model(tiny_decoder(0)), chain(3), target=target, enable_prefix_caching=False
    )
    lab.solo(prompt, params)
    for layer in (*lab.engine.runner.device.kv.target, *lab.engine.runner.device.kv.drafter):
        layer.k[1:], layer.v[1:] = torch.nan, torch.nan
    lab.engine.runner.note_error()
    assert lab.solo(prompt, params).tokens == oracle.tokens


def test_after_a_broken_request_a_prefix_hit_still_finds_its_text() -> None:
    """From then on blocks are cleared when they are handed out, but not those that a hit brings along."""
    prompt = prompts(1, seed=9, low=40, high=41)[0]
    lab = make_lab(draft_model(tiny_decoder(0)), chain(3))
    cold = lab.solo(prompt, GREEDY)
    lab.engine.runner.note_error()
    warm = lab.solo(prompt, GREEDY)
    assert warm.deltas[0].num_cached_tokens >= 32
    assert warm.tokens == cold.tokens
    assert [len(d.token_ids) for d in warm.deltas] == [len(d.token_ids) for d in cold.deltas]


def test_a_nan_in_the_draft_changes_nothing() -> None:
    draft = tiny_decoder(7, layers=1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.fill_(torch.nan)
    prompt = prompts(1)[0]
    assert (
        make_lab(draft_model(draft), chain(3)).solo(prompt, GREEDY).tokens
        == make_lab().solo(prompt, GREEDY).tokens
    )


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("length", [57, 60, 62, 63])
def test_the_context_limit_is_met_exactly(length: int, k: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    prompt = prompts(1, seed=length, low=length, high=length + 1)[0]
    oracle = make_lab(max_model_len=64).solo(prompt, params)
    drafter = draft_model(tiny_decoder(0)) if k else None
    run = make_lab(drafter, chain(k), max_model_len=64).solo(prompt, params)
    assert run.tokens == oracle.tokens
    assert (len(run.tokens), run.finish) == (64 - length, "length")


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_at_the_limit_is_refused_and_others_go_on(length: int) -> None:
    lab = make_lab(max_model_len=64)
    lab.add("good", [5, 6], SamplingParams(temperature=0.0, max_tokens=3))
    with pytest.raises(ValueError, match="maximum context length is 64"):
        lab.add("long", [5] * length, GREEDY)
    with pytest.raises(ValueError, match="token id 96 is out of range"):
        lab.add("odd", [5, VOCABULARY], GREEDY)
    with pytest.raises(ValueError, match="empty"):
        lab.add("empty", [], GREEDY)
    runs = lab.drain()
    assert set(runs) == {"good"}
    assert len(runs["good"].tokens) == 3


@pytest.mark.parametrize("most", range(1, 13))
def test_usage_is_what_was_delivered(most: int) -> None:
    lab = make_lab(draft_model(tiny_decoder(0)), chain(5))
    run = lab.solo(prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True))
    assert len(run.tokens) == most
    assert run.accepted <= most


def test_counters_count_what_was_emitted() -> None:
    """All four drafts match, the second is the end token: two tokens leave, both drafted."""
    text = [30, 31, EOS, 33, 34, 35]
    lab = make_lab(knows(text, 2), chain(4), target=scripted_text(text, 2))
    run = lab.solo([5, 6], GREEDY)
    assert run.tokens == [30, 31, EOS]
    last: Run = run
    assert (last.deltas[-1].token_ids, last.deltas[-1].drafted, last.deltas[-1].accepted) == (
        (31, EOS),
        4,
        2,
    )


def test_one_token_requests_are_never_drafted() -> None:
    drafter = says(5, 5)
    lab = make_lab(drafter, chain(2))
    lab.solo([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=1))
    assert drafter.calls == 0


def test_the_first_token_leaves_before_the_first_draft() -> None:
    drafter = says(5, 5)
    lab = make_lab(drafter, chain(2))
    lab.add("a", [5, 6, 7], GREEDY)
    calls_at_collect: list[int] = []
    collect = lab.engine._collect

    def watched(*args: object) -> object:
        calls_at_collect.append(drafter.calls)
        return collect(*args)  # type: ignore[arg-type]

    lab.engine._collect = watched  # type: ignore[method-assign,assignment]
    lab.drain()
    assert calls_at_collect[0] == 0
    assert drafter.calls > 0


def test_a_sampled_request_may_join_a_greedy_batch() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    both = prompts(2)
    solo = [make_lab(draft_model(tiny_decoder(7, layers=1))).solo(p, params).tokens for p in both]
    for acceptance in ("match", "rejection"):
        lab = make_lab(
            draft_model(tiny_decoder(7, layers=1), acceptance), chain(3), acceptance=acceptance
        )
        lab.add("0", both[0], params)
        lab.add("1", both[1], params)
        runs: dict[str, Run] = {}
        for _ in range(5):
            lab.step(runs)
        lab.add("warm", both[0], SamplingParams(temperature=0.9, max_tokens=20))
        lab.drain(runs)
        assert [runs["0"].tokens, runs["1"].tokens] == solo
        assert runs["warm"].finish is not None
