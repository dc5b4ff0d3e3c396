"""From the words users know (`speculate_model`, `num_speculative_tokens`, `speculative_config`) to a Speculation.

The keys of `speculative_config` are vLLM's where the feature exists, and ours: `acceptance`, `tree`, and for EAGLE-3
`target_layers`, `target_layers_convention` and `norm_before_residual`. A key of a feature that does not exist is
refused by name, unless it carries the value that switches the feature off. Nothing is guessed from a model's name: with
no method named, the checkpoint says what it is when it is opened. A list of two methods is a chain (`_chain`). Adding a
method is one entry in `METHODS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from foretell.config import (
    SUFFIX_TOKENS,
    WITHIN_TARGET,
    Acceptance,
    Chained,
    DraftCheckpoint,
    Drafter,
    DraftSampling,
    LayerConvention,
    Method,
    Ngram,
    Speculation,
    Suffix,
    TreeSpec,
    refuse_unknown,
    tree_nodes,
)

KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "revision",
    "draft_tensor_parallel_size",
    "max_model_len",
    "use_heterogeneous_vocab",
    "draft_sample_method",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "rejection_sample_method",
    "acceptance",
    "tree",
    "adaptive",
    "target_layers",
    "target_layers_convention",
    "norm_before_residual",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "suffix_decoding_min_match",
    "suffix_decoding_corpus_tokens",
)


NO_COUNT = (
    "num_speculative_tokens must be provided with speculative model unless the draft model config contains an "
    "n_predict parameter."
)


@dataclass(frozen=True, slots=True)
class Missing:
    """A key of a feature that does not exist: the values that switch it off, and what to do instead."""

    off: tuple[object, ...]
    remedy: str


_ONE_DTYPE = Missing((None, "auto"), "The draft model runs in the target's dtype; leave it out.")
_SYNTHETIC = Missing((None,), "Measure real acceptance with foretell bench acceptance.")
_FLY = Missing((None,), "Use acceptance 'typical', which is lossy too.")
_TYPICAL = Missing((None,), "Use acceptance 'typical'.")
_SWITCH = Missing((None, False), "Leave it out.")
MISSING: Mapping[str, Missing] = {
    "quantization": Missing((None,), "A GGUF draft brings its own quantisation; leave it out."),
    "moe_backend": _ONE_DTYPE,
    "attention_backend": _ONE_DTYPE,
    "kv_cache_dtype": _ONE_DTYPE,
    "code_revision": Missing((None,), "No code is loaded from the hub; leave it out."),
    "draft_load_config": Missing(
        (None,), "Directories, GGUF files and hub names load by themselves."
    ),
    "enforce_eager": Missing(
        (None, False), "Pass enforce_eager to the engine; it holds for the draft too."
    ),
    "disable_padded_drafter_batch": _SWITCH,
    "disable_eagle_block_drop": _SWITCH,
    "use_local_argmax_reduction": _SWITCH,
    "parallel_drafting": Missing(
        (None, False), "A PARD checkpoint is known as one by itself; leave it out."
    ),
    "num_speculative_tokens_per_batch_size": Missing((None,), "Give one num_speculative_tokens."),
    "synthetic_acceptance_rates": _SYNTHETIC,
    "synthetic_acceptance_length": _SYNTHETIC,
    "enable_adaptive_verification": _SWITCH,
    "dspark_draft_topk": Missing((None,), "Use method 'draft_model'."),
    "index_share_for_mtp_iteration": _SWITCH,
    "fly_window_size": _FLY,
    "fly_entropy_threshold": _FLY,
    "fly_entropy_top_k": _FLY,
    "disable_by_batch_size": Missing((None,), "Pass num_speculative_tokens=0 in SamplingParams."),
    "disable_logprobs": Missing((None, False), "Ask for logprobs in SamplingParams, or do not."),
    "disable_mqa_scorer": _SWITCH,
    "acceptance_method": Missing(
        (None,), "The key is 'acceptance': 'match', 'rejection' or 'typical'."
    ),
    "spec_decoding_acceptance_method": Missing(
        (None,), "The key is 'acceptance': 'match', 'rejection' or 'typical'."
    ),
    "posterior_threshold": _TYPICAL,
    "posterior_alpha": _TYPICAL,
    "typical_acceptance_sampler_posterior_threshold": _TYPICAL,
    "typical_acceptance_sampler_posterior_alpha": _TYPICAL,
    "speculative_token_tree": Missing((None,), "The key is 'tree': a list of paths."),
}


def resolve_speculation(
    speculate_model: str | None = None,
    num_speculative_tokens: int | None = None,
    speculative_config: Mapping[str, object] | None = None,
) -> Speculation:
    """How to speculate, from what the user said.

    Args:
        speculate_model: a drafter's checkpoint, or "ngram"; the short form of `speculative_config["model"]`.
        num_speculative_tokens: the short form of the key of that name; see DraftCheckpoint for what it means.
        speculative_config: see `KEYS`.

    Raises:
        ValueError: a key is unknown, refused, contradictory, missing or out of range.
        NotImplementedError: the method does not exist (yet).
    """
    given = _merged(speculate_model, num_speculative_tokens, speculative_config)
    if not given:
        return Speculation()
    _refuse(given)
    names = _chain(given)
    drafter: Drafter
    if names is None:
        method = _method(given)
        _refuse_foreign((method,), given)
        drafter = _free(method, given) if method in FREE else _checkpoint(method, given)
    else:
        _refuse_foreign(names, given)
        without_model = {key: value for key, value in given.items() if key != "model"}
        without_model.setdefault("num_speculative_tokens", SUFFIX_TOKENS)
        first = _free(names[0], without_model)
        drafter = Chained(first, _checkpoint(names[1], given))
    return Speculation(
        drafter,
        _acceptance(given),
        cast("TreeSpec | None", given.get("tree")),
        cast("bool | None", given.get("adaptive")),
    )


def _merged(
    model: str | None, count: int | None, config: Mapping[str, object] | None
) -> dict[str, object]:
    if config is not None and not isinstance(config, Mapping):
        raise ValueError(f"speculative_config must be a dict, got {config!r}")
    given = {} if config is None else {k: v for k, v in config.items() if v is not None}
    for key, name, short in (
        ("model", "speculate_model", model),
        ("num_speculative_tokens", "num_speculative_tokens", count),
    ):
        if short is None:
            continue
        if given.setdefault(key, short) != short:
            raise ValueError(
                f"{name}={short!r} but speculative_config has {key}={given[key]!r}; give one of them"
            )
    return given


def _refuse(given: Mapping[str, object]) -> None:
    if "tensor_parallel_size" in given:
        raise ValueError(
            "'tensor_parallel_size' is not a valid argument in the speculative_config. "
            "Please pass 'draft_tensor_parallel_size' instead."
        )
    for key, missing in MISSING.items():
        if key in given and given[key] not in missing.off:
            raise ValueError(
                f"speculative_config key {key!r} is not supported (got {given[key]!r}). {missing.remedy}"
            )
    refuse_unknown("speculative_config", (k for k in given if k not in MISSING), KEYS)


def _chain(given: Mapping[str, object]) -> tuple[str, str | None] | None:
    """The two methods of a chain, if one was asked for; None for the second = its checkpoint says what it is.

    A list of two methods, "one+two", or "chained", which is suffix decoding before any checkpoint.
    """
    method = given.get("method")
    if method == "chained":
        return "suffix", None
    if isinstance(method, str) and "+" in method:
        method = [name.strip() for name in method.split("+")]
    if not isinstance(method, list | tuple):
        return None
    known = len(method) == 2 and method[0] in FREE and method[1] not in FREE
    if not known or not all(isinstance(name, str) for name in method):
        raise ValueError(
            f"speculative_config method={given['method']!r}: a chain is one of {', '.join(map(repr, FREE))}, then the "
            "method of a checkpoint, such as ['suffix', 'eagle3']; or 'chained'"
        )
    return method[0], _known(str(method[1]))


def _known(method: str) -> str:
    """The method's own name.

    Raises:
        NotImplementedError: there is none of that name.
    """
    method = ALIASES.get(method, method)
    if method not in METHODS:
        raise NotImplementedError(
            f"Unsupported speculative method: '{method}'. Supported: {', '.join(map(repr, METHODS))}."
        )
    return method


def _method(given: Mapping[str, object]) -> str | None:
    """The method's own name, or None where the checkpoint is to say it."""
    method, model = given.get("method"), given.get("model")
    if method is not None and not isinstance(method, str):
        raise ValueError(f"speculative_config method must be a name, got {method!r}")
    if model in ("ngram", "[ngram]") and method in (None, "ngram"):
        return "ngram"
    if model == "suffix" and method in (None, "suffix"):
        return "suffix"
    if method is None and model is None:
        if "num_speculative_tokens" in given:
            raise ValueError("num_speculative_tokens was provided but without speculative model.")
        raise ValueError(f"speculative_config names neither a method nor a model: {dict(given)!r}")
    return _known(method) if method else None


