"""The transformer layers of a drafter: their shape, from the draft's own config and tensors, and their weights.

The names are Hugging Face's Llama names under a prefix. Where a config may be silent or wrong without harm (biases,
query/key norms, head size) the tensors decide and a note says so. Rotary settings are the draft's own: what its config
does not say is the default it was trained with (base 10000, no scaling), never the target's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from foretell.model.config import ModelConfig
from foretell.model.layers import fill
from foretell.model.rope import Scaling
from foretell.spec.checkpoint.intake import Intake
from foretell.spec.checkpoint.source import Config


def layer_config(
    intake: Intake, config: Config, layers: int, prefix: str, size: int
) -> ModelConfig:
    """Shape of a drafter's layers.

    Args:
        config: the draft's own.
        layers: how many the tensors have.
        prefix: of the first layer's tensors.
        size: V, the target's vocabulary.

    Raises:
        ValueError: a field is missing, not supported, or contradicts the tensors or the target.
    """
    for key in ("hidden_size", "num_attention_heads", "intermediate_size"):
        if not isinstance(config.get(key), int):
            raise intake.refuse(
                f"config.json: {key} must be an integer, got {config.get(key)!r}; copy it from the training config"
            )
    declared = config.get("num_hidden_layers", layers)
    if declared != layers:
        raise intake.refuse(
            f"config.json says num_hidden_layers={declared}, the tensors have {layers}; make them agree"
        )
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise intake.refuse(
            "drafters with sliding_attention layers are not supported; use one with full attention"
        )
    heads: int = config["num_attention_heads"]
    read = ModelConfig.from_hf(
        {
            **{
                key: value
                for key, value in config.items()
                if key not in ("sliding_window", "layer_types")
            },
            "model_type": "llama",
            "vocab_size": size,
            "num_hidden_layers": layers,
            "head_dim": _head_dim(intake, config, prefix),
        }
    )
    attention = f"{prefix}self_attn."
    biased, out_biased = (f"{attention}{name}.bias" in intake for name in ("q_proj", "o_proj"))
    for key in ("attention_bias", "qkv_bias"):
        if config.get(key) and not biased:
            raise intake.refuse(
                f"config.json says {key}=true, but tensor '{attention}q_proj.bias' is missing; set it to false or "
                "export the biases"
            )
    rope = read.ropes[0]
    scaled = (
        "" if rope.scaling is Scaling.NONE else f", {rope.scaling.value} scaling by {rope.factor:g}"
    )
    intake.note(f"rotary base {rope.base:g}{scaled}, from the draft's own config")
    assert read.heads == heads, (read.heads, heads)
    return replace(
        read, qkv_bias=biased, output_bias=out_biased, qk_norm=f"{attention}q_norm.weight" in intake
    )


def _head_dim(intake: Intake, config: Config, prefix: str) -> int:
    """From the query projection: some code ignores `head_dim` and takes hidden size / heads."""
    heads = config["num_attention_heads"]
    rows = intake.shape(f"{prefix}self_attn.q_proj.weight")[0]
    declared = config.get("head_dim") or config["hidden_size"] // heads
    if rows == heads * declared:
        return int(declared)
    if rows != config["hidden_size"] or rows % heads:
        raise intake.refuse(
            f"'{prefix}self_attn.q_proj.weight' has {rows} rows, but num_attention_heads={heads} of "
            f"head_dim={declared} make {heads * declared}; correct the config"
        )
    intake.note(
        f"head_dim={declared} in config.json is not what the tensors have: using {rows // heads}"
    )
    return int(rows // heads)


def fill_layer(
    root: nn.Module, path: str, intake: Intake, prefix: str, config: ModelConfig
) -> None:
    """Fill an ordinary layer (`model.layers.Layer`) at `path` of `root`."""
    _fill_norm(
        root, f"{path}.attention_norm", intake, f"{prefix}input_layernorm", config.hidden_size
    )
    fill_first(root, path, intake, prefix, config, config.hidden_size)


def fill_first(
    root: nn.Module, path: str, intake: Intake, prefix: str, config: ModelConfig, inputs: int
) -> None:
    """Fill attention, the norm after it, and the MLP; attention reads `inputs` channels."""
    attention = f"{prefix}self_attn."
    rows = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
        config.kv_heads * config.head_dim,
    )
    qkv = [
        intake.take(f"{attention}{name}_proj.weight", count, inputs)
        for name, count in zip("qkv", rows, strict=True)
    ]
    fill(root, f"{path}.attention.qkv.weight", torch.cat(qkv))
    if config.qkv_bias:
        biases = [
            intake.take(f"{attention}{name}_proj.bias", count)
            for name, count in zip("qkv", rows, strict=True)
        ]
        fill(root, f"{path}.attention.qkv.bias", torch.cat(biases))
    hidden, inner = config.hidden_size, config.intermediate_size
    fill(
        root,
        f"{path}.attention.output.weight",
        intake.take(f"{attention}o_proj.weight", hidden, rows[0]),
    )
    if config.output_bias:
        fill(root, f"{path}.attention.output.bias", intake.take(f"{attention}o_proj.bias", hidden))
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            _fill_norm(
                root, f"{path}.attention.{name}", intake, f"{attention}{name}", config.head_dim
            )
    _fill_norm(root, f"{path}.mlp_norm", intake, f"{prefix}post_attention_layernorm", hidden)
    gate_up = [
        intake.take(f"{prefix}mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")
    ]
    fill(root, f"{path}.mlp.gate_up.weight", torch.cat(gate_up))
    if config.mlp_bias:
        both = [intake.take(f"{prefix}mlp.{name}_proj.bias", inner) for name in ("gate", "up")]
        fill(root, f"{path}.mlp.gate_up.bias", torch.cat(both))
        fill(root, f"{path}.mlp.down.bias", intake.take(f"{prefix}mlp.down_proj.bias", hidden))
    fill(
        root, f"{path}.mlp.down.weight", intake.take(f"{prefix}mlp.down_proj.weight", hidden, inner)
    )


def _fill_norm(root: nn.Module, path: str, intake: Intake, name: str, size: int) -> None:
    fill(root, f"{path}.weight", take_norm(intake, f"{name}.weight", size))


def take_norm(intake: Intake, name: str, size: int, plus_one: bool = False) -> Tensor:
    """A norm's weight, in float32 or wider; `plus_one` if the checkpoint holds it minus one."""
    wide = torch.promote_types(intake.dtype, torch.float32)
    weight = intake.take(name, size, dtype=wide)
    return weight + 1 if plus_one else weight


def count_layers(intake: Intake, prefix: str = "layers.") -> int:
    """How many layers the tensors have.

    Raises:
        ValueError: there is none.
    """
    indices = {
        int(name.removeprefix(prefix).split(".")[0])
        for name in intake.names
        if name.startswith(prefix) and name.removeprefix(prefix).split(".")[0].isdecimal()
    }
    if not indices:
        raise intake.refuse(
            f"no tensor is named like '{prefix}0.self_attn.q_proj.weight'; is this a drafter with a layer?"
        )
    return 1 + max(indices)
