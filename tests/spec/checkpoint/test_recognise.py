"""What a checkpoint is: told by its tensors and config, never by its name."""

from __future__ import annotations

from pathlib import Path

import checkpoints as files
import pytest
import torch
from torch import Tensor

from foretell.spec.checkpoint.recognise import (
    Family,
    check_method,
    draft_tokens_of,
    recognise,
    verifier_of,
)
from foretell.spec.checkpoint.source import Checkpoint, open_checkpoint

LM = {
    "model.embed_tokens.weight": files.noise(files.V, files.H),
    "model.norm.weight": files.norm_weight(files.H),
}
LM |= files.llama_layer("model.layers.0.", first=False)
MTP = LM | {
    "mtp.fc.weight": files.noise(files.H, 2 * files.H),
    "mtp.norm.weight": files.norm_weight(files.H),
}


def opened(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, object] | None
) -> Checkpoint:
    return open_checkpoint(files.write(folder, tensors, config, "model.safetensors"))


@pytest.mark.parametrize(
    ("tensors", "config", "family"),
    [
        (files.medusa(), files.medusa_config(), Family.MEDUSA),
        (files.medusa(), None, Family.MEDUSA),
        (
            LM | files.medusa(prefix="medusa_head."),
            files.llama_config(medusa_num_heads=5),
            Family.MEDUSA,
        ),
        (files.medusa_vllm(), files.medusa_vllm_config(), Family.MEDUSA),
        (files.eagle1(), files.llama_config(), Family.EAGLE),
        (files.eagle3(), files.eagle3_config(), Family.EAGLE3),
        (files.eagle3(first="layers.0.", prefix="model."), files.llama_config(), Family.EAGLE3),
        (files.eagle3(fc=False), files.eagle3_config(), Family.EAGLE3),
        (files.eagle3(first="layers.0."), files.speculators_config(), Family.EAGLE3),
        (files.mlp_speculator(), files.mlp_speculator_config(), Family.MLP_SPECULATOR),
        (LM, files.llama_config(), Family.DRAFT_MODEL),
        (LM, files.llama_config(pard_token=90), Family.PARD),
        (MTP, files.llama_config(), Family.MTP),
    ],
)
def test_a_checkpoint_is_recognised(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, object] | None, family: Family
) -> None:
    assert recognise(opened(tmp_path / "my-eagle-draft", tensors, config)).family is family


def test_a_plain_model_in_a_folder_named_eagle_is_a_draft_model(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "my-eagle3-medusa-draft", LM, files.llama_config())
    found = recognise(checkpoint)
    assert check_method("draft", found, checkpoint) is Family.DRAFT_MODEL
    with pytest.raises(
        ValueError, match=r"'medusa' was given, but my-eagle3-medusa-draft .*'draft_model'"
    ):
        check_method("medusa", found, checkpoint)


def test_another_method_than_the_checkpoints_is_refused_with_both(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "d", files.eagle3(), files.eagle3_config())
    with pytest.raises(ValueError, match=r"'eagle' was given.*'eagle3'.*hidden_norm"):
        check_method("eagle", recognise(checkpoint), checkpoint)
    with pytest.raises(ValueError, match="'eagel' is unknown"):
        check_method("eagel", recognise(checkpoint), checkpoint)


@pytest.mark.parametrize(
    ("tensors", "config", "name"),
    [
        (files.eagle3() | {"mask_hidden": torch.zeros(1, 96)}, {}, "P-EAGLE"),
        (files.eagle3(), {"speculators_model_type": "peagle"}, "P-EAGLE"),
        (files.eagle3(), {"architectures": ["DFlashDraftModel"]}, "DFlash"),
        (files.eagle3() | {"efficient_lm_head.weight": torch.zeros(4, 4)}, {}, "EAGLE-4"),
    ],
)
def test_a_known_family_that_is_not_supported_is_named(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, object], name: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} drafter, which is not supported"):
        recognise(opened(tmp_path / "d", tensors, config))


@pytest.mark.parametrize(
    ("config", "message"),
    [({"medusa_num_heads": 4}, "medusa_num_heads"), ({"draft_vocab_size": 9}, "EAGLE")],
)
def test_a_config_of_heads_over_a_plain_model_is_refused(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        recognise(opened(tmp_path / "d", LM, files.llama_config(**config)))


def test_something_else_is_refused_with_what_was_seen(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"conv\.weight"):
        recognise(opened(tmp_path / "d", {"conv.weight": torch.zeros(2)}, {}))


def test_a_speculators_checkpoint_names_its_target_and_draft_length(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "d", files.eagle3(first="layers.0."), files.speculators_config())
    assert verifier_of(checkpoint.config) == "meta-llama/Llama-3.1-8B-Instruct"
    assert draft_tokens_of(checkpoint) == 3
    plain = opened(tmp_path / "e", LM, files.llama_config())
    assert verifier_of(plain.config) is None
    assert draft_tokens_of(plain) is None
