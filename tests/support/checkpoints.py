"""Writers: drafter checkpoints exactly as each project publishes them, with small random weights.

Names, shapes, dtypes and config keys are those of the formats; nothing here is shared with the readers under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

H, V, INNER, HEADS, KV_HEADS = 32, 96, 48, 4, 2
Tensors = dict[str, Tensor]


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5


def norm_weight(size: int, seed: int = 0) -> Tensor:
    return 1 + 0.3 * noise(1, size, seed=seed)[0] * size**0.5


def write(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object] | None, file: str
) -> Path:
    """A folder with `file` (safetensors or a pickle) and config.json; None writes no config."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(contiguous, folder / file)
    else:
        torch.save(contiguous, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def medusa(
    heads: int = 5,
    layers: int = 1,
    output: bool = True,
    prefix: str = "",
    hidden: int = H,
    v: int = V,
) -> Tensors:
    """FasterDecoding: a ModuleList of Sequentials of residual blocks and an output layer."""
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{prefix}{i}.{j}.linear.weight"] = noise(hidden, hidden, seed=10 * i + j)
            tensors[f"{prefix}{i}.{j}.linear.bias"] = noise(1, hidden, seed=10 * i + j)[0]
        if output:
            tensors[f"{prefix}{i}.{layers}.weight"] = noise(v, hidden, seed=100 + i)
    return tensors


def medusa_config(heads: int = 5) -> dict[str, object]:
    return {
        "medusa_num_heads": heads,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "version": "2",
    }


def medusa_vllm(
    heads: int = 5, bias: bool = False, kept: Tensor | None = None, prefix: str = ""
) -> Tensors:
    """Converted for vLLM; with `kept`, the output layers have the rows of a token map."""
    tensors: Tensors = {}
    rows = V if kept is None else kept.shape[0]
    for i in range(heads):
        tensors[f"{prefix}blocks.{i}.layers.0.weight"] = noise(H, H, seed=10 * i)
        if bias:
            tensors[f"{prefix}blocks.{i}.layers.0.bias"] = noise(1, H, seed=10 * i)[0]
        tensors[f"{prefix}lm_heads.{i}.weight"] = noise(rows, H, seed=100 + i)
    if kept is not None:
        tensors[f"{prefix}token_map"] = kept
    return tensors


def medusa_vllm_config(heads: int = 5, **more: object) -> dict[str, object]:
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": H,
        "vocab_size": V,
        "num_heads": heads,
        "num_hidden_layers": 1,
        "truncated_vocab_size": V,
        **more,
    }


def llama_layer(
    prefix: str, inputs: int = H, seed: int = 0, qkv_bias: bool = False, first: bool = True
) -> Tensors:
    """A Llama layer without its first norm; `first=False` adds that norm."""
    dim = H // HEADS
    sizes = {
        "q": (HEADS * dim, inputs),
        "k": (KV_HEADS * dim, inputs),
        "v": (KV_HEADS * dim, inputs),
    }
    tensors = {
        f"{prefix}self_attn.{name}_proj.weight": noise(*size, seed=seed + i)
        for i, (name, size) in enumerate(sizes.items())
    }
    if qkv_bias:
        for i, (name, size) in enumerate(sizes.items()):
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = noise(1, size[0], seed=seed + 20 + i)[
                0
            ]
    tensors[f"{prefix}self_attn.o_proj.weight"] = noise(H, HEADS * dim, seed=seed + 4)
    tensors[f"{prefix}mlp.gate_proj.weight"] = noise(INNER, H, seed=seed + 5)
    tensors[f"{prefix}mlp.up_proj.weight"] = noise(INNER, H, seed=seed + 6)
    tensors[f"{prefix}mlp.down_proj.weight"] = noise(H, INNER, seed=seed + 7)
    tensors[f"{prefix}post_attention_layernorm.weight"] = norm_weight(H, seed=seed + 8)
    if not first:
        tensors[f"{prefix}input_layernorm.weight"] = norm_weight(H, seed=seed + 9)
    return tensors


def llama_config(layers: int = 1, **more: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "vocab_size": V,
        "tie_word_embeddings": False,
        **more,
    }