def _refuse_foreign(methods: tuple[str | None, ...], given: Mapping[str, object]) -> None:
    """A key of another method would be ignored: say so instead."""
    own = frozenset[str]().union(
        *(_CHECKPOINT | _DRAFT_MODEL | _EAGLE3 if m is None else METHODS[m] for m in methods)
    )
    for key in given:
        if any(key in keys for keys in METHODS.values()) and key not in own:
            named = " and ".join("a checkpoint" if m is None else f"method {m!r}" for m in methods)
            raise ValueError(
                f"speculative_config key {key!r} does not belong to {named}; leave it out"
            )


def _acceptance(given: Mapping[str, object]) -> Acceptance:
    standard = given.get("rejection_sample_method")
    if standard not in (None, "standard"):
        raise ValueError(
            f"speculative_config rejection_sample_method={standard!r} is not supported. Use 'standard', or the key "
            "'acceptance': 'match', 'rejection' or 'typical'."
        )
    rule = given.get("acceptance", "match" if standard is None else "rejection")
    if standard is not None and rule != "rejection":
        raise ValueError(
            f"acceptance={rule!r} contradicts rejection_sample_method='standard'; give one of them"
        )
    return cast("Acceptance", rule)  # Speculation checks it


def _draft_tokens(given: Mapping[str, object]) -> int:
    """`num_speculative_tokens`, or what the tree drafts."""
    count = given.get("num_speculative_tokens")
    tree = given.get("tree")
    if count is None and isinstance(tree, list | tuple) and tree:
        return tree_nodes(cast("tuple[int, ...]", tree)) - 1
    if count is None:
        raise ValueError(NO_COUNT)
    return cast("int", count)  # the drafter's config checks it


