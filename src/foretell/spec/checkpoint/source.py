"""A checkpoint on disk: its config.json and its tensors by name, whatever files they lie in.

Pickles are read with torch's weights-only reader, which runs no code. Names and shapes are known before any tensor is
read, so a full model can be looked at for a few heads inside it. Not the meaning of names: that is the readers' work.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

Config = Mapping[str, Any]

SAFETENSORS = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "model.bin", "model.pt")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class _File(Protocol):
    """One file of tensors."""

    path: Path

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a config and tensors.

    `config` is {} where there is no config.json; `name` is what messages call it.
    """

    path: Path
    config: Config
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, _File]  # by tensor name
    name: str

    def read(self, name: str) -> Tensor:
        """The tensor of a name that is in `shapes`."""
        return self.files[name].read(name)


def open_checkpoint(path: Path, label: str | None = None) -> Checkpoint:
    """Look into a folder (or a single file of tensors).

    Args:
        label: what messages call it; None = the folder's name.

    Raises:
        ValueError: nothing is there, the config is no JSON object, a file is damaged or holds code.
    """
    if not path.exists():
        raise ValueError(
            f"speculative model {str(path)!r} does not exist; give a folder with config.json and weights"
        )
    folder = path if path.is_dir() else path.parent
    files = [_open(file) for file in (_weight_files(path) if path.is_dir() else [path])]
    by_name: dict[str, _File] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, shape in file.shapes().items():
            if name in by_name:
                raise ValueError(
                    f"{folder.name}: tensor {name!r} is in {by_name[name].path.name} and in {file.path.name}; "
                    "keep one of the files"
                )
            by_name[name], shapes[name] = file, shape
    return Checkpoint(path, read_config(folder), shapes, by_name, label or path.name)


def read_config(folder: Path) -> Config:
    """The config.json of a folder; {} where there is none.

    Raises:
        ValueError: it is no JSON object.
    """
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder.name}/config.json is not JSON ({error}); fetch it again"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(
            f"{folder.name}/config.json must hold an object, got {type(config).__name__}"
        )
    return config


def _weight_files(folder: Path) -> list[Path]:
    """The files of a folder: an index's shards, else the first known name; safetensors before pickles."""
    for index, single in zip(INDEXES, (SAFETENSORS, PICKLES), strict=True):
        if (folder / index).exists():
            return _shards(folder, folder / index)
        for name in single:
            if (folder / name).exists():
                return [folder / name]
    others = sorted(folder.glob("*.safetensors"))
    if others:
        return others
    raise ValueError(
        f"{folder.name} holds no weights; looked for {', '.join((*SAFETENSORS, *PICKLES, *INDEXES))}"
    )


def _shards(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder.name}/{index.name} has no readable weight_map") from error
    missing = [name for name in names if Path(name).name != name or not (folder / name).exists()]
    if missing:
        raise ValueError(f"{folder.name}: {index.name} names {missing[0]!r}, which is not there")
    return [folder / name for name in names]


def _open(path: Path) -> _File:
    return _Safetensors(path) if path.suffix == ".safetensors" else _Pickle(path)


class _Safetensors:
    """A .safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file: Any = safe_open(str(path), framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{path.name} is not a whole safetensors file ({error}); fetch it again"
            ) from error
        self._file = file

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor."""
        names = self._file.keys()
        return {name: tuple(self._file.get_slice(name).get_shape()) for name in names}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class _Pickle:
    """A .bin or .pt file that holds a flat dict of tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path.name} holds more than tensors, and code in a checkpoint is never run: {_first_line(error)} "
                "Convert it to safetensors where you trust it"
            ) from error
        except (RuntimeError, EOFError) as error:
            raise ValueError(
                f"{path.name} is not a whole PyTorch file ({_first_line(error)}); fetch it again"
            ) from error
        if not isinstance(content, dict) or not all(
            isinstance(t, Tensor) for t in content.values()
        ):
            raise ValueError(
                f"{path.name} must hold a flat dict of tensors (a state_dict); save model.state_dict() alone"
            )
        self._content: dict[str, Tensor] = content

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._content.items()}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._content[name]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
