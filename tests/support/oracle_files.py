"""The cycle target and its exact drafters as files, in the names that they are published under."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import torch
from checkpoints import Tensors
from oracles import (
    V,
    cycle_target,
    decoding,
    eagle1_oracle,
    eagle3_oracle,
    mtp_oracle,
    rope_oracle,
    shift,
)
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


def biases(ours: Tensors, path: str, prefix: str) -> Tensors:
    """The attention's biases of a layer of ours, in Hugging Face's names."""
    parts = ours[f"{path}attention.qkv.bias"].split(list(SIZES.values()))
    return {
        f"{prefix}self_attn.{name}_proj.bias": part for name, part in zip(SIZES, parts, strict=True)
    }


def target_tensors() -> Tensors:
    """The cycle target."""
    ours = weights(cycle_target(LAYERS))
    tensors = {
        "model.embed_tokens.weight": ours["embedding"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    for i in range(LAYERS):
        tensors |= layer(ours, f"layers.{i}.", f"model.layers.{i}.")
        tensors[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(V)
    return tensors


def write_target(folder: Path, **more: object) -> Path:
    """The cycle target, with a tokenizer: token t is followed by t + 1."""
    byte_level().save_pretrained(folder)
    return checkpoints.write(folder, target_tensors(), config(**more), "model.safetensors")


def write_mimo(folder: Path) -> Path:
    """The cycle target as a MiMo model, with biases of zero and an exact MTP layer."""
    tensors, ours = target_tensors(), weights(mtp_oracle(cycle_target(LAYERS)))
    for i in range(LAYERS):
        for name, size in SIZES.items():
            tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = torch.zeros(size)
    prefix = "model.mtp_layers.0."
    tensors |= layer(ours, "layers.0.", prefix) | biases(ours, "layers.0.", prefix)
    tensors |= {
        f"{prefix}input_layernorm.weight": torch.ones(V),
        f"{prefix}input_proj.weight": ours["fc.weight"],
        f"{prefix}token_layernorm.weight": ours["embedding_norm.weight"],
        f"{prefix}hidden_layernorm.weight": ours["feature_norm.weight"],
        f"{prefix}final_layernorm.weight": ours["norm.weight"],
    }
    said = config(model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    byte_level().save_pretrained(folder)
    return checkpoints.write(folder, tensors, said | {"attention_bias": True}, "model.safetensors")


def write_looking_back(folder: Path, base: float | None, made_for: float) -> Path:
    """An EAGLE-1 network that depends on its rope; `base` None: its config does not say it."""
    ours = weights(rope_oracle(cycle_target(LAYERS), made_for, made_for))
    tensors = {"fc.weight": ours["fc.weight"]}
    tensors |= layer(ours, "first.", "layers.0.") | biases(ours, "first.", "layers.0.")
    theta = {} if base is None else {"rope_theta": base}
    said = config(1, bias=False, qkv_bias=True, **theta)
    return checkpoints.write(folder, tensors, said, "model.safetensors")


def write_medusa(
    folder: Path, heads: int, name: str = "lmsys/vicuna-7b-v1.3", off: int = 0
) -> Path:
    """FasterDecoding's file of exact heads, or of heads that say a token `off` places away."""
    read = decoding(cycle_target(LAYERS), -1)
    tensors: Tensors = {}
    for i in range(heads):
        tensors[f"{i}.0.linear.weight"] = torch.zeros(V, V, dtype=torch.float64)
        tensors[f"{i}.0.linear.bias"] = torch.zeros(V, dtype=torch.float64)
        tensors[f"{i}.1.weight"] = 20 * shift(2 + i + off) @ read
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