def _free(method: str | None, given: Mapping[str, object]) -> Ngram | Suffix:
    """A drafter without a checkpoint."""
    if given.get("model") not in (None, method, f"[{method}]"):
        raise ValueError(f"method {method!r} needs no model, got {given['model']!r}; leave it out")
    if method == "ngram":
        return _ngram(given)
    own = {
        key.removeprefix(_SUFFIX): value for key, value in given.items() if key.startswith(_SUFFIX)
    }
    if "num_speculative_tokens" in given or "tree" in given:
        own["num_speculative_tokens"] = _draft_tokens(given)
    return Suffix(**own)  # type: ignore[arg-type]  # it checks every value


def _ngram(given: Mapping[str, object]) -> Ngram:
    low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    either = next((n for n in (low, high) if n is not None), 5)
    return Ngram(
        num_speculative_tokens=_draft_tokens(given),
        prompt_lookup_min=cast("int", either if low is None else low),
        prompt_lookup_max=cast("int", either if high is None else high),
    )


def _checkpoint(method: str | None, given: Mapping[str, object]) -> DraftCheckpoint:
    if given.get("model") is None and method not in WITHIN_TARGET:
        raise ValueError(f"method {method!r} needs a model: a directory, a GGUF file or a hub name")
    if method == "draft_model" and "tree" not in given:
        _draft_tokens(given)  # early, where what the checkpoint is need not be waited for
    return DraftCheckpoint(
        model=cast("str | None", given.get("model")),
        method=cast("Method | None", method),
        num_speculative_tokens=cast("int | None", given.get("num_speculative_tokens")),
        revision=cast("str | None", given.get("revision")),
        tensor_parallel_size=cast("int | None", given.get("draft_tensor_parallel_size")),
        max_model_len=cast("int | None", given.get("max_model_len")),
        use_heterogeneous_vocab=cast("bool | None", given.get("use_heterogeneous_vocab")),
        sampling=cast("DraftSampling | None", given.get("draft_sample_method")),
        target_layers=cast("tuple[int, ...] | None", given.get("target_layers")),
        target_layers_convention=cast(
            "LayerConvention | None", given.get("target_layers_convention")
        ),
        norm_before_residual=cast("bool | None", given.get("norm_before_residual")),
    )


_CHECKPOINT = frozenset({"model", "revision", "draft_tensor_parallel_size", "max_model_len"})
_DRAFT_MODEL = frozenset({"use_heterogeneous_vocab", "draft_sample_method"})
_EAGLE3 = frozenset({"target_layers", "target_layers_convention", "norm_before_residual"})

_SUFFIX = "suffix_decoding_"
FREE = ("ngram", "suffix")  # methods without a checkpoint

# The keys that belong to each method, besides those that all have.
METHODS: Mapping[str, frozenset[str]] = {
    "ngram": frozenset({"model", "prompt_lookup_min", "prompt_lookup_max"}),
    "suffix": frozenset({"model", *(key for key in KEYS if key.startswith(_SUFFIX))}),
    "draft_model": _CHECKPOINT | _DRAFT_MODEL,
    "medusa": _CHECKPOINT,
    "eagle": _CHECKPOINT,
    "eagle1": _CHECKPOINT,
    "eagle2": _CHECKPOINT,
    "eagle3": _CHECKPOINT | _EAGLE3,
    "mlp_speculator": _CHECKPOINT,
    "mtp": _CHECKPOINT,
    "pard": _CHECKPOINT,
}
# Names that users of vLLM have for them.
ALIASES: Mapping[str, str] = {
    "draft": "draft_model",
    "mimo_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
