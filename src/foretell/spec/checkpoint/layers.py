"""The transformer layers of a drafter: their shape, from the draft's own config and tensors, and their weights.

The names are Hugging Face's Llama names under a prefix. Where a config may be silent or wrong without harm (biases,
query/key norms, head size) the tensors decide and a note says so. Rotary settings are the draft's own: what its config
does not say is the default it was trained with (base 10000, no scaling), never the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from foretell.model.config import ModelConfig
from foretell.model.layers import fill
from foretell.model.rope import Scaling
from foretell.spec.checkpoint.intake import Intake
from foretell.spec.checkpoint.source import Config


@dataclass(frozen=True, slots=True)
class Style:
    """What a family's layers have beyond Llama's.

    Args:
        gated: the query projection holds a gate beside each head, for attention's output.
        plus_one: norm weights are stored minus one.
    """

    gated: bool = False
    plus_one: bool = False


PLAIN = Style()
_OTHERWISE = ("sliding_window", "layer_types")  # of the target; drafters' layers see everything


def layer_config(
    intake: Intake, config: Config, layers: int, prefix: str, size: int, style: Style = PLAIN
) -> ModelConfig:
    """Shape of a drafter's layers.

    Args:
        config: the draft's own.
        layers: how many the tensors have.
        prefix: of the first layer's tensors.
        size: V, the target's vocabulary.
        style: of the family.

    Raises:
        ValueError: a field is missing, not supported, or contradicts the tensors or the target.
    """
    _check_fields(intake, config, layers)
    read = ModelConfig.from_hf(
        {
            **{key: value for key, value in config.items() if key not in _OTHERWISE},
            "model_type": "llama",
            "vocab_size": size,
            "num_hidden_layers": layers,
            "head_dim": _head_dim(intake, config, prefix, style.gated),
        }
    )
    rope = read.ropes[0]
    scaled = f", {rope.scaling.value} scaling by {rope.factor:g}"
    plain = rope.scaling is Scaling.NONE
    intake.note(f"rotary base {rope.base:g}{'' if plain else scaled}, from the draft's own config")
    attention = f"{prefix}self_attn."
    return replace(
        read,
        qkv_bias=_biased(intake, config, attention),
        output_bias=f"{attention}o_proj.bias" in intake,
        qk_norm=f"{attention}q_norm.weight" in intake,
        output_gate=style.gated,
        norm_plus_one=style.plus_one,
    )


def _check_fields(intake: Intake, config: Config, layers: int) -> None:
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


def _biased(intake: Intake, config: Config, attention: str) -> bool:
    """Whether queries, keys and values have biases: the tensors decide, a broken promise is refused."""
    present = f"{attention}q_proj.bias" in intake
    for key in ("attention_bias", "qkv_bias"):
        if config.get(key) and not present:
            raise intake.refuse(
                f"config.json says {key}=true, but tensor '{attention}q_proj.bias' is missing; set it to false or "
                "export the biases"
            )
    return present


def _head_dim(intake: Intake, config: Config, prefix: str, gated: bool) -> int:
    """From the query projection: some code ignores `head_dim` and takes hidden size / heads."""
    heads = config["num_attention_heads"]
    rows = intake.shape(f"{prefix}self_attn.q_proj.weight")[0] // (2 if gated else 1)
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
    norm = take_norm(intake, f"{prefix}input_layernorm.weight", config)
    fill(root, f"{path}.attention_norm.weight", norm)
    fill_first(root, path, intake, prefix, config, config.hidden_size)


def fill_first(
    root: nn.Module, path: str, intake: Intake, prefix: str, config: ModelConfig, inputs: int
) -> None:
    """Fill attention, the norm after it, and the MLP; attention reads `inputs` channels."""
    _fill_attention(root, f"{path}.attention", intake, f"{prefix}self_attn.", config, inputs)
    norm = take_norm(intake, f"{prefix}post_attention_layernorm.weight", config)
    fill(root, f"{path}.mlp_norm.weight", norm)
    _fill_mlp(root, f"{path}.mlp", intake, f"{prefix}mlp.", config)


def _fill_attention(
    root: nn.Module, path: str, intake: Intake, prefix: str, config: ModelConfig, inputs: int
) -> None:
    heads, dim, hidden = config.heads, config.head_dim, config.hidden_size
    rows = {"k": config.kv_heads * dim, "v": config.kv_heads * dim}
    sides = 2 if config.output_gate else 1
    q = intake.take(f"{prefix}q_proj.weight", sides * heads * dim, inputs)
    if config.output_gate:  # each head's queries, then its gate
        q, gate = q.view(heads, 2, dim, inputs).unbind(1)
        q = q.reshape(-1, inputs)
        fill(root, f"{path}.gate.weight", gate.reshape(-1, inputs))
    kv = [intake.take(f"{prefix}{name}_proj.weight", count, inputs) for name, count in rows.items()]
    fill(root, f"{path}.qkv.weight", torch.cat((q, *kv)))
    if config.qkv_bias:
        rows = {"q": heads * dim, **rows}
        biases = [intake.take(f"{prefix}{name}_proj.bias", count) for name, count in rows.items()]
        fill(root, f"{path}.qkv.bias", torch.cat(biases))
    fill(root, f"{path}.output.weight", intake.take(f"{prefix}o_proj.weight", hidden, heads * dim))
    if config.output_bias:
        fill(root, f"{path}.output.bias", intake.take(f"{prefix}o_proj.bias", hidden))
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        fill(
            root, f"{path}.{name}.weight", take_norm(intake, f"{prefix}{name}.weight", config, dim)
        )


def _fill_mlp(root: nn.Module, path: str, intake: Intake, prefix: str, config: ModelConfig) -> None:
    hidden, inner = config.hidden_size, config.intermediate_size
    names = ("gate", "up")
    gate_up = [intake.take(f"{prefix}{name}_proj.weight", inner, hidden) for name in names]
    fill(root, f"{path}.gate_up.weight", torch.cat(gate_up))
    fill(root, f"{path}.down.weight", intake.take(f"{prefix}down_proj.weight", hidden, inner))
    if config.mlp_bias:
        both = [intake.take(f"{prefix}{name}_proj.bias", inner) for name in names]
        fill(root, f"{path}.gate_up.bias", torch.cat(both))
        fill(root, f"{path}.down.bias", intake.take(f"{prefix}down_proj.bias", hidden))


def take_norm(intake: Intake, name: str, config: ModelConfig, size: int | None = None) -> Tensor:
    """A norm's weight, in float32 or wider, of width `size` (default: the model's)."""
    wide = torch.promote_types(intake.dtype, torch.float32)
    weight = intake.take(name, size or config.hidden_size, dtype=wide)
    return weight + 1 if config.norm_plus_one else weight


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
