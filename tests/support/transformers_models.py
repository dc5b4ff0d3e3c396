"""Real models in transformers' own code: the weights of a GGUF file as the gguf library reads them, in float32."""

from __future__ import annotations

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

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
