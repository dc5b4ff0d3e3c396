"""`foretell export`: a drafter in the format of another engine, read back and compared before it counts."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


class ExportFormat(StrEnum):
    """Formats that can be written; see training/export.py."""

    SPECULATORS = "speculators"
    EAGLE3_SGLANG = "eagle3-sglang"
    MEDUSA = "medusa"
    VLLM_MEDUSA = "vllm-medusa"
    HUGGING_FACE = "hugging-face"  # of a language model: a target, or a draft model


def export(
    drafter: Annotated[str, Argument(help="Folder or name of the drafter, or of a model.")],
    out: Annotated[Path, Option("--out", help="Folder to write.")],
    form: Annotated[ExportFormat, Option("--format", help="Whose format.")],
    model: Annotated[str | None, Option("--model", "-m", help="The target.")] = None,
    target_name: Annotated[
        str | None, Option("--target-name", help="What the drafter calls its target; else --model.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, and only JSON.")] = False,
) -> None:
    """Write a drafter, or a model, for another engine; it is loaded back and compared number for number."""
    from foretell.model.hub import resolve
    from foretell.model.load import load_model
    from foretell.training.dense import DENSE
    from foretell.training.export import Format
    from foretell.training.export import export as write

    found = resolve(drafter)
    source = found if form is ExportFormat.HUGGING_FACE else resolve(model)
    target = load_model(source, dtype="bfloat16", ops=DENSE)
    write(found.path, target, Format(form.value), out, target_name or source.name)
    files = sorted(path.name for path in out.iterdir())
    if as_json:
        print(json.dumps({"format": form.value, "out": str(out), "files": files}))
    else:
        print(f"{out}: {', '.join(files)} ({form.value}; read back and equal)")
