"""GGUF files: every quantisation is the gguf library's, every family is the model it was converted from."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from paged import Paged
from safetensors.torch import load_file

from foretell.model.gguf import SUPPORTED, GgufFile
from foretell.model.hub import resolve
from foretell.model.load import load_config, load_model
from foretell.model.rope import Rope, inverse_frequencies

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"gemma3_text": "gemma3", "mixtral": "llama"}


def convert(folder, path, fields=(), edit=lambda writer: None):
    """Write a tiny Hugging Face directory as a GGUF file, as llama.cpp's converter would."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    name = ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_eos_token_id(2)
    for key, value in fields:
        getattr(writer, key)(value)
    edit(writer)
    for tensor, value in tensors(config, load_file(folder / "model.safetensors")).items():
        writer.add_tensor(tensor, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(config, stored):
    """GGUF names and layouts."""
    family, out, experts = config["model_type"], {}, {}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, value in stored.items():
        base, leaf = name.rsplit(".", 1)
        layer, part = "", base
        if base.startswith("model.layers."):
            _, _, index, part = base.split(".", 3)
            layer = f"blk.{index}."
        if ".experts." in part:
            _, _, expert, w = part.split(".")
            kind = {"w1": "gate", "w2": "down", "w3": "up"}[w]
            experts.setdefault(f"{layer}ffn_{kind}_exps.weight", {})[int(expert)] = value
            continue
        if part == "post_attention_layernorm":
            theirs = "post_attention_norm" if family in ("gemma2", "gemma3_text") else "ffn_norm"
        else:
            theirs = NAMES[part]
        if family.startswith("gemma") and "norm" in theirs:
            value = value + 1
        if family in ("llama", "mixtral") and theirs in ("attn_q", "attn_k"):
            n = heads if theirs == "attn_q" else kv_heads
            value = value.view(n, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        out[f"{layer}{theirs}.{leaf}"] = value.contiguous()
    for name, parts in experts.items():
        out[name] = torch.stack([parts[i] for i in range(len(parts))])
    return out


def logits(source):
    model = load_model(resolve(str(source)), dtype="float32")
    return Paged(model).chunk(torch.arange(3, 33), 0)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


def yarn(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def linear(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


@pytest.mark.parametrize(
    ("family", "settings", "fields", "edit"),
    [
        ("llama", {}, (), lambda w: None),
        ("llama", {"tie_word_embeddings": True}, (), lambda w: None),
        ("llama", {"attention_bias": True}, (), lambda w: None),
        ("llama", {"rope_parameters": LINEAR}, (), linear),
        ("qwen2", {"rope_parameters": YARN}, (), yarn),
        (
            "mixtral",
            {"num_local_experts": 3},
            (("add_expert_count", 3), ("add_expert_used_count", 2)),
            lambda w: None,
        ),
        ("qwen3", {"head_dim": 16}, (), lambda w: None),
        ("gemma", {"head_dim": 16}, (), lambda w: None),
        (
            "gemma2",
            {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
            (
                ("add_sliding_window", 8),
                ("add_attn_logit_softcapping", 50.0),
                ("add_final_logit_softcapping", 30.0),
            ),
            lambda w: None,
        ),
        (
            "gemma3_text",
            {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
            (("add_sliding_window", 8),),
            lambda w: None,
        ),
        ("phi3", {"sliding_window": 8}, (("add_sliding_window", 8),), lambda w: None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gguf_file_is_the_model_it_was_converted_from(save, family, settings, fields, edit):
    _, folder = save(family, **settings)
    path = convert(folder, folder / "model.gguf", fields, edit)
    torch.testing.assert_close(logits(path), logits(folder), atol=1e-5, rtol=1e-5)


def test_frequency_factors_divide_the_frequencies(save):
    """Llama 3.1's scaling travels as a tensor."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    _, folder = save("llama", rope_parameters=rope)
    cpu = torch.device("cpu")
    scaled = inverse_frequencies(load_config(resolve(str(folder))).ropes[0], cpu)
    factors = (inverse_frequencies(Rope(dim=8), cpu) / scaled).numpy()
    path = convert(
        folder, folder / "model.gguf", edit=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    torch.testing.assert_close(logits(path), logits(folder), atol=1e-5, rtol=1e-5)


def write_tensor(path, raw, kind):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_quantisation_is_made_dense_as_the_gguf_library_does(tmp_path, name):
    """Blocks of random bytes: every bit pattern means the same to both, NaN scales included."""
    kind = gguf.GGMLQuantizationType[name]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.randint(0, 256, (5, 512 // elements * nbytes), dtype=np.uint8)
    write_tensor(tmp_path / "x.gguf", raw, kind)
    file = GgufFile(tmp_path / "x.gguf")
    assert file.shapes() == {"x": (5, 512)}
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, kind).copy())
        ours = file.read("x", torch.float32)
    torch.testing.assert_close(ours, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_a_quantised_tensor_is_near_what_was_quantised(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.standard_normal((3, 256)).astype(np.float32)
    write_tensor(tmp_path / "x.gguf", gguf.quantize(values, kind), kind)
    ours = GgufFile(tmp_path / "x.gguf").read("x", torch.float32)
    assert (ours - torch.from_numpy(values)).abs().max() < 0.3
    assert ours.std() > 0.9


def test_tensors_larger_than_a_piece_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("foretell.model.gguf._CHUNK", 64)
    values = np.random.standard_normal((5, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quantize(values, kind)
    write_tensor(tmp_path / "x.gguf", raw, kind)
    ours = GgufFile(tmp_path / "x.gguf").read("x", torch.float64)
    assert torch.equal(ours, torch.from_numpy(gguf.dequantize(raw, kind)).double())


def test_a_gguf_file_cut_short_is_refused_wherever_it_ends(save):
    _, folder = save("llama")
    whole = convert(folder, folder / "model.gguf").read_bytes()
    cut = folder / "cut.gguf"
    for size in (4, 20, 100, 400, len(whole) // 2, len(whole) - 200):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf: .*cut short"):
            load_model(resolve(str(cut)))


def test_files_that_are_not_what_they_should_be_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match="not a GGUF file"):
        GgufFile(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a GGUF file"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(ValueError, match="version 50331648 is not supported"):
        GgufFile(path)
    raw = np.zeros((1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.IQ2_XXS][1]), dtype=np.uint8)
    write_tensor(path, raw, gguf.GGMLQuantizationType.IQ2_XXS)
    with pytest.raises(ValueError, match="tensor x is quantised as IQ2_XXS"):
        GgufFile(path)


def test_an_unknown_architecture_or_a_missing_key_is_named(tmp_path):
    for name, named in (
        ("mamba", "architecture 'mamba'"),
        ("llama", r"token_embd\.weight is missing"),
    ):
        path = tmp_path / f"{name}.gguf"
        writer = gguf.GGUFWriter(path, name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ValueError, match=named):
            load_config(resolve(str(path)))


def test_control_tokens_that_end_a_turn_are_end_tokens(save):
    _, folder = save("llama")
    texts = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|eot_id|>", *(f"t{i}" for i in range(94))]
    types = [2, 3, 3, 3, 1, *[1] * 94]

    def vocabulary(writer):
        writer.add_token_list(texts)
        writer.add_token_types(types)

    path = convert(folder, folder / "model.gguf", edit=vocabulary)
    assert load_config(resolve(str(path))).eos_token_ids == (2, 3)
