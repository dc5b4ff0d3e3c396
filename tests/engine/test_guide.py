"""The calls of a published guide to speculative decoding, word for word but for models and import, on tiny checkpoints.

Each of its configurations (draft model with another vocabulary, Medusa, EAGLE) gives the text of plain decoding, and
each of its remedies for trouble works or is answered with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import checkpoints as files
import pytest
from pretend_hub import TEXT_IDS, of_vocabulary, other_text_model, pretend, text_model

from foretell import LLM, RequestOutput, SamplingParams

TARGET = "meta-llama/Llama-2-7b-hf"
Models = Callable[[str, Callable[[Path], Path]], str]


def medusa_heads(folder: Path) -> Path:
    """Five heads as FasterDecoding saves them."""
    heads = files.medusa(v=TEXT_IDS)
    return files.write(folder, heads, files.medusa_config(), "medusa_lm_head.pt")


def medusa_model(folder: Path) -> Path:
    """The target with heads in its own checkpoint."""
    text_model(folder)
    with of_vocabulary(TEXT_IDS):
        heads = files.medusa(prefix="medusa_head.", v=TEXT_IDS)
        config = files.llama_config(medusa_num_heads=5, medusa_num_layers=1)
        tensors = files.language_model() | heads
    return files.write(folder, tensors, config, "model.safetensors")


def eagle(folder: Path) -> Path:
    with of_vocabulary(TEXT_IDS):
        return files.write(folder, files.eagle1(), files.llama_config(), "pytorch_model.bin")


def eagle3(folder: Path) -> Path:
    with of_vocabulary(TEXT_IDS):
        return files.write(folder, files.eagle3(), files.eagle3_config(), "model.safetensors")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Models:
    """`hub(name, writer)` puts a model there and returns its name; the target is there already."""
    places = {TARGET: text_model(tmp_path / "target", layers=7)}

    def put(name: str, writer: Callable[[Path], Path]) -> str:
        places[name] = writer(tmp_path / name.replace("/", "-"))
        return name

    pretend(monkeypatch, places)
    return put


def texts(outputs: list[RequestOutput]) -> list[tuple[str, list[int]]]:
    assert all(output.prompt and output.outputs[0].token_ids for output in outputs)
    return [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]


SNIPPETS: Mapping[str, tuple[str, Callable[[Path], Path], int, list[str]]] = {
    "another, faster model": (
        "google/gemma-2b",
        other_text_model,
        5,
        ["What is the capital of France?", "Write a short poem about a cat."],
    ),
    "medusa heads": (
        "someone/medusa-llama-2-7b-hf",
        medusa_heads,
        5,
        ["Explain the concept of quantum entanglement."],
    ),
    "medusa heads in the model": (
        "someone/medusa-llama-2-7b-hf",
        medusa_model,
        5,
        ["Explain the concept of quantum entanglement."],
    ),
    "eagle": (
        "someone/eagle-llama-2-7b",
        eagle,
        7,
        ["Describe the process of photosynthesis in detail."],
    ),
    "eagle-3": (
        "someone/eagle3-llama-2-7b",
        eagle3,
        7,
        ["Describe the process of photosynthesis in detail."],
    ),
}


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_its_calls_run_and_the_text_is_that_without_speculation(snippet: str, hub: Models) -> None:
    name, writer, count, prompts = SNIPPETS[snippet]
    target_model_path = TARGET
    llm = LLM(
        model=target_model_path,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        speculate_model=hub(name, writer),
        num_speculative_tokens=count,
        max_model_len=2048,
    )
    sampling_params = SamplingParams(temperature=0.0, top_p=1.0, max_tokens=128)
    outputs = llm.generate(prompts, sampling_params)

    llm_no_spec = LLM(model=target_model_path, gpu_memory_utilization=0.9)
    outputs_no_spec = llm_no_spec.generate(prompts, sampling_params)

    assert texts(outputs) == texts(outputs_no_spec)
    counted, plain = llm.get_metrics(), llm_no_spec.get_metrics()
    assert counted.num_drafts > 0
    assert plain.num_drafts == 0
    assert counted.generation_tokens == plain.generation_tokens


def test_sampling_is_as_exact_as_greedy_decoding(hub: Models) -> None:
    """It advises temperature 0; here the text is the same at any temperature."""
    drafting = LLM(TARGET, speculate_model=hub("a/b", eagle), num_speculative_tokens=4)
    plain = LLM(TARGET)
    params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=40, seed=11)
    assert texts(drafting.generate("Once", params)) == texts(plain.generate("Once", params))


def test_its_remedies_for_a_full_memory_each_make_room(hub: Models) -> None:
    """Fewer draft tokens, a smaller draft model, a shorter text: each fits where the original does not."""
    draft = hub("google/gemma-2b", lambda folder: text_model(folder, layers=6))
    small = hub("google/gemma-1b", text_model)

    def start(draft: str, count: int, length: int) -> LLM:
        return LLM(
            TARGET,
            speculate_model=draft,
            num_speculative_tokens=count,
            max_model_len=length,
            kv_cache_memory_bytes=1_100_000,
            dtype="float32",
        )

    with pytest.raises(ValueError, match=r"max_model_len=600 needs .* MiB of KV cache") as told:
        start(draft, 40, 600)
    assert "num_speculative_tokens" in str(told.value)
    for fits in ((draft, 4, 600), (small, 40, 600), (draft, 40, 400)):
        assert start(*fits).generate("a", SamplingParams(max_tokens=4))[0].finished


def test_a_batch_is_verified_together_and_each_text_is_its_own(hub: Models) -> None:
    llm = LLM(
        TARGET, speculate_model=hub("a/b", eagle), num_speculative_tokens=3, max_model_len=256
    )
    prompts = [f"Question {i}: what is {i} + {i}?" for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    together = texts(llm.generate(prompts, params))
    assert together == [texts(llm.generate(prompt, params))[0] for prompt in prompts]


def test_a_poor_draft_model_shows_in_the_numbers_and_not_in_the_text(hub: Models) -> None:
    """What to look at when nothing gets faster: tokens per verification, and acceptance by place."""
    four = {"num_speculative_tokens": 4, "adaptive": False}
    llm = LLM(TARGET, speculate_model=hub("a/b", text_model), speculative_config=four)
    perfect = LLM(TARGET, speculate_model=TARGET, speculative_config=four)
    params = SamplingParams(temperature=0.0, max_tokens=61, ignore_eos=True)
    assert texts(llm.generate("a", params)) == texts(perfect.generate("a", params))
    poor, good = llm.get_metrics(), perfect.get_metrics()
    assert poor.mean_acceptance_length < good.mean_acceptance_length
    assert good.mean_acceptance_length == 5.0
    assert list(good.num_accepted_tokens_per_pos) == [12, 12, 12, 12]
