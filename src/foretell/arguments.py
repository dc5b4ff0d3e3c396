"""Arguments that vLLM's LLM and its calls have and these have not: refused by name, unless they ask for what is so.

Invariant: no argument is ignored. One that is accepted here changes nothing because it says what is so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import cast

from foretell.config import DType, refuse_unknown
from foretell.speculation import Missing

_NONE = Missing((None,), "Leave it out.")
_ADAPTERS = Missing((None, False), "Merge the adapter into the model's weights before loading it.")
_ONE_DEVICE = Missing((None, 1), "A model runs on one device; leave it out.")
_HOST_MEMORY = Missing((None, 0, 0.0), "Use a smaller or quantised model; nothing is swapped out.")
_TEXT_ONLY = Missing((None, ""), "Only text goes in; leave it out.")
_CODE = Missing((None, False), "No code is loaded from a model's repository; leave it out.")

MISSING: Mapping[str, Missing] = {
    "runner": Missing((None, "auto", "generate"), "Only text generation is available."),
    "convert": Missing((None, "auto", "none"), "Only text generation is available."),
    "task": Missing((None, "auto", "generate"), "Only text generation is available."),
    "tokenizer_mode": Missing((None, "auto"), "The model's own fast tokenizer is used."),
    "tokenizer_revision": Missing((None,), "Use revision, or pass a local directory as tokenizer."),
    "skip_tokenizer_init": Missing(
        (None, False), "Pass token ids as prompts and detokenize=False in SamplingParams."
    ),
    "trust_remote_code": _CODE,
    "code_revision": _CODE,
    "allowed_local_media_path": _TEXT_ONLY,
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "quantization": Missing((None, "gguf"), "Load a GGUF file, or the unquantised checkpoint."),
    "load_format": Missing(
        (None, "auto", "safetensors", "gguf"), "The files of the checkpoint decide."
    ),
    "config_format": Missing((None, "auto", "hf"), "The files of the checkpoint decide."),
    "kv_cache_dtype": Missing((None, "auto"), "The KV cache has the dtype of the model."),
    "hf_token": Missing((None,), "Set the HF_TOKEN environment variable."),
    "hf_overrides": Missing((None, {}), "Edit config.json in a local copy of the model."),
    "generation_config": Missing(
        (None, "auto"), "Pass SamplingParams(...) to not use the model's own defaults."
    ),
    "override_generation_config": Missing(
        (None, {}), "Pass SamplingParams(...) with these values."
    ),
    "cpu_offload_gb": _HOST_MEMORY,
    "swap_space": _HOST_MEMORY,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "distributed_executor_backend": Missing(
        (None, "uni"), "A model runs on one device, in one process; leave it out."
    ),
    "disable_custom_all_reduce": Missing((None, False, True), "There is none."),
    "compilation_config": _NONE,
    "logits_processors": Missing(
        (None, []), "Use logit_bias, allowed_token_ids or bad_words in SamplingParams."
    ),
    "enable_lora": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "enable_chunked_prefill": Missing(
        (None, True),
        "Prefill is always chunked; raise max_num_batched_tokens above the longest prompt.",
    ),
    "async_scheduling": Missing((None, True), "The host always plans ahead of the device."),
    "num_gpu_blocks_override": Missing((None,), "Use kv_cache_memory_bytes."),
    "prefix_caching_hash_algo": _NONE,
    "disable_log_stats": Missing((None, False, True), "Counting is always on: get_metrics()."),
    "max_seq_len_to_capture": _NONE,
    "spec_method": Missing((None,), "Use speculative_config={'method': ...}."),
    "spec_model": Missing((None,), "Use speculate_model."),
    "spec_tokens": Missing((None,), "Use num_speculative_tokens."),
    "speculative_model": Missing((None,), "Use speculate_model."),
    "speculative_draft_tensor_parallel_size": Missing(
        (None,), "Use speculative_config={'draft_tensor_parallel_size': ...}."
    ),
    "ngram_prompt_lookup_max": Missing(
        (None,), "Use speculative_config={'prompt_lookup_max': ...}."
    ),
    "ngram_prompt_lookup_min": Missing(
        (None,), "Use speculative_config={'prompt_lookup_min': ...}."
    ),
}


_TEXT_IN = Missing((None, {}), "Only text and token ids go in; leave it out.")

# Of its calls.
CALLS: Mapping[str, Missing] = {
    "lora_request": Missing((None,), _ADAPTERS.remedy),
    "prompt_adapter_request": Missing((None,), _ADAPTERS.remedy),
    "mm_processor_kwargs": _TEXT_IN,
    "tokenization_kwargs": Missing((None, {}), "Tokenise the prompt and pass its token ids."),
    "prompt_token_ids": Missing((None,), "Pass {'prompt_token_ids': [...]} as the prompt."),
    "guided_options_request": Missing((None,), "Use structured_outputs in SamplingParams."),
    "chat_template_content_format": Missing(
        (None, "auto", "string"), "Templates are given text; write the chat_template for it."
    ),
}


_DTYPES: Mapping[object, DType] = {"half": "float16", "float": "float32"}


def name_of(model: str | PathLike[str] | None) -> str | None:
    """A model's name; paths may be given as such."""
    return fspath(model) if isinstance(model, PathLike) else model


def dtype_of(given: object) -> DType:
    """The name of a dtype, by vLLM's other names or from torch's object; EngineConfig refuses what is none."""
    name = given if isinstance(given, str) else str(given).removeprefix("torch.")
    return _DTYPES.get(name, cast("DType", name))


def refuse(
    given: Mapping[str, object],
    known: Sequence[str],
    owner: str = "LLM",
    missing: Mapping[str, Missing] = MISSING,
) -> None:
    """Refuse arguments that would have no effect.

    Args:
        given: arguments that `owner` has not, with their values.
        known: the arguments it has.
        missing: those that vLLM has.

    Raises:
        ValueError: one names a feature that does not exist, or is unknown; says what to do instead.
    """
    for name, value in given.items():
        feature = missing.get(name)
        if feature is None:
            refuse_unknown(owner, [name], known)
        elif value not in feature.off:
            raise ValueError(f"{name}={value!r} is not supported. {feature.remedy}")
