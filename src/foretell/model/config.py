"""ModelConfig: all that tells one decoder from another, as data. Families are rows of a table, not classes.

Read from a Hugging Face `config.json` in the old layout (`rope_theta`, `rope_scaling`) or the new one
(`rope_parameters`). Invariant: a setting that changes the result is either represented here or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from foretell.model.rope import Rope, Scaling
from foretell.model.rope_settings import read_rope

Json = Mapping[str, Any]


class Activation(Enum):
    """The gate's function in the MLP."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True)
class ModelConfig:
    """Shape and features of a decoder. The defaults are those of a plain Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int = 2048
    family: str = "llama"
    norm_eps: float = 1e-5
    activation: Activation = Activation.SILU
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = (
        False  # attention's output is multiplied by sigmoid(gate(x)); only drafter layers have it
    )
    sandwich_norms: bool = False  # norms after attention and after the MLP too
    norm_plus_one: bool = False  # the checkpoint stores norm weights minus one
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    logit_scale: float = 1.0
    experts: int = 0
    experts_per_token: int = 0
    windows: tuple[int | None, ...] = ()  # per layer; empty: none has one
    ropes: tuple[Rope, ...] = ()  # the distinct ones; empty: one plain rope
    layer_ropes: tuple[int, ...] = ()  # per layer, index into `ropes`; empty: all 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None  # what the checkpoint says it is stored in

    def __post_init__(self) -> None:
        filled = {
            "windows": self.windows or (None,) * self.layers,
            "ropes": self.ropes or (Rope(dim=self.head_dim),),
            "layer_ropes": self.layer_ropes or (0,) * self.layers,
            "attention_scale": self.attention_scale or self.head_dim**-0.5,
        }
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model config: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model config: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        for name in ("windows", "layer_ropes"):
            if len(getattr(self, name)) != self.layers:
                raise ValueError(
                    f"model config: {name} has {len(getattr(self, name))} entries for {self.layers} layers"
                )

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        assert self.attention_scale is not None
        return self.attention_scale

    def with_max_position(self, max_position: int) -> ModelConfig:
        """The same model for requests of at most so many tokens."""
        return replace(self, max_position=max_position)

    def with_eos(self, ids: tuple[int, ...]) -> ModelConfig:
        """The same model, ended by these tokens."""
        return replace(self, eos_token_ids=tuple(dict.fromkeys(ids)))

    @staticmethod
    def from_hf(config: Json, max_model_len: int | None = None) -> ModelConfig:
        """Read a Hugging Face model config.

        Args:
            config: the parsed `config.json`.
            max_model_len: longest request to serve. Only longrope reads it, to choose its short or long factors for
                the whole model; None is the config's own maximum.

        Raises:
            ValueError: an unknown family, a missing field, or a feature that is not supported, named.
        """
        return _read(config, max_model_len)


@dataclass(frozen=True, slots=True)
class Family:
    """What a `model_type` implies beyond the fields of its config."""

    activation: str = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False  # embedding scale, norm weights minus one, tied by default
    sandwich_norms: bool = False
    windows: bool = False  # `sliding_window` holds in every layer
    window_pattern: int = 0  # every n-th layer is global, the others local
    base: float = 10000.0
    head_dim: int | None = None
    eps: float = 1e-6


FAMILIES = {
    "llama": Family(),
    "mistral": Family(windows=True),
    "mixtral": Family(windows=True, base=1e6, eps=1e-5),
    "qwen2": Family(qkv_bias=True),
    "mimo": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_dim=128),
    "gemma": Family(activation="gelu_pytorch_tanh", gemma=True, head_dim=256),
    "gemma2": Family(
        activation="gelu_pytorch_tanh",
        gemma=True,
        sandwich_norms=True,
        window_pattern=2,
        head_dim=256,
    ),
    "gemma3_text": Family(
        activation="gelu_pytorch_tanh",
        gemma=True,
        sandwich_norms=True,
        qk_norm=True,
        window_pattern=6,
        base=1e6,
        head_dim=256,
    ),
    "phi3": Family(windows=True, eps=1e-5),
}

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


def _read(config: Json, max_model_len: int | None) -> ModelConfig:
    if config.get("model_type") == "gemma3" and "text_config" in config:
        config = {**config["text_config"], "model_type": "gemma3_text"}
    family = _family(config)
    _refuse(config)
    layers, heads = _int(config, "num_hidden_layers"), _int(config, "num_attention_heads")
    hidden = _int(config, "hidden_size")
    head_dim = config.get("head_dim") or family.head_dim or hidden // heads
    windows = _windows(config, family, layers)
    ropes, layer_ropes = _ropes(config, family, head_dim, windows, max_model_len)
    query_scalar = config.get("query_pre_attn_scalar", 256 if family.sandwich_norms else None)
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_int(config, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position=_longest_text(config, family, ropes),
        family=str(config["model_type"]),
        norm_eps=float(config.get("rms_norm_eps", family.eps)),
        activation=_activation(config, family),
        tied=bool(config.get("tie_word_embeddings", family.gemma)),
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias and not family.qkv_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        sandwich_norms=family.sandwich_norms,
        norm_plus_one=family.gemma,
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        attention_scale=None if query_scalar is None else float(query_scalar) ** -0.5,
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        logits_softcap=_softcap(config, "final_logit_softcapping", 30.0),
        logit_scale=float(config.get("logit_scale", 1.0)),
        experts=_int(config, "num_local_experts") if config["model_type"] == "mixtral" else 0,
        experts_per_token=int(config.get("num_experts_per_tok", 2)),
        windows=windows,
        ropes=ropes,
        layer_ropes=layer_ropes,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_token_ids(config.get("eos_token_id")),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def _family(config: Json) -> Family:
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"model_type {name!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def _refuse(config: Json) -> None:
    """Settings that would change the result and that nothing here represents."""
    refused = [
        name
        for name in (
            "quantization_config",
            "use_bidirectional_attention",
            "use_mrope",
            "no_rope_layers",
        )
        if config.get(name)
    ]
    if config.get("clip_qkv") is not None:
        refused.append("clip_qkv")
    if refused:
        raise ValueError(
            f"model config: {', '.join(refused)} is not supported; use a checkpoint without it"
        )


def _int(config: Json, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
            f"model config: {name} must be an integer, got {value!r}; is this a decoder's config.json?"
        )
    return value


def _activation(config: Json, family: Family) -> Activation:
    # Gemma 1's `hidden_act` says "gelu" in old files and means the tanh form; `hidden_activation` came to correct it.
    name = config.get("hidden_activation") or config.get("hidden_act") or family.activation
    if family.gemma and name == "gelu":
        name = family.activation
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"model config: hidden_act {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _softcap(config: Json, name: str, gemma2: float) -> float | None:
    value = config.get(name, gemma2 if config["model_type"] == "gemma2" else None)
    return None if value is None else float(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _longest_text(config: Json, family: Family, ropes: Sequence[Rope]) -> int:
    """Positions it was trained for, times the factor of a scaling that stretches them; Gemma's count it already."""
    said = int(config.get("max_position_embeddings") or 2048)
    if family.gemma:
        return said
    stretching = (Scaling.LINEAR, Scaling.DYNAMIC, Scaling.YARN)
    return max(
        [said, *(int(r.trained_length * r.factor) for r in ropes if r.scaling in stretching)]
    )


