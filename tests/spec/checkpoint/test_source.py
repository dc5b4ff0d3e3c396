"""Files on disk: what is read, and that nothing in them is ever run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import write

from foretell.spec.checkpoint.source import open_checkpoint


class Bomb:
    """A pickle of it makes a folder when it is loaded by a reader that runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, legacy: bool) -> None:
    path, mark = tmp_path / "medusa_lm_head.pt", tmp_path / "mark"
    if legacy:
        path.write_bytes(pickle.dumps({"0.0.linear.weight": Bomb(mark)}, protocol=2))
    else:
        torch.save({"0.0.linear.weight": Bomb(mark)}, path)
    with pytest.raises(ValueError, match=r"medusa_lm_head\.pt .*code"):
        open_checkpoint(tmp_path)
    assert not mark.exists()


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(1)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="flat dict of tensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, file: str) -> None:
    write(tmp_path, {"a": torch.zeros(4)}, {}, file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=file):
        open_checkpoint(tmp_path)


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(2)}, {}, "model-00001-of-00002.safetensors")
    write(tmp_path, {"b": torch.ones(3)}, {}, "model-00002-of-00002.safetensors")
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shapes == {"a": (2,), "b": (3,)}
    assert checkpoint.read("b").tolist() == [1, 1, 1]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        open_checkpoint(tmp_path)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "other", {"a": torch.zeros(2)}, {}, "model.safetensors")
    folder = tmp_path / "m"
    folder.mkdir()
    index = {"weight_map": {"a": "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="other"):
        open_checkpoint(folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no weights"):
        open_checkpoint(tmp_path)
    write(tmp_path, {"a": torch.zeros(1)}, None, "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        open_checkpoint(tmp_path)
