"""Real models against transformers: the same file, read by the gguf library, run by transformers' own code."""

from __future__ import annotations

import gguf
import pytest
import torch
from paged import Paged
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from foretell.model.hub import resolve
from foretell.model.load import load_model
from foretell.model.tokenizer import load_tokenizer

CHAT = [
    {"role": "user", "content": "Name three prime numbers above 1000, and say why they're prime."}
]
PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOPS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def transformers_model(path):
    """transformers' model in float32 with the weights of a GGUF file."""
    reader = gguf.GGUFReader(path)
    name = reader.fields["general.architecture"].contents()

    def field(key):
        return reader.fields[f"{name}.{key}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        *layer, part, leaf = tensor.name.split(".")
        if name == "llama" and part in ("attn_q", "attn_k"):
            n = heads if part == "attn_q" else kv_heads
            value = value.view(n, -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        theirs = f"model.layers.{layer[1]}.{PARTS[part]}" if layer else TOPS[part]
        weights[f"{theirs}.{leaf}"] = value
    tied = "lm_head.weight" not in weights
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    family = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[
        name
    ]
    config = family[0](
        vocab_size=len(weights["lm_head.weight"]),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=tied,
    )
    model = family[1](config).eval()
    model.load_state_dict(weights)
    return model


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
