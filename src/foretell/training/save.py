"""Trained drafters as checkpoints that the engine loads: EAGLE-3 in speculators' format, the others as their authors.

Tensors are written in the type given, bfloat16 unless said otherwise. Files are written beside their place and renamed,
so one of its name is always whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from foretell.model.config import ModelConfig
from foretell.spec.eagle import Eagle3Net, FusionNet
from foretell.spec.medusa import MedusaHeads

SPECULATORS_VERSION = "0.3.0"  # of the format


@dataclass(frozen=True, slots=True)
class DraftCard:
    """What a drafter's config says beside its shape.

    Args:
        target: name or path of the model it drafts for.
        architectures: of that model.
        taps: target layers it reads, as hidden states after so many layers.
        tokens: how many to draft a step unless told otherwise.
        dtype: of the tensors.
    """

    target: str
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    taps: tuple[int, ...] = ()
    tokens: int = 5
    dtype: torch.dtype = torch.bfloat16


def save_eagle3(folder: Path, net: Eagle3Net, vocabulary: Tensor, card: DraftCard) -> None:
    """Write an EAGLE-3 head in speculators' format.

    Args:
        vocabulary: [Vd] int64 target ids, ascending.
    """
    config, size = net.parts.layer, net.parts.layer.vocab_size
    tensors = {
        "fc.weight": net.get_parameter("fc.weight"),
        "layers.0.input_layernorm.weight": net.embedding_norm.weight,
        "layers.0.hidden_norm.weight": net.hidden_norm.weight,
        **first_layer(net.first, config, "layers.0."),
        "norm.weight": net.norm.weight,
        "lm_head.weight": net.get_parameter("head.weight"),
    }
    if vocabulary.shape[0] < size:
        ids = vocabulary.cpu()
        member = torch.zeros(size, dtype=torch.bool)
        member[ids] = True
        tensors |= {"d2t": ids - torch.arange(ids.shape[0]), "t2d": member}
    write(folder, tensors, speculators_config(net, vocabulary.shape[0], card), card.dtype)


def speculators_config(net: Eagle3Net, draft_vocab_size: int, card: DraftCard) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": card.tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": net.concat.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(card.taps),
        "norm_before_residual": net.concat.norm_before_residual,
        "norm_before_fc": net.concat.norm_before_fc,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": _name(card.dtype),
        "transformer_layer_config": layer_fields(net.parts.layer, card.dtype),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": card.target, "architectures": list(card.architectures)},
        },
    }


def save_eagle(folder: Path, net: FusionNet, card: DraftCard) -> None:
    """Write an EAGLE-1 head with the names of its authors; embedding and head are the target's."""
    assert net.first is not None, "an EAGLE-1 network"
    fields = layer_fields(net.parts.layer, card.dtype)
    config = {**fields, "architectures": ["LlamaForCausalLM"], "bias": False}
    tensors = {
        "fc.weight": net.fc.weight,
        **first_layer(net.first, net.parts.layer, "layers.0."),
    }
    write(folder, tensors, config, card.dtype)


def save_medusa(folder: Path, net: MedusaHeads, card: DraftCard) -> None:
    """Write Medusa heads with the names of their authors; without output layers of their own they use the target's."""
    tensors: dict[str, Tensor] = {}
    heads, layers = net.weight.shape[:2]
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = net.weight[i, j]
            if net.bias is not None:
                tensors[f"{i}.{j}.linear.bias"] = net.bias[i, j]
        if net.output is not None:
            tensors[f"{i}.{layers}.weight"] = net.output[i if len(net.output) > 1 else 0]
    config = {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": card.target,
        "version": "2",
        "torch_dtype": _name(card.dtype),
    }
    write(folder, tensors, config, card.dtype, "medusa_lm_head.safetensors")


def first_layer(layer: nn.Module, config: ModelConfig, prefix: str) -> dict[str, Tensor]:
    """Attention, the norm after it and the MLP with Llama's names."""
    dim = config.head_dim
    sizes = [config.heads * dim, config.kv_heads * dim, config.kv_heads * dim]
    q, k, v = torch.split(layer.get_parameter("attention.qkv.weight"), sizes)
    gate, up = torch.split(layer.get_parameter("mlp.gate_up.weight"), config.intermediate_size)
    return {
        f"{prefix}self_attn.q_proj.weight": q,
        f"{prefix}self_attn.k_proj.weight": k,
        f"{prefix}self_attn.v_proj.weight": v,
        f"{prefix}self_attn.o_proj.weight": layer.get_parameter("attention.output.weight"),
        f"{prefix}post_attention_layernorm.weight": layer.get_parameter("mlp_norm.weight"),
        f"{prefix}mlp.gate_proj.weight": gate,
        f"{prefix}mlp.up_proj.weight": up,
        f"{prefix}mlp.down_proj.weight": layer.get_parameter("mlp.down.weight"),
    }


def layer_fields(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The shape of plain Llama layers as a config.json says it, rotary base in both places where readers look."""
    base = config.ropes[0].base
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation.value,
        "rms_norm_eps": float(f"{config.norm_eps:.6g}"),  # GGUF files hold a float32 of it
        "rope_theta": base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "max_position_embeddings": config.max_position,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": _name(dtype),
    }


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    name: str = "model.safetensors",
) -> None:
    """A config.json and one file of tensors into a folder; floating-point ones as `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    ready = {
        key: (t.detach().to(dtype) if t.is_floating_point() else t.detach())
        .cpu()
        .contiguous()
        .clone()
        for key, t in tensors.items()
    }
    scratch = folder / f"{name}.new"
    save_file(ready, scratch, metadata={"format": "pt"})
    os.replace(scratch, folder / name)
    scratch = folder / "config.json.new"
    scratch.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    os.replace(scratch, folder / "config.json")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
