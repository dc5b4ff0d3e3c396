"""The target answers prompts with our own engine, many at once, into a file that can be continued.

Every finished answer is one line, written when it is done; a run that was cut short leaves at most one broken last
line, which the next run removes. Seeds come from the prompt's place in the data, so an answer does not depend on where
a run was cut.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.prompts import ChatOptions, encode_chat
from foretell.sampling_params import SamplingParams
from foretell.seeds import request_seed
from foretell.text import Tokenizer
from foretell.training.data import (
    Asked,
    Example,
    Header,
    answered_example,
    prompt_ids,
    read_answers,
    template_of,
    to_line,
)

if TYPE_CHECKING:
    from foretell.engine.engine import Engine

SYNTHETIC_TOKENS = 96  # longest prompt that the target writes itself
_MARK = "\u2063foretell\u2063"  # stands for the user's text in a template


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt on its way."""

    id: str
    prompt: tuple[int, ...]
    seed: int


@dataclass(slots=True)
class Tally:
    """How far it is."""

    total: int
    done: int = 0
    here: int = 0  # answers of this run
    tokens: int = 0  # of this run
    started: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_s(self) -> float:
        """Of this run."""
        return self.tokens / max(1e-9, time.monotonic() - self.started)


Tell = Callable[[Tally], None]


def complete(
    engine: Engine,
    jobs: Iterator[Job],
    params: SamplingParams,
    queued: int,
    deadline: float | None = None,
) -> Iterator[tuple[Job, list[int]]]:
    """Run jobs through an engine, each with its tokens as soon as it ends.

    Args:
        queued: requests in the engine at a time.
        deadline: monotonic second after which no job starts and what runs is aborted.
    """
    running: dict[str, tuple[Job, list[int]]] = {}
    while True:
        while len(running) < queued and (job := next(jobs, None)) is not None:
            engine.add(job.id, job.prompt, params, seed=job.seed)
            running[job.id] = (job, [])
        if deadline is not None and time.monotonic() > deadline:
            break
        if not running:
            return
        for delta in engine.step():
            job, tokens = running[delta.request_id]
            tokens.extend(delta.token_ids)
            if delta.finish_reason is not None:
                del running[delta.request_id]
                if delta.finish_reason != "error":
                    yield job, tokens
    for request_id in running:
        engine.abort(request_id)
    while engine.has_work():
        engine.step()


def answer_file(
    path: Path,
    asked: Sequence[Asked],
    engine: Engine,
    tokenizer: Tokenizer,
    params: SamplingParams,
    queued: int,
    tell: Tell = lambda tally: None,
    deadline: float | None = None,
) -> Tally:
    """Answer what is not answered in `path` yet.

    Args:
        queued: requests in the engine at a time.
        deadline: monotonic second at which to stop; what is running then is not kept.

    Raises:
        ValueError: the file is of another target or template, or no prompt fits the engine.
        OSError: the disk is full, say; what was written stays, and the next run goes on from there.
    """
    header = Header(template_of(tokenizer), engine.vocab_size)
    known = continue_file(path, header)
    left = [(place, one) for place, one in enumerate(asked) if one.id not in known]
    tally = Tally(total=len(asked), done=len(asked) - len(left))
    with path.open("a", encoding="utf-8") as file:
        try:
            for one in (one for _, one in left if one.answered):
                file.write(to_line(answered_example(one, tokenizer)))
                tally.done += 1
            jobs = _jobs(left, tokenizer, engine.max_model_len, tally)
            for job, tokens in complete(engine, jobs, params, queued, deadline):
                span = (len(job.prompt), len(job.prompt) + len(tokens))
                file.write(to_line(Example(job.id, (*job.prompt, *tokens), (span,))))
                tally.done, tally.here = tally.done + 1, tally.here + 1
                tally.tokens += len(tokens)
                tell(tally)
            file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{path.name}: {error.strerror}; {tally.done} answers are kept, and the same command goes on from "
                "there once there is room",
            ) from error
    return tally


