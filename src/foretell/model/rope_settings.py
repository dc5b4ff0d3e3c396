"""Rotary settings as checkpoints write them (`rope_scaling`, or an entry of `rope_parameters`) and the config around.

Not the arithmetic (that is rope.py). Invariant: a scaling that is not known, or lacks a number, is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foretell.model.rope import Rope, Scaling

Json = Mapping[str, Any]


def read_rope(
    config: Json, settings: Json, base: float, head_dim: int, max_model_len: int | None
) -> Rope:
    """One rope, from its settings (`rope_scaling` or an entry of `rope_parameters`) and the config around them."""
    name = settings.get("rope_type") or settings.get("type") or "default"
    name = (
        {"su": "longrope", "yarn": "longrope"}.get(name, name)
        if config["model_type"] == "phi3"
        else name
    )
    if name not in {scaling.value for scaling in Scaling}:
        raise ValueError(
            f"model config: rope_type {name!r} is not supported; supported are {', '.join(s.value for s in Scaling)}"
        )
    scaling = Scaling(name)
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    longest = int(config.get("max_position_embeddings") or 2048)
    trained = int(
        config.get("original_max_position_embeddings")
        or settings.get("original_max_position_embeddings")
        or longest
    )
    rope = Rope(
        dim=int(head_dim * partial),
        base=float(_given(settings.get("rope_theta"), config.get("rope_theta"), base)),
        scaling=scaling,
        factor=float(_given(settings.get("factor"), longest / trained)),
        trained_length=longest if scaling is Scaling.DYNAMIC else trained,
    )
    if rope.factor <= 0 or rope.base <= 0:
        raise ValueError(
            f"model config: rope factor {rope.factor} and rope_theta {rope.base} must be above 0"
        )
    if scaling in (Scaling.LINEAR, Scaling.DYNAMIC, Scaling.LLAMA3) and "factor" not in settings:
        raise ValueError(f"model config: rope_scaling of type {name!r} needs a factor")
    match scaling:
        case Scaling.LLAMA3:
            return _with_llama3(rope, settings)
        case Scaling.YARN:
            return _with_yarn(rope, settings)
        case Scaling.LONGROPE:
            return _with_longrope(rope, settings, max_model_len or longest)
        case _:
            return rope


def _given(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _with_llama3(rope: Rope, settings: Json) -> Rope:
    missing = [name for name in ("low_freq_factor", "high_freq_factor") if name not in settings]
    if missing:
        raise ValueError(f"model config: rope_scaling of type 'llama3' needs {', '.join(missing)}")
    return replace(
        rope,
        low_freq_factor=float(settings["low_freq_factor"]),
        high_freq_factor=float(settings["high_freq_factor"]),
    )


def _with_yarn(rope: Rope, settings: Json) -> Rope:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    attention = settings.get("attention_factor")
    if attention is None:
        one, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        attention = magnitude(one) / magnitude(all_dim) if one and all_dim else magnitude(1.0)
    return replace(
        rope,
        attention_factor=float(attention),
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        truncate=bool(settings.get("truncate", True)),
    )


def _with_longrope(rope: Rope, settings: Json, longest: int) -> Rope:
    """LongRoPE (arXiv 2402.13753): one set of factors up to the trained length, one beyond.

    The set is chosen once for the model: choosing per request would make old keys wrong when a request grows.
    """
    name = "long_factor" if longest > rope.trained_length else "short_factor"
    factors = settings.get(name)
    if not isinstance(factors, list | tuple) or len(factors) != rope.dim // 2:
        raise ValueError(
            f"model config: rope_scaling needs {rope.dim // 2} numbers in {name}, got {factors!r:.60}"
        )
    attention = settings.get("attention_factor")
    if attention is None:
        grown = (
            1 + math.log(rope.factor) / math.log(rope.trained_length) if rope.factor > 1 else 1.0
        )
        attention = math.sqrt(grown)
    return replace(
        rope, attention_factor=float(attention), divisors=tuple(float(f) for f in factors)
    )
