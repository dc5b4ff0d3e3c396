"""The READMEs name only files that exist: links, pictures and the file tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["README.md", "README.vi.md"])
def test_every_local_link_leads_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text("utf-8"))
    local = [link for link in links if "://" not in link]
    assert len(local) > 3
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_file_tree_names_existing_files() -> None:
    tree = (ROOT / "README.md").read_text("utf-8").split("## The tree")[1].split("```")[1]
    open_folders: list[Path] = []  # the folder named last at each depth
    named, missing = 0, []
    for line in filter(str.strip, tree.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        parent = open_folders[depth - 1] if depth else ROOT
        names = re.findall(r"[\w./]+(?:\.py|/run|/)(?=\s)", line + "\n")
        named += len(names)
        missing += [name for name in names if not (parent / name).exists()]
        if names and names[0].endswith("/"):
            open_folders[depth:] = [parent / names[0]]
    assert named > 40
    assert missing == []
