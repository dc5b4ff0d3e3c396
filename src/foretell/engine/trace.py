"""Traces: what every verification had before it and what became of it, as JSON lines for research.

A watcher in front of another one: it writes and passes on. Everything it writes came through the outbox with the step's
other news; a request's lines come in order, lines of requests that run together are mixed. Reading is trace.py's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from foretell.engine.engine import Watcher
from foretell.engine.request import Request
from foretell.metrics import StepReport
from foretell.runner.plan import SlotResult
from foretell.spec.resolved import Resolved

VERSION = 1
DIGITS = 6  # of a probability


class TraceWriter:
    """Writes a trace.

    Args:
        path: the file; one that exists is replaced.
        inner: who watched before.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: str, inner: Watcher | None) -> None:
        self._inner = inner
        self._steps: dict[str, int] = {}
        try:
            # Line by line, so that a trace of a process that dies is whole up to its last line.
            self._file: TextIO = Path(path).open(  # noqa: SIM115  (open as long as the engine)
                "w", encoding="utf-8", buffering=1
            )
        except OSError as error:
            raise ValueError(f"trace: {path!r} cannot be written ({error.strerror})") from error

    def begin(self, model: str | None, resolved: Resolved) -> None:
        """The first line: what is traced."""
        self._write({"trace": VERSION, "model": model, "speculation": resolved.as_dict()})

    def added(self, request: Request) -> None:
        """Pass on."""
        if self._inner is not None:
            self._inner.added(request)

    def admitted(self, request: Request) -> None:
        """Pass on."""
        if self._inner is not None:
            self._inner.admitted(request)

    def fell_back(self, request: Request) -> None:
        """Pass on."""
        if self._inner is not None:
            self._inner.fell_back(request)

    def stepped(self, report: StepReport) -> None:
        """Pass on."""
        if self._inner is not None:
            self._inner.stepped(report)

    def emitted(self, request: Request, result: SlotResult) -> None:
        """One line, if anything was drafted."""
        if self._inner is not None:
            self._inner.emitted(request, result)
        tree = result.tree
        if tree is not None and result.drafted:
            step = self._steps.get(request.id, 0)
            self._steps[request.id] = step + 1
            self._write(
                {
                    "request": request.id,
                    "step": step,
                    "length": len(request.tokens) - len(result.tokens),
                    "parents": tree.parents,
                    "tokens": tree.tokens,
                    "accepted": tree.accepted,
                    "emitted": result.tokens,
                    "target_probs": _short(tree.target_probs),
                    "draft_probs": _short(tree.draft_probs) or None,
                }
            )
        if request.finish is not None:
            self._steps.pop(request.id, None)

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """End the file."""
        self._file.close()


def _short(probs: tuple[float, ...]) -> list[float]:
    return [round(p, DIGITS) for p in probs]
