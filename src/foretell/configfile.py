"""Config files: LLM's arguments as YAML, for --config and for what `foretell tune` writes. Torch-free.

A key is an argument of LLM, with dashes or underscores; `speculative_config` is a mapping inside. Whether a key exists
and a value is right, LLM says itself when it gets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

SPECULATION = ("speculate_model", "num_speculative_tokens", "speculative_config")


def read_config(path: str) -> dict[str, Any]:
    """LLM's arguments from a file.

    Raises:
        ValueError: there is no such file, or it is not a YAML mapping of names to values.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"--config {path}: there is no such file")
    try:
        data = yaml.safe_load(file.read_text("utf-8"))
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ValueError(f"--config {path} is not YAML: {said}") from None
    if data is None:
        return {}
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ValueError(
            f"--config {path} must map LLM's arguments to values, one a line, like 'dtype: bfloat16'"
        )
    return {key.replace("-", "_"): value for key, value in data.items()}


def write_config(path: Path, arguments: Mapping[str, Any], comments: str = "") -> None:
    """Write LLM's arguments so that `read_config` gives them back.

    Args:
        comments: lines for the head of the file, without their "#".
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments.splitlines())
    body = yaml.safe_dump(dict(arguments), sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + body, "utf-8")
