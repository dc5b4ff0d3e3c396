"""The offline API on a real engine with tiny random models: drafts change nothing that a caller can see."""

from __future__ import annotations

import pytest
import torch
from lab import Lab, make_lab, tiny_decoder
from tiny_tokenizers import byte_level

from foretell import LLM, EngineConfig, RequestOutput, RequestOutputKind, SamplingParams
from foretell.metrics import Recorder
from foretell.model.decoder import Decoder
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.tree import chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

VOCABULARY = 259
TOKENIZER = byte_level()
PROMPTS = ["a cat", "the dog and the cat", "x", "Paris is a city"]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0),
    SamplingParams(max_tokens=30, temperature=1.0, seed=3),
    SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9, seed=5, logprobs=2),
    SamplingParams(max_tokens=12, temperature=1.0, n=2, seed=7, ignore_eos=True),
]


def offline(k: int = 0, seed: int = 0) -> tuple[LLM, Lab]:
    """An LLM around the tiny engine, drafted for by the target itself (seed 0) or by another random model."""
    target = tiny_decoder(0, vocabulary=VOCABULARY)
    drafter = _drafter(tiny_decoder(seed, vocabulary=VOCABULARY)) if k else None
    lab = make_lab(drafter, chain(k), target)
    lab.engine.watcher = recorder = Recorder()
    return LLM.around(EngineConfig(), lab.engine, TOKENIZER, recorder), lab


def _drafter(decoder: Decoder) -> DraftModelDrafter:
    vocabulary = same(VOCABULARY, VOCABULARY, VOCABULARY, torch.device("cpu"))
    return DraftModelDrafter(decoder, vocabulary, Acceptance.MATCH)


def visible(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    return [
        (output.prompt, o.text, o.token_ids, o.finish_reason, o.stop_reason)
        for output in outputs
        for o in output.outputs
    ]


PLAIN = visible(offline()[0].generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("seed", [0, 1], ids=["perfect drafts", "poor drafts"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_texts_tokens_and_ends_are_the_same_with_drafts(k: int, seed: int) -> None:
    llm, lab = offline(k, seed)
    assert visible(llm.generate(PROMPTS, PARAMS)) == PLAIN
    assert llm.get_metrics().num_drafts > 0
    lab.engine.scheduler.check()


@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_a_stop_string_cuts_at_the_same_token_whatever_the_step_brought(k: int) -> None:
    _, text, ids, _, _ = PLAIN[1]
    assert isinstance(text, str)
    assert isinstance(ids, list)
    place = next(i for i in range(6, len(text)) if text[i] not in text[:i] and text[i].isascii())
    llm, lab = offline(k)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, stop=[text[place]])
    output = llm.generate(PROMPTS[1], params)[0].outputs[0]
    assert output.text == text[:place]
    assert output.token_ids == ids[: len(output.token_ids)]
    assert TOKENIZER.decode(output.token_ids[-1:]).endswith(text[place])
    assert (output.finish_reason, output.stop_reason) == ("stop", text[place])
    while lab.engine.has_work():
        lab.engine.step()
    assert lab.engine.scheduler.blocks.available == lab.engine.scheduler.blocks.usable


@pytest.mark.parametrize("k", [0, 4])
def test_streamed_deltas_join_to_the_whole(k: int) -> None:
    llm, _ = offline(k)
    params = SamplingParams(
        max_tokens=30, temperature=1.0, seed=3, output_kind=RequestOutputKind.DELTA
    )
    parts = [part.outputs[0] for part in llm.stream(PROMPTS[1], params)]
    _, text, ids, reason, _ = PLAIN[1]
    assert "".join(part.text for part in parts) == text
    assert [token for part in parts for token in part.token_ids] == ids
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [reason]


def test_R52_counters_are_the_sums_of_what_was_delivered() -> None:
    llm, _ = offline(5)
    outputs = llm.generate(PROMPTS, PARAMS)
    seen = llm.get_metrics()
    answers = [answer for output in outputs for answer in output.outputs]
    assert seen.generation_tokens == sum(len(answer.token_ids) for answer in answers)
    assert seen.prompt_tokens == sum(
        len(output.prompt_token_ids) * len(output.outputs) for output in outputs
    )
    assert (
        seen.finished.total == len(answers) == seen.time_to_first_token.count == seen.latency.count
    )
    assert seen.finished.stop == sum(answer.finish_reason == "stop" for answer in answers)
    assert (
        seen.num_accepted_tokens == sum(seen.num_accepted_tokens_per_pos) <= seen.num_draft_tokens
    )
    # The first token of an answer comes from its prompt, all others from steps that verify drafts or nothing.
    assert seen.num_verified_tokens <= seen.generation_tokens - len(answers)


@pytest.mark.parametrize("limit", range(1, 13))
def test_R52_the_answer_has_as_many_tokens_as_were_asked_for(limit: int) -> None:
    llm, _ = offline(5)
    params = SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True)
    answer = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (limit, "length")
    assert llm.get_metrics().generation_tokens == limit


@pytest.mark.parametrize("k", [0, 3])
def test_R09_a_broken_request_is_counted_once_and_says_why(k: int) -> None:
    llm, lab = offline(k, seed=1)
    decoder = lab.engine.runner.device.target
    sound = llm.generate(PROMPTS, PARAMS[0])
    right = decoder.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        return torch.full_like(right(hidden), torch.nan)

    decoder.logits = broken  # type: ignore[method-assign]
    (output,) = llm.generate("nothing can be said", PARAMS[0])
    decoder.logits = right  # type: ignore[method-assign]
    assert output.outputs[0].finish_reason == "error"
    assert "NaN or infinite logits" in str(output.outputs[0].stop_reason)
    assert llm.get_metrics().corrupted_requests == 1
    again = llm.generate(PROMPTS, PARAMS[0])
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in sound]
    assert llm.get_metrics().corrupted_requests == 1


def test_an_interrupted_batch_leaves_an_engine_that_works_and_owns_nothing() -> None:
    llm, lab = offline(3)
    step, calls = lab.engine.step, []

    def interrupted() -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    lab.engine.step = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)
    assert visible(llm.generate(PROMPTS, PARAMS)) == PLAIN
    assert not lab.engine.has_work()
    lab.engine.scheduler.check()
    assert lab.engine.scheduler.blocks.available == lab.engine.scheduler.blocks.usable
    assert llm.get_metrics().finished.abort == len(PLAIN)
