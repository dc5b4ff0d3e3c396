"""A language model as a folder that transformers and vLLM load: config.json, tokenizer and safetensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.hub import ModelSource
from foretell.model.rope import Scaling
from foretell.model.tokenizer import load_tokenizer
from foretell.model.weights import hugging_face, table
from foretell.training.save import layer_fields, write

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def save_model(folder: Path, model: Decoder, source: ModelSource, dtype: torch.dtype) -> None:
    """Write a decoder and a tokenizer in Hugging Face's layout.

    Args:
        source: whose tokenizer it is.
        dtype: of the tensors.

    Raises:
        ValueError: see `check_plain`.
    """
    config = model.config
    check_plain(config)
    tensors: dict[str, Tensor] = {}
    for entry in table(config, hugging_face(config), config.tied):
        value = model.get_parameter(entry.parameter)
        sizes = [part.shape[entry.dim] for part in entry.sources]
        for part, piece in zip(entry.sources, torch.split(value, sizes, entry.dim), strict=True):
            tensors[part.name] = piece
    ends = list(config.eos_token_ids)
    more = {
        "model_type": "qwen2" if config.qkv_bias else "llama",
        "architectures": ["Qwen2ForCausalLM" if config.qkv_bias else "LlamaForCausalLM"],
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
    }
    write(folder, tensors, {**layer_fields(config, dtype), **more}, dtype)
    _write_tokenizer(source, folder)


def check_plain(config: ModelConfig) -> None:
    """That a model can be written: Llama's shape, with or without biases on queries, keys and values.

    Raises:
        ValueError: it has a part that neither Llama's nor Qwen2's plain config says, named.
    """
    rope = config.ropes[0]
    unsaid = {
        f"the {config.family} family's layers": config.family not in ("llama", "qwen2", "mistral"),
        "norms of queries and keys": config.qk_norm,
        "experts": bool(config.experts),
        "biases beyond queries, keys and values": config.mlp_bias or config.output_bias,
        "sliding windows": any(window is not None for window in config.windows),
        "scaled rotary positions": rope.scaling is not Scaling.NONE or bool(rope.divisors),
        "rotary settings of its own for some layers": len(config.ropes) > 1,
        "channels that are not rotated": rope.dim != config.head_dim,
    }
    found = [what for what, has in unsaid.items() if has]
    if found:
        raise ValueError(
            f"the model has {found[0]}, which is not written yet; Llama's and Qwen2's plain shapes are"
        )


def _write_tokenizer(source: ModelSource, folder: Path) -> None:
    if source.path.is_dir():
        for name in _TOKENIZER_FILES:
            if (source.path / name).exists():
                shutil.copy2(source.path / name, folder / name)
        return
    load_tokenizer(source).save_pretrained(str(folder))
