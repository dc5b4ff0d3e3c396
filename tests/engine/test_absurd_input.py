"""Parameters that are valid but absurd, or that cannot work together: bounded, refused, and never the end of others."""

from __future__ import annotations

import pytest
from lab import EOS, VOCABULARY, draft_model, make_lab, prompts, tiny_decoder

from foretell.runner.runner import Runner
from foretell.sampling_params import SamplingParams
from foretell.spec.tree import chain

PROMPT = prompts(1)[0]
HUGE = 10**30


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    ("absurd", "sane"),
    [
        ({"top_k": HUGE}, {}),
        ({"max_tokens": None, "min_tokens": HUGE}, {"max_tokens": None, "min_tokens": 64}),
        ({"num_speculative_tokens": HUGE}, {}),
        ({"top_p": 1e-300}, {"temperature": 0.0}),
        ({"max_tokens": HUGE, "ignore_eos": True}, {"max_tokens": None, "ignore_eos": True}),
    ],
)
def test_a_number_without_bounds_means_what_the_largest_sensible_one_means(
    absurd: dict[str, object], sane: dict[str, object], k: int
) -> None:
    def run(more: dict[str, object]) -> list[int]:
        drafter = draft_model(tiny_decoder(7, layers=1)) if k else None
        params = SamplingParams(**({"seed": 3, "max_tokens": 12} | more))  # type: ignore[arg-type]
        return make_lab(drafter, chain(k), max_model_len=64).solo(PROMPT, params, seed=3).tokens

    assert run(absurd) == run(sane)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 1e30},
        {"temperature": 1e30},
        {"logit_bias": dict.fromkeys(range(VOCABULARY), -100.0)},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1e30},
    ],
)
def test_the_largest_numbers_leave_the_logits_numbers(
    more: dict[str, object], temperature: float
) -> None:
    params = SamplingParams(
        **({"temperature": temperature, "max_tokens": 10, "ignore_eos": True} | more)  # type: ignore[arg-type]
    )
    run = make_lab(draft_model(tiny_decoder(0)), chain(3)).solo(PROMPT, params)
    assert (len(run.tokens), run.finish) == (10, "length")


@pytest.mark.parametrize(
    ("params", "bad_words"),
    [
        (SamplingParams(allowed_token_ids=[EOS], min_tokens=2), []),
        (SamplingParams(allowed_token_ids=[5, 6], min_tokens=2, stop_token_ids=[5, 6]), []),
        (SamplingParams(allowed_token_ids=[5, 6]), [[5], [6]]),
    ],
)
def test_parameters_that_leave_no_token_are_refused(
    params: SamplingParams, bad_words: list[list[int]]
) -> None:
    lab = make_lab()
    with pytest.raises(ValueError, match="leave none of them; allow another token"):
        lab.add("none", PROMPT, params, bad_words=bad_words)
    assert not lab.engine.has_work()


def test_a_request_that_comes_to_forbid_every_token_ends_alone_and_says_so() -> None:
    lab = make_lab()
    only = SamplingParams(allowed_token_ids=[5], max_tokens=9)
    lab.add("dead end", PROMPT, only, bad_words=[[5, 5, 5]])
    lab.add("other", PROMPT, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    runs = lab.drain()
    assert (runs["dead end"].tokens, runs["dead end"].finish) == ([5, 5], "error")
    said = runs["dead end"].deltas[-1].error
    assert said is not None
    assert "the parameters of the request forbid every token" in said
    assert (len(runs["other"].tokens), runs["other"].finish) == (9, "length")


def test_an_engine_whose_step_failed_says_so_instead_of_going_on_with_wrong_books(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = make_lab()
    lab.add("a", PROMPT, SamplingParams(max_tokens=9))

    def fails(self: Runner, plan: object) -> None:
        raise MemoryError("the device is full")

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "launch", fails)
        with pytest.raises(MemoryError, match="the device is full"):
            lab.engine.step()
    with pytest.raises(
        RuntimeError, match=r"a step failed \(MemoryError\('the device is full'\)\)"
    ):
        lab.engine.step()
