"""The cycle target and its exact drafters as files, in the names that they are published under."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import torch
from checkpoints import Tensors
from oracles import V, cycle_target, decoding, eagle1_oracle, eagle3_oracle, shift
from tiny_tokenizers import byte_level
from torch import Tensor, nn

LAYERS = 7
SIZES = {"q": V, "k": V // 2, "v": V // 2}  # 4 query heads, 2 KV heads


def config(layers: int = LAYERS, **more: object) -> dict[str, object]:
    shape = {
        "hidden_size": V,
        "intermediate_size": V,
        "vocab_size": V,
        "rms_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "eos_token_id": V - 1,
    }
    return checkpoints.llama_config(layers, **{**shape, **more})


def weights(model: nn.Module) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def layer(ours: Tensors, path: str, prefix: str) -> Tensors:
    """A layer of ours in Hugging Face's names, without its first norm."""
    qkv = ours[f"{path}attention.qkv.weight"].split(list(SIZES.values()))
    gate, up = ours[f"{path}mlp.gate_up.weight"].chunk(2)
    named: dict[str, Tensor] = dict(
        zip((f"self_attn.{name}_proj" for name in SIZES), qkv, strict=True)
    )
    named |= {
        "self_attn.o_proj": ours[f"{path}attention.output.weight"],
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": ours[f"{path}mlp.down.weight"],
        "post_attention_layernorm": ours[f"{path}mlp_norm.weight"],
    }
    return {f"{prefix}{name}.weight": tensor for name, tensor in named.items()}


def write_target(folder: Path) -> Path:
    """The cycle target, with a tokenizer: token t is followed by t + 1."""
    ours = weights(cycle_target(LAYERS))
    tensors = {
        "model.embed_tokens.weight": ours["embedding"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    for i in range(LAYERS):
        tensors |= layer(ours, f"layers.{i}.", f"model.layers.{i}.")
        tensors[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(V)
    byte_level().save_pretrained(folder)
    return checkpoints.write(folder, tensors, config(), "model.safetensors")


def write_medusa(folder: Path, heads: int, name: str = "lmsys/vicuna-7b-v1.3") -> Path:
    """FasterDecoding's file of exact heads."""
    read = decoding(cycle_target(LAYERS), -1)
    tensors: Tensors = {}
    for i in range(heads):
        tensors[f"{i}.0.linear.weight"] = torch.zeros(V, V, dtype=torch.float64)
        tensors[f"{i}.0.linear.bias"] = torch.zeros(V, dtype=torch.float64)
        tensors[f"{i}.1.weight"] = 20 * shift(2 + i) @ read
    said = {
        "medusa_num_heads": heads,
        "medusa_num_layers": 1,
        "base_model_name_or_path": name,
    }
    return checkpoints.write(folder, tensors, said, "medusa_lm_head.pt")


def write_eagle1(folder: Path) -> Path:
    """SafeAILab's file of an exact EAGLE-1 network."""
    ours = weights(eagle1_oracle(cycle_target(LAYERS)))
    tensors = {"fc.weight": ours["fc.weight"]} | layer(ours, "first.", "layers.0.")
    said = config(1, bias=False)
    return checkpoints.write(folder, tensors, said, "pytorch_model.bin")


def write_eagle3(folder: Path, **more: object) -> Path:
    """SafeAILab's file of an exact EAGLE-3 network that reads the usual layers, 2, L // 2 and L - 3."""
    ours = weights(eagle3_oracle(cycle_target(LAYERS), (2, 3, 4)))
    tensors = {
        "fc.weight": ours["fc.weight"],
        "norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["head.weight"],
        "midlayer.input_layernorm.weight": ours["embedding_norm.weight"],
        "midlayer.hidden_norm.weight": ours["hidden_norm.weight"],
    }
    tensors |= layer(ours, "first.", "midlayer.")
    said = config(1, draft_vocab_size=V, **more)
    return checkpoints.write(folder, tensors, said, "model.safetensors")
