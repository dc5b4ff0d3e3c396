"""Batch files in OpenAI's format, answered by an engine in this process: no server, no network.

A line asks ({"custom_id", "method", "url", "body"}), a line answers ({"custom_id", "response", "error"}), in the order
the answers come. A run that was stopped goes on where it was: what the output file answers already is left out.

Invariant: every line of the input that can be read gets exactly one line of output, and a line is written whole.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from foretell.assembly import Assembly
from foretell.progress import Progress
from foretell.server.asked import Asked
from foretell.server.bodies import read_json
from foretell.server.errors import ApiError, path_of
from foretell.server.schema import ChatRequest, CompletionRequest
from foretell.server.state import Server
from foretell.server.work import Work

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
AHEAD = 2  # requests queued per slot, so that the engine never waits for the file


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the input."""

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class Count:
    """How a run went."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0  # answered by an earlier run


@dataclass(frozen=True, slots=True)
class _Running:
    line: Line
    work: Work
    assemblies: tuple[Assembly, ...]


class BatchRun:
    """One run over one input file.

    Args:
        server: the engine behind the routes; its bridge is not started.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._driver = server.parts.driver
        self._most = AHEAD * server.parts.config.max_num_seqs
        self.count = Count()

    def run(self, source: Path, target: Path) -> Count:
        """Answer all lines.

        Raises:
            ValueError: the input is no batch file; lines are named by number.
        """
        lines = list(read_lines(source, self._server.settings.max_json_depth))
        done = answered(target)
        left = [line for line in lines if line.custom_id not in done]
        self.count.skipped = len(lines) - len(left)
        running: list[_Running] = []
        with target.open("a", encoding="utf-8") as out, Progress(True, len(left)) as progress:
            try:
                waiting = iter(left)
                while self._fill(waiting, running, out, progress) or running:
                    if any(not a.finished for one in running for a in one.assemblies):
                        self._driver.pump()
                    running = self._take(running, out, progress)
            finally:
                self._driver.drop([a for one in running for a in one.assemblies])
        return self.count

    def _fill(
        self, waiting: Iterator[Line], running: list[_Running], out: TextIO, progress: Progress
    ) -> bool:
        """Queue requests up to the limit; False: there are no more."""
        while len(running) < self._most:
            line = next(waiting, None)
            if line is None:
                return False
            made: list[Assembly] = []
            try:
                work, asked = self._ask(line)
                self._driver.queue(asked.jobs, made)
            except (ApiError, ValueError) as error:
                self._driver.drop(made)
                wrong = error if isinstance(error, ApiError) else ApiError(400, str(error))
                self._write(out, line, wrong.status, wrong.body())
                progress.finished(0, 0)
            else:
                running.append(_Running(line, work, tuple(made)))
        return True

    def _ask(self, line: Line) -> tuple[Work, Asked]:
        asker = self._server.asker
        body: ChatRequest | CompletionRequest
        try:
            if line.url == CHAT:
                body = ChatRequest.model_validate(line.body)
                asked = asker.chat(body.model_copy(update={"stream": None, "stream_options": None}))
            else:
                body = CompletionRequest.model_validate(line.body)
                asked = asker.completion(
                    body.model_copy(update={"stream": None, "stream_options": None})
                )
        except ValidationError as error:
            first = error.errors()[0]
            param = path_of(first["loc"])
            raise ApiError(400, f"{param}: {first['msg']}", param) from None
        name = asker.check_model(body.model)
        kind = "chatcmpl" if line.url == CHAT else "cmpl"
        return Work(self._server, body, asked, name, f"{kind}-{uuid.uuid4().hex}"), asked

    def _take(self, running: list[_Running], out: TextIO, progress: Progress) -> list[_Running]:
        left = []
        for one in running:
            if not all(assembly.finished for assembly in one.assemblies):
                left.append(one)
                continue
            outputs = [assembly.output() for assembly in one.assemblies]
            try:
                self._write(out, one.line, 200, one.work.body_of(outputs))
            except ApiError as error:
                self._write(out, one.line, error.status, error.body())
            progress.finished(
                sum(a.num_prompt_tokens for a in one.assemblies),
                sum(a.num_generated_tokens for a in one.assemblies),
            )
        return left

    def _write(self, out: TextIO, line: Line, status: int, body: Mapping[str, Any]) -> None:
        answer = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": {"status_code": status, "request_id": uuid.uuid4().hex, "body": body},
            "error": None,
        }
        out.write(json.dumps(answer) + "\n")
        out.flush()
        os.fsync(out.fileno())
        if status == 200:
            self.count.answered += 1
        else:
            self.count.failed += 1


def read_lines(source: Path, max_depth: int) -> Iterator[Line]:
    """The requests of a batch file.

    Raises:
        ValueError: a line is no request, or two have one custom_id.
    """
    if not source.is_file():
        raise ValueError(f"{source}: there is no such file")
    seen: set[str] = set()
    with source.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            line = _line(number, text, source, max_depth)
            if line.custom_id in seen:
                raise ValueError(
                    f"{source}:{number}: custom_id {line.custom_id!r} was used before; give each line its own"
                )
            seen.add(line.custom_id)
            yield line


def _line(number: int, text: str, source: Path, max_depth: int) -> Line:
    where = f"{source}:{number}"
    try:
        data = read_json(text.encode(), max_depth)
    except ApiError as error:
        raise ValueError(f"{where}: {error.message}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where}: a line must be a JSON object")
    custom_id, url, body = data.get("custom_id"), data.get("url"), data.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"{where}: custom_id must be a text")
    if data.get("method", "POST") != "POST" or url not in (CHAT, COMPLETIONS):
        raise ValueError(
            f"{where}: only POST to {CHAT} and {COMPLETIONS} can be answered, got {url!r}"
        )
    if not isinstance(body, dict):
        raise ValueError(f"{where}: body must be a JSON object")
    return Line(number, custom_id, url, body)


def answered(target: Path) -> set[str]:
    """What an output file answers already; a line that was cut short is taken off its end.

    Raises:
        ValueError: the file is no output of a batch.
    """
    if not target.exists():
        return set()
    content = target.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    found = set()
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            found.add(str(json.loads(text)["custom_id"]))
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{target}:{number} is not the output of a batch; name another output file"
            ) from None
    if len(whole) < len(content):
        os.truncate(target, len(whole))
    return found
