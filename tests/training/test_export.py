"""What is written: names, shapes and configs against the formats, and every export read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lab import tiny_decoder

from foretell.model.hub import Kind, ModelSource
from foretell.model.load import load_model
from foretell.spec.checkpoint.source import open_checkpoint
from foretell.training import draft
from foretell.training.capture import Capture
from foretell.training.dense import DENSE
from foretell.training.draft import DistilSettings, DraftRecipe, student_of
from foretell.training.eagle import head_layer, new_eagle3
from foretell.training.export import Format, export
from foretell.training.medusa import MedusaSettings, new_heads
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


def test_a_distilled_model_loads_as_a_model_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "_write_tokenizer", lambda source, folder: None)
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