def continue_file(path: Path, header: Header) -> set[str]:
    """Ids that are answered in a file; a new file gets its header, a broken last line is cut off.

    Raises:
        ValueError: the file is of another target or template, or broken elsewhere.
    """
    if not _mended(path):
        path.write_text(header.line(), "utf-8")
        return set()
    return {example.id for example in read_answers(path, header)}


def _mended(path: Path) -> bool:
    """Cut off a broken last line; False where nothing is left, or nothing was."""
    if not path.exists():
        return False
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    last = content[content.rfind(b"\n", 0, max(0, whole - 1)) + 1 : whole]
    keep = whole if _is_json(last) else whole - len(last)
    if keep < len(content):
        with path.open("r+b") as file:
            file.truncate(keep)
    return keep > 0


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    return True


def _jobs(
    left: Sequence[tuple[int, Asked]], tokenizer: Tokenizer, longest: int, tally: Tally
) -> Iterator[Job]:
    """Prompts to be answered; those that leave no room for an answer count as done."""
    for place, one in left:
        if one.answered:
            continue
        ids = prompt_ids(one, tokenizer)
        if len(ids) < longest:
            yield Job(one.id, ids, request_seed(0, place))
        else:
            tally.done += 1


def written_by_target(
    path: Path, count: int, engine: Engine, tokenizer: Tokenizer, queued: int, seed: int = 0
) -> list[Asked]:
    """Prompts that the target writes itself: it continues the chat template where the user's text would begin.

    Args:
        path: where they are kept, line by line as they come; a run that was cut short goes on from there.
        count: texts to write; those of less than three words are no prompts and are left out.
        queued: requests in the engine at a time.

    Raises:
        ValueError: the template does not show the user's text as it is, nothing usable was written, or the file is of
            another target or template.
        OSError: the disk is full; what was written stays.
    """
    start = _user_turn(tokenizer)
    header = Header(template_of(tokenizer), engine.vocab_size)
    said = _continue_prompts(path, header)
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=SYNTHETIC_TOKENS)
    jobs = (
        Job(name, start, request_seed(seed + 1, i))
        for i, name in ((i, f"synthetic-{i}") for i in range(count))
        if name not in said
    )
    with path.open("a", encoding="utf-8") as file:
        for job, tokens in complete(engine, jobs, params, queued):
            text = tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            said[job.id] = text.strip()
            file.write(json.dumps({"id": job.id, "prompt": said[job.id]}) + "\n")
    names = [name for i in range(count) if len(said.get(name := f"synthetic-{i}", "").split()) > 2]
    if not names:
        raise ValueError("the target wrote no usable prompt; give --data with prompts instead")
    return [Asked(name, ({"role": "user", "content": said[name]},)) for name in names]


def _user_turn(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a chat up to where the user's text begins."""
    message = {"role": "user", "content": _MARK}
    text = encode_chat([message], tokenizer, ChatOptions(), "synthetic prompt").text or ""
    head, found, _ = text.partition(_MARK)
    if not found or not head:
        raise ValueError(
            "synthetic prompts need a chat template that writes the user's text after some words of its own; give "
            "--data with prompts instead"
        )
    return tuple(tokenizer.encode(head, add_special_tokens=False))


def _continue_prompts(path: Path, header: Header) -> dict[str, str]:
    """What was written by an earlier run, by id."""
    if not _mended(path):
        path.write_text(header.line(), "utf-8")
        return {}
    first, *lines = path.read_text("utf-8").split("\n")
    if first + "\n" != header.line():
        raise ValueError(
            f"{path} holds prompts that a target with another template or vocabulary wrote; remove it, or give another "
            "--out"
        )
    found = [json.loads(line) for line in lines if line]
    return {one["id"]: one["prompt"] for one in found}