def _windows(config: Json, family: Family, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer."""
    window = config.get(
        "sliding_window",
        4096 if family.window_pattern or config["model_type"] == "mistral" else None,
    )
    if "use_sliding_window" in config and not config["use_sliding_window"]:
        window = None
    if config["model_type"] in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = _layer_types(config, family, layers)
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ValueError(f"model config: layer_types {sorted(unknown)} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_types(config: Json, family: Family, layers: int) -> list[str]:
    if family.window_pattern:
        pattern = int(config.get("sliding_window_pattern") or family.window_pattern)
        local = [bool((i + 1) % pattern) for i in range(layers)]
    elif family.windows:
        local = [True] * layers
    else:
        first = int(config.get("max_window_layers", 28))
        local = [config["model_type"] in ("qwen2", "qwen3") and i >= first for i in range(layers)]
    return ["sliding_attention" if here else "full_attention" for here in local]


def _ropes(
    config: Json,
    family: Family,
    head_dim: int,
    windows: tuple[int | None, ...],
    max_model_len: int | None,
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The distinct ropes and which one each layer takes."""
    settings = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma3_text":
        # A global rope, possibly scaled, and a local one, never scaled in the old layout.
        kinds = config.get("layer_types") or _layer_types(config, family, len(windows))
        nested = "full_attention" in settings or "sliding_attention" in settings
        outer = settings.get("full_attention") if nested else config.get("rope_scaling")
        inner = settings.get("sliding_attention") if nested else None
        local = {"rope_theta": config.get("rope_local_base_freq", 10000.0), **(inner or {})}
        ropes = (
            read_rope(config, outer or {}, family.base, head_dim, max_model_len),
            read_rope(config, local, family.base, head_dim, max_model_len),
        )
        return ropes, tuple(int(kind == "sliding_attention") for kind in kinds)
    flat = config.get("rope_scaling") or settings
    return (read_rope(config, flat, family.base, head_dim, max_model_len),), (0,) * len(windows)
