"""EAGLE files: decisions that are taken are told, and what does not fit is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import checkpoints as files
import pytest
import torch
from lab import tiny_decoder
from torch import Tensor

from foretell.model.rope import inverse_frequencies
from foretell.spec.checkpoint.eagle import EagleReading, read_eagle
from foretell.spec.checkpoint.eagle3 import LayerIds, Overrides, read_eagle3
from foretell.spec.checkpoint.source import open_checkpoint

TARGET = tiny_decoder(0, layers=12, vocabulary=files.V)
Json = dict[str, object]


def first(
    folder: Path, tensors: dict[str, Tensor], config: Json, file: str = "pytorch_model.bin"
) -> EagleReading:
    return read_eagle(open_checkpoint(files.write(folder, tensors, config, file)), TARGET)


def third(
    folder: Path,
    tensors: dict[str, Tensor],
    config: Json,
    overrides: Overrides | None = None,
    layers: int = 12,
) -> EagleReading:
    checkpoint = open_checkpoint(files.write(folder, tensors, config, "model.safetensors"))
    target = TARGET if layers == 12 else tiny_decoder(0, layers=layers, vocabulary=files.V)
    return read_eagle3(checkpoint, target, overrides)


def told(reading: EagleReading, *words: str) -> bool:
    return any(all(word in note for word in words) for note in reading.notes)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_both_kinds_of_files_are_read_and_decisions_told(tmp_path: Path, file: str) -> None:
    half = {name: tensor.half() for name, tensor in files.eagle1(embedding=False).items()}
    reading = first(tmp_path / "d", half, files.llama_config(), file)
    assert reading.taps == (-1,)
    assert told(reading, "embed_tokens", "target")
    assert told(reading, "lm_head", "target")
    assert told(reading, "rotary base 10000", "own config")
    assert told(reading, "nothing of the bias", "has one")


def test_a_promised_bias_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bias=true.*fc\.bias"):
        first(tmp_path / "d", files.eagle1(bias=False), files.llama_config(bias=True))
    with pytest.raises(ValueError, match=r"qkv_bias=true.*q_proj\.bias"):
        first(tmp_path / "e", files.eagle1(), files.llama_config(qkv_bias=True))


@pytest.mark.parametrize("name", sorted(files.eagle1(embedding=False, bias=False)))
def test_every_missing_eagle1_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    tensors = {n: t for n, t in files.eagle1().items() if n != name}
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        first(tmp_path / "d", tensors, files.llama_config())


@pytest.mark.parametrize(
    "name", sorted(n for n in files.eagle3() if n not in ("t2d", "lm_head.weight"))
)
def test_every_missing_eagle3_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    tensors = {n: t for n, t in files.eagle3().items() if n != name}
    shown = name.replace("midlayer.", "layers.0.").replace(".", r"\.")
    with pytest.raises(ValueError, match=shown):
        third(tmp_path / "d", tensors, files.eagle3_config())


@pytest.mark.parametrize(
    "extra", ["norm.weight", "layers.0.input_layernorm.weight", "hidden_norm.weight"]
)
def test_a_tensor_that_eagle1_has_not_is_refused_by_name(tmp_path: Path, extra: str) -> None:
    tensors = files.eagle1() | {extra: files.norm_weight(files.H)}
    with pytest.raises(ValueError, match=f"unknown tensor '{extra}'"):
        first(tmp_path / "d", tensors, files.llama_config())


def test_nan_and_wrong_shapes_are_refused_by_name(tmp_path: Path) -> None:
    tensors = files.eagle3()
    tensors["midlayer.mlp.up_proj.weight"][1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"midlayer\.mlp\.up_proj\.weight.*NaN"):
        third(tmp_path / "d", tensors, files.eagle3_config())
    tensors = files.eagle3() | {"norm.weight": torch.ones(31)}
    with pytest.raises(ValueError, match=r"norm\.weight.*\[31\].*\[32\]"):
        third(tmp_path / "e", tensors, files.eagle3_config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden size 64 .* hidden size 32"),
        ({"vocab_size": 101}, "vocab_size=101, the target has 96"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2, the tensors have 1"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"num_attention_heads": 3}, "q_proj|num_attention_heads"),
        ({"rope_scaling": {"type": "magic", "factor": 2.0}}, "magic"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, change: Json, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        first(tmp_path / "d", files.eagle1(), files.llama_config() | change)
    with pytest.raises(ValueError, match=message):
        third(tmp_path / "e", files.eagle3(), files.eagle3_config() | change)


@pytest.mark.parametrize(
    ("config", "overrides", "taps", "word"),
    [
        ({}, None, (2, 6, 9), "default"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}},
            None,
            (2, 6, 9),
            "output",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, None, (2, 6, 9), "output"),
        (
            {"eagle_aux_hidden_state_layer_ids": [9, 2, 6]},
            Overrides(layer_ids=LayerIds.AFTER),
            (2, 6, 9),
            "after",
        ),
        ({}, Overrides(layers=(3, 4, 12)), (3, 4, 12), "user"),
        ({}, Overrides(layers=(3, 4, 11), layer_ids=LayerIds.OUTPUT), (4, 5, 12), "output"),
    ],
)
def test_target_layers_are_read_in_their_convention_and_told(
    tmp_path: Path, config: Json, overrides: Overrides | None, taps: tuple[int, ...], word: str
) -> None:
    reading = third(tmp_path / "d", files.eagle3(), files.eagle3_config(**config), overrides)
    assert reading.taps == taps
    assert told(reading, "target layers", word)


def test_speculators_lists_count_finished_layers(tmp_path: Path) -> None:
    config = files.speculators_config(eagle_aux_hidden_state_layer_ids=[2, 6, 9])
    reading = third(tmp_path / "d", files.eagle3(first="layers.0."), config)
    assert reading.taps == (2, 6, 9)
    assert told(reading, "after")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 5, 12], "12 layers"),
        ([1, 1, 8], "different"),
        ([1, 5], "joins 3"),
        ([-2, 5, 8], "12 layers"),
    ],
)
def test_layers_that_do_not_exist_are_refused(tmp_path: Path, ids: list[int], message: str) -> None:
    config = files.eagle3_config(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    with pytest.raises(ValueError, match=message):
        third(tmp_path / "d", files.eagle3(), config)


@pytest.mark.parametrize("layers", [4, 5, 6])
def test_a_target_too_shallow_for_three_layers_is_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(ValueError, match=f"target's {layers} layers"):
        third(tmp_path / "d", files.eagle3(), files.eagle3_config(), layers=layers)


def test_offsets_become_target_ids(tmp_path: Path) -> None:
    reading = third(tmp_path / "d", files.eagle3(), files.eagle3_config())
    ids = reading.vocabulary.to_target(torch.arange(40))
    assert ids.tolist() == files.draft_tokens(40).tolist()
    assert reading.vocabulary.noise_ids.tolist() == ids.tolist()


def test_bad_maps_are_refused(tmp_path: Path) -> None:
    good = files.eagle3()
    for name, tensors in {
        "beyond": good | {"d2t": good["d2t"] + 60},
        "absolute": good | {"d2t": files.draft_tokens(40)},
        "doubled": good | {"d2t": -torch.arange(40)},
        "disagree": good | {"t2d": good["t2d"].roll(1)},
        "float": good | {"d2t": good["d2t"].double()},
    }.items():
        with pytest.raises(ValueError, match="d2t"):
            third(tmp_path / name, tensors, files.eagle3_config())


def test_a_reduced_vocabulary_needs_its_map_and_its_head(tmp_path: Path) -> None:
    no_map = {n: t for n, t in files.eagle3().items() if n not in ("d2t", "t2d")}
    with pytest.raises(ValueError, match="'d2t' is missing"):
        third(tmp_path / "d", no_map, files.eagle3_config())
    no_head = {n: t for n, t in files.eagle3().items() if n != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is missing"):
        third(tmp_path / "e", no_head, files.eagle3_config())
    with pytest.raises(ValueError, match="draft_vocab_size=41"):
        third(tmp_path / "f", files.eagle3(), files.eagle3_config(draft_vocab_size=41))


def test_a_tied_flag_does_not_widen_a_reduced_head(tmp_path: Path) -> None:
    reading = third(tmp_path / "d", files.eagle3(), files.eagle3_config(tie_word_embeddings=True))
    assert reading.net.parts.own_head == 40


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"norm_before_fc": True}, "input_norm"),
        ({"fc_norm": True}, "fc_norm"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"num_aux_hidden_states": 2}, "2 features"),
    ],
)
def test_flags_that_contradict_the_tensors_are_refused(
    tmp_path: Path, config: Json, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        third(tmp_path / "d", files.eagle3(), files.eagle3_config(**config))


def test_a_norm_the_config_forgets_is_used_and_told(tmp_path: Path) -> None:
    reading = third(tmp_path / "d", files.eagle3(norm_before_fc=True), files.eagle3_config())
    assert told(reading, "norm_before_fc", "using it")


def test_rope_is_the_drafts_own(tmp_path: Path) -> None:
    """Old and new layout give one rope; the default base is 10000 whatever the target has."""
    old = third(
        tmp_path / "a", files.eagle3(), files.eagle3_config(rope_theta=1e6)
    ).net.parts.layer.ropes
    new = third(
        tmp_path / "b",
        files.eagle3(),
        files.eagle3_config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    ).net.parts.layer.ropes
    assert old == new
    assert (
        third(tmp_path / "c", files.eagle3(), files.eagle3_config()).net.parts.layer.ropes[0].base
        == 10000.0
    )


def test_draft_and_target_turn_at_their_own_speeds(tmp_path: Path) -> None:
    """Head size 16: second inverse frequency 0.3162 at base 1e4, 0.1778 at 1e6; linear scaling is the draft's alone."""
    target = replace(TARGET.config.ropes[0], dim=16, base=1e6)
    config = files.eagle3_config(rope_scaling={"rope_type": "linear", "factor": 4.0})
    scaled = replace(third(tmp_path / "a", files.eagle3(), config).net.parts.layer.ropes[0], dim=16)
    plain = replace(
        third(tmp_path / "b", files.eagle3(), files.eagle3_config()).net.parts.layer.ropes[0],
        dim=16,
    )
    second = [
        float(inverse_frequencies(rope, torch.device("cpu"))[1]) for rope in (target, plain, scaled)
    ]
    assert second == pytest.approx([0.1778, 0.3162, 0.3162 / 4], abs=1e-4)


def test_a_wrong_head_dim_in_the_config_is_corrected_and_told(tmp_path: Path) -> None:
    reading = first(tmp_path / "d", files.eagle1(), files.llama_config(head_dim=16))
    assert reading.net.parts.layer.head_dim == 8
    assert told(reading, "head_dim=16", "using 8")


def test_names_that_mean_the_same_are_refused(tmp_path: Path) -> None:
    tensors = files.eagle3() | {"layers.0.hidden_norm.weight": torch.ones(files.H)}
    with pytest.raises(ValueError, match=r"midlayer\.hidden_norm\.weight.*mean the same"):
        third(tmp_path / "d", tensors, files.eagle3_config())