def eagle1(
    layers: int = 1, bias: bool = True, embedding: bool = True, qkv_bias: bool = False
) -> Tensors:
    """EAGLE-1/2: no norm in front, none at the end, no head."""
    tensors = {"fc.weight": noise(H, 2 * H, seed=1)}
    if bias:
        tensors["fc.bias"] = noise(1, H, seed=2)[0]
    if embedding:
        tensors["embed_tokens.weight"] = noise(V, H, seed=3)
    for i in range(layers):
        tensors |= llama_layer(f"layers.{i}.", seed=50 * i, qkv_bias=qkv_bias, first=i == 0)
    return tensors


def eagle3(
    first: str = "midlayer.",
    prefix: str = "",
    draft_vocabulary: int | None = 40,
    embedding: bool = False,
    head: bool = True,
    layers: int = 1,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    target_hidden: int = H,
    fc: bool = True,
) -> Tensors:
    """EAGLE-3; `first` is "midlayer." (SafeAILab, SpecForge) or "layers.0." (vLLM, speculators)."""
    tensors: Tensors = {}
    if fc:
        tensors["fc.weight"] = noise(H, 3 * target_hidden, seed=1)
    tensors[f"{first}hidden_norm.weight"] = norm_weight(H, seed=2)
    tensors[f"{first}input_layernorm.weight"] = norm_weight(H, seed=3)
    tensors |= llama_layer(first, inputs=2 * H, seed=11)
    for i in range(1, layers):
        tensors |= llama_layer(f"layers.{i}.", seed=50 * i, first=False)
    tensors["norm.weight"] = norm_weight(H, seed=4)
    rows = draft_vocabulary or V
    if head:
        tensors["lm_head.weight"] = noise(rows, H, seed=5)
    if draft_vocabulary is not None:
        target_of = draft_tokens(draft_vocabulary)
        tensors["d2t"] = target_of - torch.arange(draft_vocabulary)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, target_of, True)
    if embedding:
        tensors["embed_tokens.weight"] = noise(V, H, seed=6)
    if norm_before_fc:
        tensors["input_norm.weight"] = norm_weight(3 * target_hidden, seed=7)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": norm_weight(target_hidden, seed=8 + i) for i in range(3)}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def draft_tokens(count: int) -> Tensor:
    """[count] target ids of the draft vocabulary, ascending."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(1))[:count].sort().values


def eagle3_config(**more: object) -> dict[str, object]:
    return llama_config(
        **{"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40, **more}
    )


def speculators_config(**more: object) -> dict[str, object]:
    """The speculators format of an EAGLE-3 drafter."""
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": llama_config(),
        "draft_vocab_size": 40,
        "norm_before_residual": False,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
                "architectures": ["LlamaForCausalLM"],
            },
        },
        **more,
    }


def mlp_speculator(
    heads: int = 3, inner: int = 24, tied: bool = False, copies: bool = True
) -> Tensors:
    """IBM's accelerators; tied weights saved once, or once per head."""
    tensors: Tensors = {}
    for i in range(heads):
        kept = i == 0 or not tied or copies
        j = 0 if tied else i
        if kept:
            tensors[f"speculator.emb.{i}.weight"] = noise(V, inner, seed=j)
            tensors[f"speculator.head.{i}.weight"] = noise(V, inner, seed=10 + j)
            tensors[f"speculator.ln.{i}.weight"] = norm_weight(inner, seed=20 + j)
            tensors[f"speculator.ln.{i}.bias"] = noise(1, inner, seed=30 + j)[0]
        if kept or i == 1:
            tensors[f"speculator.proj.{i}.weight"] = noise(
                inner, H if i == 0 else inner, seed=40 + (min(i, 1) if tied else i)
            )
    return tensors


def mlp_speculator_config(heads: int = 3, inner: int = 24, **more: object) -> dict[str, object]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": V,
        "emb_dim": H,
        "inner_dim": inner,
        "n_predict": heads,
        "top_k_tokens_per_head": [4, 3, 2][:heads],
        "n_candidates": 5,
        **more,
    }


def language_model(layers: int = 1, qkv_bias: bool = False) -> Tensors:
    """A target."""
    tensors = {"model.embed_tokens.weight": noise(V, H), "model.norm.weight": norm_weight(H)}
    tensors["lm_head.weight"] = noise(V, H)
    for i in range(layers):
        tensors |= llama_layer(f"model.layers.{i}.", seed=50 * i, qkv_bias=qkv_bias, first=False)
    return tensors


