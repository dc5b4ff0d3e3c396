"""Bad drafters, from files: every one is refused before anything is drafted, by name and with a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import checkpoints as files
import pytest
import torch
from checkpoints import Tensors
from tiny_tokenizers import byte_level

from foretell import LLM

LAYERS = 7


class Bomb:
    """Loading its pickle with a reader that runs code makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    byte_level().save_pretrained(folder)
    config = files.llama_config(LAYERS, max_position_embeddings=512, eos_token_id=2)
    return files.write(folder, files.language_model(LAYERS), config, "model.safetensors")


def refused(target: Path, drafter: Path, **config: object) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the callers compare the text)
        LLM(
            str(target),
            speculate_model=str(drafter),
            speculative_config=config,
            dtype="float64",
            device="cpu",
            kv_cache_memory_bytes=16 << 20,
            max_model_len=128,
        )
    return str(caught.value)


def poisoned(tensors: Tensors, name: str, value: float) -> Tensors:
    tensor = tensors[name].clone()
    tensor.flatten()[3] = value
    return tensors | {name: tensor}


File = tuple[Tensors, dict[str, object] | None, str]
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"
BAD: dict[str, tuple[Callable[[], File], dict[str, object], str]] = {
    "medusa of another width": (
        lambda: (files.medusa(hidden=48), files.medusa_config(), "medusa_lm_head.pt"),
        {},
        "hidden size 48 cannot draft for a target of hidden size 32; use the heads trained for this",
    ),
    "medusa of another vocabulary": (
        lambda: (files.medusa(v=100), files.medusa_config(), "medusa_lm_head.pt"),
        {},
        "has shape [100, 32], expected [96, 32]",
    ),
    "eagle of another width": (
        lambda: (files.eagle1(), files.llama_config(hidden_size=64), PICKLE),
        {},
        "hidden size 64 cannot read a target of hidden size 32; use the drafter trained for this",
    ),
    "eagle of another vocabulary": (
        lambda: (files.eagle1(), files.llama_config(vocab_size=100), PICKLE),
        {},
        "config.json says vocab_size=100, the target has 96; use the drafter trained for this target",
    ),
    "eagle3 of another width": (
        lambda: (
            files.eagle3(target_hidden=48),
            files.eagle3_config(target_hidden_size=48),
            WEIGHTS,
        ),
        {},
        "hidden size 48 cannot read a target of hidden size 32",
    ),
    "eagle3 of a deeper target": (
        lambda: (
            files.eagle3(),
            files.eagle3_config(eagle_aux_hidden_state_layer_ids=[2, 16, 29]),
            WEIGHTS,
        ),
        {},
        "hidden states after [3, 17, 30] layers; they must be different and within the target's 7 layers",
    ),
    "eagle3 with layers beyond the target's": (
        lambda: (files.eagle3(), files.eagle3_config(), WEIGHTS),
        {"target_layers": [2, 3, 8]},
        "within the target's 7 layers. Give layers that exist, or use the drafter of this target",
    ),
    "eagle3 with a map beyond the vocabulary": (
        lambda: (
            files.eagle3() | {"d2t": files.eagle3()["d2t"] + 90},
            files.eagle3_config(),
            WEIGHTS,
        ),
        {},
        "but the target's vocabulary has 96; is this the drafter of another target",
    ),
    "mlp speculator of another width": (
        lambda: (files.mlp_speculator(), files.mlp_speculator_config(emb_dim=64), WEIGHTS),
        {},
        "config.json says emb_dim=64 and vocab_size=96, the target has 32 and 96",
    ),
    "mtp of another target": (
        lambda: (files.mimo_mtp(), files.mimo_mtp_config(hidden_size=64), WEIGHTS),
        {},
        "hidden size 64 cannot read a target of hidden size 32",
    ),
    "NaN in heads": (
        lambda: (
            poisoned(files.medusa(), "1.0.linear.weight", torch.nan),
            files.medusa_config(),
            "medusa_lm_head.pt",
        ),
        {},
        "tensor '1.0.linear.weight' holds NaN or infinity; the file is damaged",
    ),
    "infinity in a layer": (
        lambda: (
            poisoned(files.eagle3(), "midlayer.mlp.up_proj.weight", torch.inf),
            files.eagle3_config(),
            WEIGHTS,
        ),
        {},
        "tensor 'midlayer.mlp.up_proj.weight' holds NaN or infinity",
    ),
    "NaN in a speculator": (
        lambda: (
            poisoned(files.mlp_speculator(), "speculator.emb.2.weight", torch.nan),
            files.mlp_speculator_config(),
            WEIGHTS,
        ),
        {},
        "tensor 'speculator.emb.2.weight' holds NaN",
    ),
    "a tree with a gap": (
        lambda: (files.medusa(), files.medusa_config(), "medusa_lm_head.pt"),
        {"tree": [[0], [1], [2, 0]]},
        "tree: path [2, 0] has a gap: [2] is not in the tree",
    ),
    "a tree with a node before its parent": (
        lambda: (files.eagle1(), files.llama_config(), PICKLE),
        {"tree": [-1, 2, 0]},
        "tree: node 1 has parent 2; parents must come first and exist",
    ),
    "a tree too deep for the heads": (
        lambda: (files.medusa(heads=3), files.medusa_config(3), "medusa_lm_head.pt"),
        {"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]},
        "tree: depth 4 needs 4 Medusa heads, the checkpoint has 3; give a tree of depth 3 or less",
    ),
    "a tree of too many nodes": (
        lambda: (files.eagle1(), files.llama_config(), PICKLE),
        {"tree": [[i] for i in range(64)]},
        "tree: at most 64 nodes (the root included), got 65",
    ),
    "heads without a count": (
        lambda: (files.medusa(), {"medusa_num_layers": 1}, "medusa_lm_head.pt"),
        {},
        'no medusa_num_heads; add "medusa_num_heads": 5',
    ),
    "a missing tensor": (
        lambda: (
            {n: t for n, t in files.eagle3().items() if n != "midlayer.hidden_norm.weight"}
            | {"layers.0.hidden_norm.weights": files.norm_weight(files.H)},
            files.eagle3_config(),
            WEIGHTS,
        ),
        {"method": "eagle3"},
        "method 'eagle3' was given, but d is",
    ),
    "an unknown tensor": (
        lambda: (files.eagle1() | {"extra": torch.zeros(3)}, files.llama_config(), PICKLE),
        {},
        "unknown tensor 'extra' (1 unknown in all)",
    ),
    "a rope that is not known": (
        lambda: (
            files.eagle1(),
            files.llama_config(rope_scaling={"type": "spiral", "factor": 2.0}),
            PICKLE,
        ),
        {},
        "rope_type 'spiral' is not supported",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_by_name_with_a_remedy(name: str, target: Path, tmp_path: Path) -> None:
    make, config, message = BAD[name]
    tensors, said, file = make()
    folder = files.write(tmp_path / "d", tensors, said, file)
    assert message in refused(target, folder, **config)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_a_pickle_with_code_is_refused_and_its_code_not_run(
    file: str, target: Path, tmp_path: Path
) -> None:
    mark, folder = tmp_path / "ran", tmp_path / "d"
    files.write(folder, {}, files.medusa_config(), "other.safetensors")
    (folder / "other.safetensors").unlink()
    torch.save({**files.medusa(), "0.0.linear.extra": Bomb(mark)}, folder / file)
    said = refused(target, folder)
    assert file in said
    assert "code in a checkpoint is never run" in said
    assert "Convert it to safetensors where you trust it" in said
    assert not mark.exists()
