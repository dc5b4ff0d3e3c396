"""Tiny random models of every family, saved by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_model(family: str, **settings: object) -> PreTrainedModel:
    """A random transformers model in float32, noisy enough that every weight matters."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**TINY, **settings}, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, Path]]:
    """save(family, **settings): the model and the directory it was saved to."""

    def make(family: str, shard: str = "5GB", **settings: object) -> tuple[PreTrainedModel, Path]:
        model = tiny_model(family, **settings)
        model.save_pretrained(tmp_path, max_shard_size=shard)
        return model, tmp_path

    return make
