"""Medusa files in every layout: what they give, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoints as files
import equations
import pytest
import torch
from lab import tiny_decoder
from torch import Tensor

from foretell.spec.checkpoint.medusa import MedusaReading, read_medusa
from foretell.spec.checkpoint.source import open_checkpoint

TARGET = tiny_decoder(0, vocabulary=files.V)
FEATURE = files.noise(3, files.H, seed=9) * 4


def read(folder: Path) -> MedusaReading:
    return read_medusa(open_checkpoint(folder), TARGET)


def logits(reading: MedusaReading) -> Tensor:
    return reading.net.logits(FEATURE, reading.net.heads, TARGET)


def expected(tensors: dict[str, Tensor], heads: int, layers: int = 1) -> Tensor:
    outs = []
    for head in range(heads):
        state = equations.medusa(FEATURE, tensors, head, layers)
        outs.append(state @ tensors[f"{head}.{layers}.weight"].T)
    return torch.stack(outs, 1)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("layers", [1, 2])
def test_published_heads_give_their_logits(tmp_path: Path, file: str, layers: int) -> None:
    tensors = files.medusa(layers=layers)
    reading = read(files.write(tmp_path / "m", tensors, None, file))
    assert (reading.net.heads, reading.net.weight.shape[1]) == (5, layers)
    assert (logits(reading) - expected(tensors, 5, layers)).abs().max() < 1e-9


def test_half_precision_heads_are_read_in_the_targets_dtype(tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in files.medusa().items()}
    reading = read(files.write(tmp_path / "m", tensors, None, "medusa_lm_head.pt"))
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    assert (logits(reading) - expected(wide, 5)).abs().max() < 1e-9


def test_heads_are_counted_from_tensors_and_a_lying_config_is_reported(tmp_path: Path) -> None:
    folder = files.write(
        tmp_path / "m", files.medusa(), files.medusa_config(heads=2), "medusa_lm_head.pt"
    )
    reading = read(folder)
    assert reading.net.heads == 5
    assert any("medusa_num_heads=2" in note and "using 5" in note for note in reading.notes)


def test_a_config_with_layers_but_without_heads_is_refused_with_the_number(tmp_path: Path) -> None:
    config = files.medusa_config()
    del config["medusa_num_heads"]
    folder = files.write(tmp_path / "m", files.medusa(heads=4), config, "medusa_lm_head.pt")
    with pytest.raises(ValueError, match='"medusa_num_heads": 4'):
        read(folder)


def test_heads_without_output_layers_use_the_targets_one(tmp_path: Path) -> None:
    tensors = files.medusa(output=False)
    reading = read(files.write(tmp_path / "m", tensors, None, "medusa_lm_head.pt"))
    assert reading.net.output is None, "one copy in memory"
    states = torch.stack([equations.medusa(FEATURE, tensors, i, 1) for i in range(5)], 1)
    assert (logits(reading) - TARGET.logits(states)).abs().max() < 1e-9


def test_a_prefix_changes_nothing(tmp_path: Path) -> None:
    plain = read(files.write(tmp_path / "a", files.medusa(), None, "medusa_lm_head.pt"))
    prefixed = files.medusa(prefix="medusa_head.")
    other = read(files.write(tmp_path / "c", prefixed, files.medusa_config(), "model.safetensors"))
    assert torch.equal(logits(plain), logits(other))


def test_a_full_model_gives_its_heads_alone(tmp_path: Path) -> None:
    base = {
        "model.embed_tokens.weight": files.noise(files.V, files.H),
        "lm_head.weight": files.noise(files.V, files.H),
    }
    base |= files.llama_layer("model.layers.0.", first=False)
    tensors = base | files.medusa(heads=3, prefix="medusa_head.")
    config = files.llama_config(2, medusa_num_heads=3, medusa_num_layers=1)
    reading = read(files.write(tmp_path / "m", tensors, config, "model.safetensors"))
    assert (logits(reading) - expected(files.medusa(heads=3), 3)).abs().max() < 1e-9
    assert not any("num_hidden_layers" in note for note in reading.notes)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_converted_heads_give_their_logits(tmp_path: Path, bias: bool, prefix: str) -> None:
    tensors = files.medusa_vllm(bias=bias, prefix=prefix)
    config = files.medusa_vllm_config(medusa_fc_bias=bias, logit_scale=0.5)
    reading = read(files.write(tmp_path / "m", tensors, config, "model.safetensors"))
    original = files.medusa()
    if not bias:
        original = {n: t * (0 if n.endswith("bias") else 1) for n, t in original.items()}
    assert (logits(reading) - 0.5 * expected(original, 5)).abs().max() < 1e-9


@pytest.mark.parametrize("whole_rows", [False, True])
def test_a_token_map_turns_draft_ids_into_target_ids(tmp_path: Path, whole_rows: bool) -> None:
    kept = torch.tensor([3, 90, 17, 40])
    tensors = files.medusa_vllm(kept=kept)
    if whole_rows:
        tensors |= {n: t for n, t in files.medusa_vllm().items() if n.startswith("lm_heads")}
    config = files.medusa_vllm_config(truncated_vocab_size=4)
    reading = read(files.write(tmp_path / "m", tensors, config, "model.safetensors"))
    assert reading.vocabulary.to_target(torch.arange(4)).tolist() == kept.tolist()
    assert logits(reading).shape == (3, 5, 4)
    if whole_rows:
        rows = files.medusa_vllm()["lm_heads.2.weight"][kept]
        assert torch.equal(reading.net.output[2], rows)  # type: ignore[index]


def test_one_output_layer_serves_all_heads(tmp_path: Path) -> None:
    tensors = files.medusa_vllm()
    tensors = {
        n: t
        for n, t in tensors.items()
        if not n.startswith("lm_heads.") or n == "lm_heads.0.weight"
    }
    config = files.medusa_vllm_config(original_lm_head=True)
    reading = read(files.write(tmp_path / "m", tensors, config, "model.safetensors"))
    shared = tensors["lm_heads.0.weight"]
    state = FEATURE + torch.nn.functional.silu(FEATURE @ tensors["blocks.3.layers.0.weight"].T)
    assert (logits(reading)[:, 3] - state @ shared.T).abs().max() < 1e-9


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize("name", ["2.0.linear.weight", "0.0.linear.bias", "3.1.weight"])
def test_a_missing_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = files.write(tmp_path / "m", without(name)(files.medusa()), None, "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        read(folder)


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    tensors = files.medusa() | {"extra.gate": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"extra\.gate"):
        read(files.write(tmp_path / "m", tensors, None, "medusa_lm_head.pt"))


def test_a_mis_shaped_tensor_is_refused_with_both_shapes(tmp_path: Path) -> None:
    tensors = files.medusa() | {"1.1.weight": files.noise(50, files.H)}
    with pytest.raises(ValueError, match=r"1\.1\.weight.*\[50, 32\].*\[96, 32\]"):
        read(files.write(tmp_path / "m", tensors, None, "medusa_lm_head.pt"))


def test_heads_of_another_hidden_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden size 48 .* hidden size 32"):
        read(files.write(tmp_path / "m", files.medusa(hidden=48), None, "medusa_lm_head.pt"))


def test_heads_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    config = files.medusa_vllm_config(vocab_size=101)
    with pytest.raises(ValueError, match=r"vocab_size=101.*96"):
        read(files.write(tmp_path / "m", files.medusa_vllm(), config, "model.safetensors"))


def test_nan_weights_are_refused_by_name(tmp_path: Path) -> None:
    tensors = files.medusa()
    tensors["4.0.linear.weight"][3, 3] = torch.nan
    with pytest.raises(ValueError, match=r"4\.0\.linear\.weight.*NaN"):
        read(files.write(tmp_path / "m", tensors, None, "medusa_lm_head.pt"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"truncated_vocab_size": 40}, "token_map"),
        ({"medusa_fc_bias": True}, r"blocks\.0\.layers\.0\.bias"),
    ],
)
def test_a_config_that_promises_missing_tensors_is_refused(
    tmp_path: Path, more: dict[str, object], message: str
) -> None:
    folder = files.write(
        tmp_path / "m", files.medusa_vllm(), files.medusa_vllm_config(**more), "model.safetensors"
    )
    with pytest.raises(ValueError, match=message):
        read(folder)


@pytest.mark.parametrize("kept", [[0, 96], [-1, 4], [7, 7]])
def test_a_token_map_out_of_range_or_with_doubles_is_refused(
    tmp_path: Path, kept: list[int]
) -> None:
    tensors = files.medusa_vllm(kept=torch.tensor(kept))
    config = files.medusa_vllm_config(truncated_vocab_size=2)
    with pytest.raises(ValueError, match="token_map"):
        read(files.write(tmp_path / "m", tensors, config, "model.safetensors"))
