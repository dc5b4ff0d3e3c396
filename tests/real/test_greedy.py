"""Greedy text of real models in float32: what transformers would write, plain and with drafts."""

from __future__ import annotations

import pytest
import torch
from transformers_models import transformers_model

from foretell import LLM, SamplingParams

TOKENS = 64
NEAR = 1e-4  # two logits this close may be ordered either way
QUESTIONS = [
    "What is the capital of Portugal?",
    "Write a haiku about rain.",
    "def quicksort(items):",
    "Explain recursion in two sentences.",
    "List three uses of a paper clip.",
    "Translate to French: good morning.",
    "What does HTTP status 404 mean?",
    "Write a SQL query that counts users per country.",
    "Why is the sky blue?",
    "Give me a name for a grey cat.",
    "Write a bash loop that prints 1 to 5.",
    "What is 17 times 23?",
    "Summarise the plot of Hamlet in one sentence.",
    "Write a Python class for a queue.",
    "How do bees find flowers?",
    "Say something kind.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def first_wrong(model, prompt: list[int], output: list[int]) -> str | None:
    """Where transformers, given the same text, would have gone on with another token; None if nowhere."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    for place, (row, token) in enumerate(zip(logits, output, strict=True)):
        best = row.max()
        if row.argmax() != token:
            gap = float(best - row[token])
            print(f"place {place}: token {token} is {gap:.2e} below token {int(row.argmax())}")
            if gap > NEAR:
                return f"place {place}: {token} instead of {int(row.argmax())}, {gap:.2e} below"
    return None


@pytest.mark.parametrize(
    "name", ["smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf", "qwen2.5-coder-1.5b.gguf"]
)
def test_greedy_text_is_that_of_transformers(real_model, name):
    """Every emitted token is the one transformers puts first after the same text, so the texts are the same."""
    path = real_model(name)
    llm = LLM(str(path), dtype="float32", max_model_len=512, kv_cache_memory_bytes=1 << 28)
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(messages, GREEDY, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == TOKENS for output in outputs)
    llm.close()
    del llm
    model = transformers_model(path)
    wrong = [
        first_wrong(model, list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs
    ]
    assert wrong == [None] * len(QUESTIONS)


def test_greedy_text_equals_generate_itself(real_model):
    path = real_model("smollm2-135m.gguf")
    llm = LLM(str(path), dtype="float32", max_model_len=512, kv_cache_memory_bytes=1 << 28)
    model = transformers_model(path)
    for question in QUESTIONS[:4]:
        output = llm.chat([{"role": "user", "content": question}], GREEDY, use_tqdm=False)[0]
        prompt = torch.tensor([output.prompt_token_ids])
        theirs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(output.outputs[0].token_ids) == theirs[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_text_of_a_real_model(real_model, temperature):
    path = str(real_model("smollm2-135m.gguf"))
    params = SamplingParams(temperature=temperature, max_tokens=48, seed=11)
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS[:6]]
    settings = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 28}
    plain = LLM(path, **settings).chat(messages, params, use_tqdm=False)
    for config in (
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
        {"model": path, "num_speculative_tokens": 3},
    ):
        drafted = LLM(path, speculative_config=config, **settings).chat(
            messages, params, use_tqdm=False
        )
        for ours, oracle in zip(drafted, plain, strict=True):
            assert ours.outputs[0].token_ids == oracle.outputs[0].token_ids
            assert ours.outputs[0].text == oracle.outputs[0].text