def qwen_mtp(layers: int = 1) -> Tensors:
    """Qwen3-Next/3.5, dense: gated attention, query and key norms, norm weights minus one."""
    dim = H // HEADS
    tensors = language_model()
    tensors["mtp.fc.weight"] = noise(H, 2 * H, seed=1)
    for i, name in enumerate(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")):
        tensors[f"mtp.{name}.weight"] = norm_weight(H, seed=60 + i) - 1
    for i in range(layers):
        layer = llama_layer(f"mtp.layers.{i}.", seed=70 + 20 * i, first=False)
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer[f"mtp.layers.{i}.{name}.weight"] -= 1
        attention = f"mtp.layers.{i}.self_attn."
        layer[f"{attention}q_proj.weight"] = noise(2 * HEADS * dim, H, seed=90 + i)
        for name in ("q_norm", "k_norm"):
            layer[f"{attention}{name}.weight"] = norm_weight(dim, seed=95 + i) - 1
        tensors |= layer
    return tensors


def qwen_mtp_config(layers: int = 1, **more: object) -> dict[str, object]:
    text = llama_config(
        24,
        model_type="qwen3_5_text",
        mtp_num_hidden_layers=layers,
        mtp_use_dedicated_embeddings=False,
        head_dim=H // HEADS,
        attn_output_gate=True,
        layer_types=["linear_attention"] * 24,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        **more,
    )
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
    }


def mimo_mtp() -> Tensors:
    """MiMo: an ordinary layer with biases, the feature's half first."""
    prefix = "model.mtp_layers.0."
    tensors = language_model(qkv_bias=True) | llama_layer(
        prefix, seed=70, qkv_bias=True, first=False
    )
    tensors[f"{prefix}input_proj.weight"] = noise(H, 2 * H, seed=1)
    for i, name in enumerate(("token_layernorm", "hidden_layernorm", "final_layernorm")):
        tensors[f"{prefix}{name}.weight"] = norm_weight(H, seed=60 + i)
    return tensors


def mimo_mtp_config(**more: object) -> dict[str, object]:
    return llama_config(
        36,
        model_type="mimo",
        architectures=["MiMoForCausalLM"],
        num_nextn_predict_layers=1,
        attention_bias=True,
        **more,
    )


# Every format that is read: tensors, config and file.
FORMATS: dict[str, Callable[[], tuple[Tensors, dict[str, object] | None, str]]] = {
    "medusa pt": lambda: (medusa(), medusa_config(), "medusa_lm_head.pt"),
    "medusa safetensors": lambda: (medusa(heads=4), None, "medusa_lm_head.safetensors"),
    "medusa shared head": lambda: (medusa(output=False), None, "medusa_lm_head.pt"),
    "medusa full": lambda: (
        language_model() | medusa(prefix="medusa_head."),
        llama_config(medusa_num_heads=5, medusa_num_layers=1),
        "model.safetensors",
    ),
    "medusa vllm": lambda: (medusa_vllm(), medusa_vllm_config(), "model.safetensors"),
    "medusa token map": lambda: (
        medusa_vllm(kept=draft_tokens(30)),
        medusa_vllm_config(truncated_vocab_size=30),
        "model.safetensors",
    ),
    "eagle bin": lambda: (eagle1(), llama_config(), "pytorch_model.bin"),
    "eagle safetensors": lambda: (
        eagle1(bias=False),
        llama_config(bias=False),
        "model.safetensors",
    ),
    "eagle3": lambda: (eagle3(), eagle3_config(), "pytorch_model.bin"),
    "eagle3 vllm names": lambda: (
        eagle3(first="layers.0."),
        eagle3_config(),
        "model.safetensors",
    ),
    "speculators": lambda: (
        eagle3(first="layers.0."),
        speculators_config(),
        "model.safetensors",
    ),
    "mlp_speculator": lambda: (
        mlp_speculator(),
        mlp_speculator_config(),
        "model.safetensors",
    ),
    "mtp qwen": lambda: (qwen_mtp(), qwen_mtp_config(), "model.safetensors"),
    "mtp mimo": lambda: (mimo_mtp(), mimo_mtp_config(), "model.safetensors"),
    "pard": lambda: (
        language_model(),
        llama_config(pard_token=90),
        "model.safetensors",
    ),
}
