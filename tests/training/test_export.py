"""What is written: names, shapes and configs against the formats, and every export read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import tiny_decoder
from pretend_hub import text_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretell.model.hub import Kind, ModelSource
from foretell.model.load import load_model
from foretell.model.rope import Rope, Scaling
from foretell.model.tokenizer import load_tokenizer
from foretell.spec.checkpoint.source import open_checkpoint
from foretell.training import model_folder
from foretell.training.capture import Capture
from foretell.training.dense import DENSE, packed_rows, run_target
from foretell.training.draft import DistilSettings, DraftRecipe, student_of
from foretell.training.eagle import head_layer, new_eagle3
from foretell.training.export import Format, export
from foretell.training.medusa import MedusaSettings, new_heads
from foretell.training.model_folder import save_model
from foretell.training.save import DraftCard, save_eagle3, save_medusa

TARGET = tiny_decoder(3, layers=8)
H, V, VD = 32, 96, 20
IDS = torch.arange(1, 2 * VD, 2)


def eagle3(folder: Path) -> Path:
    net = new_eagle3(TARGET, IDS, head_layer(TARGET.config), 3, seed=2)
    save_eagle3(folder, net, IDS, DraftCard("tiny", taps=(2, 4, 5), dtype=torch.float64))
    return folder


def medusa(folder: Path) -> Path:
    heads = new_heads(TARGET, MedusaSettings(heads=3, layers=2))
    with torch.no_grad():
        heads.weight.normal_()
    save_medusa(folder, heads, DraftCard("tiny", dtype=torch.float64))
    return folder


def test_an_eagle3_head_has_the_names_shapes_and_config_of_the_speculators_format(
    tmp_path: Path,
) -> None:
    found = open_checkpoint(eagle3(tmp_path / "head"))
    layer = "layers.0."
    assert dict(found.shapes) == {
        "fc.weight": (H, 3 * H),
        f"{layer}input_layernorm.weight": (H,),
        f"{layer}hidden_norm.weight": (H,),
        f"{layer}self_attn.q_proj.weight": (32, 2 * H),
        f"{layer}self_attn.k_proj.weight": (16, 2 * H),
        f"{layer}self_attn.v_proj.weight": (16, 2 * H),
        f"{layer}self_attn.o_proj.weight": (H, 32),
        f"{layer}post_attention_layernorm.weight": (H,),
        f"{layer}mlp.gate_proj.weight": (64, H),
        f"{layer}mlp.up_proj.weight": (64, H),
        f"{layer}mlp.down_proj.weight": (H, 64),
        "norm.weight": (H,),
        "lm_head.weight": (VD, H),
        "d2t": (VD,),
        "t2d": (V,),
    }
    assert torch.equal(found.read("d2t") + torch.arange(VD), IDS)
    assert found.read("t2d").dtype is torch.bool
    assert found.read("t2d").nonzero().flatten().tolist() == IDS.tolist()
    config = found.config
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is False
    assert config["transformer_layer_config"]["rope_theta"] == 10000.0
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 5


def test_sglang_gets_its_own_names_and_layer_numbers(tmp_path: Path) -> None:
    export(eagle3(tmp_path / "head"), TARGET, Format.EAGLE3_SGLANG, tmp_path / "out", "tiny")
    found = open_checkpoint(tmp_path / "out")
    assert "midlayer.self_attn.q_proj.weight" in found.shapes
    assert not any(name.startswith("layers.") for name in found.shapes)
    ids = found.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [1, 3, 4]
    assert found.config["architectures"] == ["LlamaForCausalLMEagle3"]
    export(tmp_path / "out", TARGET, Format.SPECULATORS, tmp_path / "back", "tiny")
    again, first = open_checkpoint(tmp_path / "back"), open_checkpoint(tmp_path / "head")
    assert again.shapes == first.shapes
    assert all(torch.equal(again.read(name), first.read(name)) for name in first.shapes)


def test_vllm_gets_medusa_heads_with_the_targets_output_layer(tmp_path: Path) -> None:
    export(medusa(tmp_path / "head"), TARGET, Format.VLLM_MEDUSA, tmp_path / "out", "tiny")
    found = open_checkpoint(tmp_path / "out")
    assert found.shapes["blocks.2.layers.1.weight"] == (H, H)
    assert found.shapes["lm_heads.0.weight"] == (V, H)
    assert "lm_heads.1.weight" not in found.shapes
    assert found.config["original_lm_head"] is True
    assert found.config["medusa_fc_bias"] is True
    assert torch.equal(found.read("lm_heads.0.weight"), TARGET.head.weight)


def test_medusa_comes_back_from_its_authors_names(tmp_path: Path) -> None:
    export(medusa(tmp_path / "head"), TARGET, Format.MEDUSA, tmp_path / "out", "tiny")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)


@pytest.mark.parametrize("wanted", [Format.MEDUSA, Format.VLLM_MEDUSA])
def test_a_format_of_another_family_is_refused_with_those_that_fit(
    wanted: Format, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="Formats for it: speculators, eagle3-sglang"):
        export(eagle3(tmp_path / "head"), TARGET, wanted, tmp_path / "out", "tiny")
    assert not (tmp_path / "out").exists()


def test_a_model_becomes_a_folder_that_transformers_runs_to_the_same_logits(
    tmp_path: Path,
) -> None:
    source = ModelSource(text_model(tmp_path / "tiny", layers=2), Kind.DIRECTORY, "tiny")
    model = load_model(source, dtype="float64", ops=DENSE)
    export(source.path, model, Format.HUGGING_FACE, tmp_path / "out", "tiny")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    ids = torch.randint(3, 259, (1, 12))
    rows = packed_rows(torch.arange(12)[None], torch.zeros_like(ids))
    hidden, _ = run_target(model, ids, rows, ())
    torch.testing.assert_close(model.logits(hidden[0]), theirs(ids).logits[0], rtol=1e-6, atol=1e-6)
    ours, again = load_tokenizer(source), AutoTokenizer.from_pretrained(tmp_path / "out")
    text = ours.apply_chat_template([{"role": "user", "content": "né 12"}], tokenize=False)
    assert again.apply_chat_template([{"role": "user", "content": "né 12"}], tokenize=False) == text
    assert again.encode(text) == ours.encode(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"windows": (None, 16)}, "sliding windows"),
        ({"family": "gemma2"}, "the gemma2 family's layers"),
        ({"ropes": (Rope(dim=8, scaling=Scaling.LINEAR, factor=2.0),)}, "scaled rotary positions"),
        ({"ropes": (Rope(dim=4),)}, "channels that are not rotated"),
    ],
)
def test_a_model_whose_shape_could_not_be_said_is_refused_before_it_is_written(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    target = tiny_decoder(3)
    target.config = replace(target.config, **change)
    source = ModelSource(tmp_path, Kind.DIRECTORY, "tiny")
    with pytest.raises(ValueError, match=said):
        save_model(tmp_path / "out", target, source, torch.float64)
    assert not (tmp_path / "out").exists()


def test_a_distilled_model_loads_as_a_model_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "_write_tokenizer", lambda source, folder: None)
    target = tiny_decoder(3, layers=8)
    target.ops = DENSE
    source = ModelSource(tmp_path, Kind.DIRECTORY, "tiny")
    student = student_of(target, source, DistilSettings(layers=2))
    recipe = DraftRecipe(
        student, target, Capture(target, ()), DistilSettings(layers=2), source, torch.float64
    )
    recipe.save(tmp_path / "student")
    found = ModelSource(tmp_path / "student", Kind.DIRECTORY, "student")
    loaded = load_model(found, dtype="float64")
    assert loaded.config.layers == 2
    for name, parameter in student.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert torch.equal(
        loaded.get_parameter("layers.1.attention.qkv.weight"),
        target.get_parameter("layers.7.attention.qkv.weight"),
    )
