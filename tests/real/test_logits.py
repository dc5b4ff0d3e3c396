"""Real models against transformers: the same file, read by the gguf library, run by transformers' own code."""

from __future__ import annotations

import pytest
import torch
from paged import Paged
from transformers import AutoTokenizer
from transformers_models import transformers_model

from foretell.model.hub import resolve
from foretell.model.load import load_model
from foretell.model.tokenizer import load_tokenizer

CHAT = [
    {"role": "user", "content": "Name three prime numbers above 1000, and say why they're prime."}
]


@pytest.mark.parametrize("name", ["smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf"])
def test_logits_and_tokens_are_those_of_transformers(real_model, name):
    path = real_model(name)
    source = resolve(str(path))
    ours, tokenizer = load_model(source, dtype="float32"), load_tokenizer(source)
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(text)["input_ids"]
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert tokens == theirs(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert tokenizer.chat_template == theirs.chat_template

    with torch.inference_mode():
        expected = transformers_model(path)(torch.tensor([tokens])).logits[0]
    logits = Paged(ours, length=128, block_size=16).chunk(torch.tensor(tokens), 0)
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_bfloat16_agrees_with_float32_on_nearly_all_tokens(real_model):
    source = resolve(str(real_model("smollm2-135m.gguf")))
    tokens = load_tokenizer(source).apply_chat_template(CHAT, add_generation_prompt=True)[
        "input_ids"
    ]
    exact, near = (
        Paged(load_model(source, dtype=dtype), length=128, block_size=16).chunk(
            torch.tensor(tokens), 0
        )
        for dtype in ("float32", "bfloat16")
    )
    law, other = torch.log_softmax(exact, -1), torch.log_softmax(near.float(), -1)
    divergence = (law.exp() * (law - other)).sum(-1)
    assert divergence.mean() < 0.005
    assert (exact.argmax(-1) == near.argmax(-1)).float().mean() > 0.9
