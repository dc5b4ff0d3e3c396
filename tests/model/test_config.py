"""Configs: both layouts of the rope settings mean the same, and what is not supported is refused by name."""

from __future__ import annotations

import pytest
import torch
from paged import Paged
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foretell.model.config import ModelConfig
from foretell.model.hub import resolve
from foretell.model.load import load_config, load_model
from foretell.model.rope import Rope, Scaling, inverse_frequencies, rotation

PLAIN = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def read(**settings):
    return ModelConfig.from_hf({**PLAIN, **settings})


def test_missing_fields_take_the_family_defaults():
    config = read()
    assert (config.kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    assert config.ropes == (Rope(dim=16, base=10000.0, factor=1.0, trained_length=128),)
    assert not config.tied
    gemma = read(model_type="gemma")
    assert (gemma.tied, gemma.head_dim, gemma.embedding_scale) == (True, 256, 8.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                },
            },
        ),
    ],
)
def test_old_and_new_layout_of_rope_settings_are_equal(old, new):
    assert read(**old) == read(**new)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 128),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 512),
        (
            {
                "max_position_embeddings": 512,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
            512,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            128,
        ),
        (
            {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            128,
        ),
    ],
)
def test_the_longest_text_is_what_the_scaling_stretches_to(settings, longest):
    assert read(**settings).max_position == longest


def test_each_model_keeps_its_own_rope_base():
    """A draft without rope settings has base 10000, whatever its target has."""
    draft, target = read(hidden_size=64), read(hidden_size=64, rope_theta=1e6)
    device = torch.device("cpu")
    second = [float(inverse_frequencies(c.ropes[0], device)[1]) for c in (draft, target)]
    assert second == pytest.approx([10000 ** (-1 / 8), 1e6 ** (-1 / 8)])
    assert second == pytest.approx([0.3162, 0.1778], abs=1e-4)


def test_linear_scaling_by_four_is_a_quarter_of_the_angle():
    plain, scaled = Rope(dim=8), Rope(dim=8, scaling=Scaling.LINEAR, factor=4.0)
    device, positions = torch.device("cpu"), torch.arange(0, 40, 4)
    a = rotation(plain, inverse_frequencies(plain, device), positions // 4, torch.float64)
    b = rotation(scaled, inverse_frequencies(scaled, device), positions, torch.float64)
    torch.testing.assert_close(a.cos, b.cos, atol=1e-6, rtol=0)
    torch.testing.assert_close(a.sin, b.sin, atol=1e-6, rtol=0)


def test_layers_take_their_window_from_the_pattern():
    assert read(model_type="mistral", sliding_window=8).windows == (8,) * 4
    assert read(model_type="mistral").windows == (4096,) * 4
    assert read(model_type="gemma2", sliding_window=8).windows == (8, None, 8, None)
    gemma3 = read(model_type="gemma3_text", sliding_window=8, sliding_window_pattern=3)
    assert gemma3.windows == (8, 8, None, 8)
    assert gemma3.layer_ropes == (1, 1, 0, 1)
    qwen = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3}
    assert read(**qwen).windows == (None,) * 4
    assert read(**qwen, use_sliding_window=True).windows == (None, None, None, 8)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": None}, "model_type None"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type 'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "long_factor|short_factor",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"num_key_value_heads": 3}, "kv_heads"),
    ],
)
def test_an_unsupported_setting_is_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=named):
        read(**settings)


def test_end_tokens_of_the_generation_config_count_too(save):
    _, folder = save("llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_config(resolve(str(folder))).eos_token_ids == (2, 7, 9)


def test_dynamic_rope_turns_each_row_by_its_own_position():
    """Beyond the trained length as transformers does for one token at a time: the chunking does not matter."""
    settings = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    theirs = LlamaConfig(**{**PLAIN, "max_position_embeddings": 16}, rope_parameters=settings)
    rope = read(max_position_embeddings=16, rope_parameters=settings).ropes[0]
    positions = torch.tensor([0, 9, 15, 16, 39, 1000])
    turned = rotation(
        rope, inverse_frequencies(rope, torch.device("cpu")), positions, torch.float32
    )
    for row, position in enumerate(positions.tolist()):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=position + 1)
        angles = position * frequencies
        torch.testing.assert_close(
            turned.cos[row, 0], torch.cat((angles, angles)).cos(), atol=1e-3, rtol=0
        )
        torch.testing.assert_close(
            turned.sin[row, 0], torch.cat((-angles, angles)).sin(), atol=1e-3, rtol=0
        )


@pytest.mark.parametrize(("length", "longest"), [(12, 16), (40, None)], ids=["short", "long"])
def test_longrope_takes_the_factors_of_the_length_served(save, length, longest):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    }
    theirs, folder = save("phi3", original_max_position_embeddings=16, rope_parameters=rope)
    model = load_model(resolve(str(folder)), dtype="float32", max_model_len=longest)
    tokens = torch.randint(0, 99, (length,))
    with torch.inference_mode():
        expected = theirs(tokens.unsqueeze(0)).logits[0]
    torch.testing.assert_close(Paged(model).chunk(tokens, 0), expected, atol=1e-4, rtol=1e-5)
