"""What the documents show works as it stands there: Python runs on tiny models, command lines are understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
import typer.main
from pretend_hub import pretend, text_model

from foretell import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
SERVER = "http://127.0.0.1:8000"
COMMAND = typer.main.get_command(cli.app)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language; "" = without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), flags=re.DOTALL | re.M)
    return [body for kind, body in found if kind == language]


PYTHON = [(page, place) for page in PAGES for place in range(len(blocks(page, "python")))]
COMMANDS = [
    line.split(" # ")[0].strip()
    for page in PAGES
    for language in ("", "bash", "sh", "console", "shell")
    for block in blocks(page, language)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("foretell ")
]


@pytest.mark.parametrize(("page", "place"), PYTHON, ids=lambda value: getattr(value, "name", value))
def test_python_runs_as_it_stands(
    page: Path,
    place: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = blocks(page, "python")[place]
    for library in re.findall(r"^(?:from|import) (\w+)", code, flags=re.M):
        pytest.importorskip(library)
    names = re.findall(r'"([\w-]+/[\w.-]+)"', code)
    monkeypatch.chdir(tmp_path)
    if SERVER in code:
        with served(names[0]) as url:
            run(code.replace(SERVER, url), page)
    else:
        models = [text_model(tmp_path / "0", layers=2), text_model(tmp_path / "1")]
        pretend(monkeypatch, dict(zip(names, models, strict=False)))
        run(code, page)
    printed = capsys.readouterr().out
    assert ("print(" in code) == bool(printed)
    if page.name.startswith("README"):
        assert len(names) == 2
        assert printed.count("Generated text: ") == 2
        assert 1.0 <= float(printed.splitlines()[-1]) <= 6.0, "of five drafted tokens"


def run(code: str, page: Path) -> None:
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


@contextmanager
def served(name: str) -> Iterator[str]:
    """A tiny model under that name; gives the server's address."""
    from serving_lab import Live, tiny_llm

    from foretell.server.settings import ServerSettings

    server = Live(tiny_llm(), ServerSettings(model_names=(name,)))
    try:
        yield server.url
    finally:
        server.close()


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_is_understood(line: str) -> None:
    words = shlex.split(line)[1:]
    command: click.Command = COMMAND
    context = click.Context(command, info_name="foretell")
    while isinstance(command, click.Group):
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
        context = command.make_context(command.name, list(words), parent=context)
        words = [*context.protected_args, *context.args] if isinstance(command, click.Group) else []


def test_the_documents_show_code_at_all() -> None:
    assert {page.name for page, _ in PYTHON} >= {"README.md", "README.vi.md", "drafters.md"}
    assert len(COMMANDS) >= 8
