"""Checkpoints: every layout loads to the same model, and a fault is named before anything is loaded."""

from __future__ import annotations

import json

import pytest
import torch
from paged import Paged
from safetensors.torch import load_file, save_file

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.hub import resolve
from foretell.model.load import load_config, load_model, resolve_dtype
from foretell.ops.meta import RaggedRows


def load(folder, dtype="float32"):
    return load_model(resolve(str(folder)), dtype=dtype)


def logits(model):
    tokens = torch.arange(3, 23)
    return Paged(model).chunk(tokens, 0)


def edit(folder, change):
    """Rewrite model.safetensors after `change` has had its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_shards_are_the_same_model_as_one_file(save, tmp_path):
    theirs, folder = save("llama", shard="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    sharded = logits(load(folder))
    theirs.save_pretrained(tmp_path / "one")
    assert torch.equal(sharded, logits(load(tmp_path / "one")))


def test_a_pytorch_file_is_the_same_model(save):
    _, folder = save("qwen2")
    expected = logits(load(folder))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits(load(folder)), expected)


class Unpickled:
    """Something that is no tensor."""


def test_a_pytorch_file_with_code_in_it_is_refused(save):
    _, folder = save("llama")
    (folder / "model.safetensors").unlink()
    torch.save({"x": Unpickled()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as plain tensors"):
        load(folder)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-5), ("bfloat16", 0.15), ("float16", 0.02)]
)
def test_every_dtype_is_near_float32(save, dtype, tolerance):
    _, folder = save("llama")
    exact = logits(load(folder))
    near = logits(load(folder, dtype))
    assert near.dtype == getattr(torch, dtype)
    assert (near.to(exact.dtype) - exact).abs().max() < tolerance * exact.abs().max()


def test_gemma_norm_weights_are_not_rounded_after_the_one_is_added(save):
    _, folder = save("gemma", head_dim=8)
    edit(folder, lambda t: t["model.norm.weight"].fill_(2.0**-12))
    assert load(folder, "bfloat16").norm.weight[0] == 1 + 2.0**-12


def test_a_head_in_the_file_wins_over_tying(save):
    _, folder = save("llama", tie_word_embeddings=True)
    tied = load(folder)
    assert tied.head.weight.data_ptr() == tied.embedding.data_ptr()
    head = torch.randn(99, 32)
    edit(folder, lambda t: t.update({"lm_head.weight": head}))
    assert torch.equal(load(folder).head.weight, head)


def test_harmless_extras_are_passed_over(save):
    _, folder = save("llama")
    expected = logits(load(folder))
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "medusa_head.0.0.linear.weight": torch.ones(4, 4),
    }
    edit(folder, lambda t: t.update(extras))
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"missing: model\.layers\.1\.mlp\.up_proj",
        ),
        (
            lambda t: t.update({"model.layers.0.surprise": torch.ones(2)}),
            r"unknown: model\.layers\.0\.surprise",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(5)}),
            r"of another shape: model\.norm\.weight is \[5\], not \[32\]",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing: lm_head\.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            r"model\.norm\.weight is stored as torch\.int8",
        ),
    ],
    ids=["missing", "unknown", "mis-shaped", "no head", "integers"],
)
def test_a_tensor_that_does_not_fit_is_named(save, change, named):
    _, folder = save("llama")
    edit(folder, change)
    with pytest.raises(ValueError, match=named):
        load(folder)


def test_a_vocabulary_of_another_size_is_refused(save):
    _, folder = save("llama")
    edit_config(folder, vocab_size=100)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is \[99, 32\], not \[100, 32\]"):
        load(folder)


@pytest.mark.parametrize("bytes_left", [0, 1, 7, 8, 9, 100, "header", "middle", -1])
def test_a_file_cut_anywhere_is_refused(save, bytes_left):
    _, folder = save("llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    cut = {"header": header, "middle": (header + len(whole)) // 2}.get(bytes_left, bytes_left)
    path.write_bytes(whole[:cut])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("config.json", {"hidden_size": 0}, "config.json"),
        ("config.json", {"rope_theta": "x"}, "config.json: could not convert string to float: 'x'"),
        ("config.json", {"rope_theta": 0}, "rope_theta 0.0 must be above 0"),
        ("config.json", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0.0"),
        ("config.json", {"num_attention_heads": None}, "num_attention_heads"),
        (
            "generation_config.json",
            {"eos_token_id": "x"},
            "generation_config.json: invalid literal",
        ),
    ],
)
def test_a_wrong_value_in_a_config_is_refused_with_the_file(save, file, change, named):
    _, folder = save("llama")
    path = folder / file
    config = json.loads(path.read_text()) if path.exists() else {}
    if "rope_theta" in change or "rope_scaling" in change:
        config.pop("rope_parameters", None)
    path.write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=named):
        load_config(resolve(str(folder)))


def test_a_missing_shard_is_named(save):
    _, folder = save("llama", shard="8KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name):
        load(folder)


def test_a_directory_without_config_or_weights_is_refused(save, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        load(tmp_path / "empty")
    _, folder = save("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"there is no model\.safetensors"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load(folder)


def test_a_model_that_does_not_generate_text_is_refused(save):
    _, folder = save("llama")
    edit_config(folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ValueError, match="LlamaForSequenceClassification"):
        load(folder)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="got 'int4'"):
        resolve_dtype("int4", None, torch.device("cpu"))


def test_auto_follows_the_checkpoint_on_a_gpu():
    gpu = torch.device("cuda")
    assert resolve_dtype("auto", "float16", gpu) == torch.float16
    assert resolve_dtype("auto", "float32", gpu) == torch.bfloat16
    assert resolve_dtype("auto", None, gpu) == torch.bfloat16


def tiny(**settings):
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "layers": 2}
    return ModelConfig(**shape, heads=4, kv_heads=2, head_dim=8, **settings)


def test_random_models_depend_on_the_seed_alone():
    first, again, other = (Decoder.random(tiny(), seed) for seed in (3, 3, 4))
    assert torch.equal(logits(first), logits(again))
    assert not torch.equal(logits(first), logits(other))


def test_padding_embeds_like_token_zero():
    model = Decoder.random(tiny())
    padded, zero = torch.tensor([4, -1, 5]), torch.tensor([4, 0, 5])
    assert torch.equal(Paged(model).chunk(padded, 0), Paged(model).chunk(zero, 0))


def test_taps_are_the_residual_stream_and_the_final_hidden_state():
    model, tokens = Decoder.random(tiny(), dtype=torch.float64), torch.arange(6)
    paged = Paged(model)
    rows = torch.arange(6)
    meta = RaggedRows(
        rows, paged.slots(rows[None])[0], paged.blocks, rows[:1], torch.tensor([0, 6]), ((0, 6),)
    )
    hidden, none = model(tokens, meta, paged.kv)
    assert none is None
    _, features = model(tokens, meta, paged.kv, (2, 0, -1))
    last, first, final = features.split(32, dim=-1)
    assert features.shape[-1] == model.feature_width((2, 0, -1)) == 96
    assert torch.equal(final, hidden)
    assert torch.equal(first, model.embedding[tokens])
    assert torch.equal(model.norm(last), hidden)
