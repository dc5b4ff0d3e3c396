"""foretell on the command line: generate, chat, pull, demo and version.

It turns options into LLM's arguments and prints what comes back; it decides nothing about generation.
Text goes to stdout as it lands, everything else (progress, statistics, errors) to stderr, so a pipe
receives the text alone. With --json stdout carries JSON lines and nothing else.

Exit codes: 0 done, 1 the machine failed, 2 the input was wrong, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import version as installed_version
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from typer import Argument, Option

from foretell import demo as demonstration
from foretell.commands import (
    bench,
    bench_options,
    doctor,
    export,
    plan,
    serve,
    show_tree,
    train,
    tune,
)
from foretell.commands.profile import profile
from foretell.llm import LLM
from foretell.metrics import Metrics
from foretell.model.hub import DEFAULT_MODEL, ModelSource, resolve
from foretell.options import EngineOptions, SamplingOptions, flatten
from foretell.outputs import RequestOutput

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="LLM inference with speculative decoding: the same text, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
JsonOption = Annotated[bool, Option("--json", help="Print JSON, and only JSON, on stdout.")]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command whose errors are one line each and whose option groups are flat."""

    @wraps(function)
    def guarded(*args: Any, **values: Any) -> None:
        with errors_as_lines():
            function(*args, **values)

    app.command()(flatten(guarded))
    return function


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Wrong input and a failing machine end in one line on stderr; our own faults keep their traceback.

    A character that stdout or stderr cannot show is a question mark there, and no error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (
        typer.Exit,
        BrokenPipeError,
    ):  # a RuntimeError by birth; and a reader that has seen enough
        raise
    except (ValueError, FileNotFoundError, NotADirectoryError, NotImplementedError) as error:
        _fail(error, BAD_INPUT)
    except (OSError, ImportError, MemoryError, RuntimeError) as error:
        _fail(error, FAILED)


def _fail(error: BaseException, code: int) -> None:
    _say(error)
    raise typer.Exit(code) from None


def _say(error: BaseException) -> None:
    said = " ".join(str(error).split()) or type(error).__name__
    print(f"foretell: error: {said}", file=sys.stderr)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line that says what is going on: a spinner on a terminal, nothing in a pipe or a log."""
    with Console(stderr=True, highlight=False).status("") as status:
        yield lambda text: status.update(escape(text))


@contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Show what the library notes while it loads: what a drafter was recognised as, and how it is read."""
    logger = logging.getLogger("foretell")
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("foretell: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def fetch(model: str | None, revision: str | None = None) -> ModelSource:
    """Where a model is on this machine, after a download with a progress bar if it was not."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    notes = Console(stderr=True)
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)

        def tell(doing: str, done: int, total: int) -> None:
            text = f"{doing} {model or DEFAULT_MODEL}"
            bar.update(task, description=text, completed=done, total=total or None, visible=True)

        return resolve(model, revision, tell)


def open_llm(engine: EngineOptions) -> LLM:
    """The model, with a sign of life while it loads."""
    arguments = engine.arguments()
    model = arguments.get("model")
    fetch(model, arguments.get("revision"))
    with progress() as tell, notes_on_stderr():
        tell(f"loading {model or DEFAULT_MODEL}")
        return LLM(**arguments)


@command
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        list[str] | None, Argument(help="What to continue; left out or -, it is read from stdin.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts. One prompt streams; several run together and print as they end."""
    params = sampling.params()
    texts = _prompts(prompts or ["-"])
    llm = open_llm(engine)
    show = _silent if as_json else (StreamedText() if len(texts) == 1 else _print_when_done)
    answer = collect(llm, llm.stream(texts, params), show)
    if answer.interrupted and show is _print_when_done:
        for output in answer.outputs:
            if not output.finished:
                _print_block(output)
    _report(answer, as_json)


@command
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    message: Annotated[
        str | None, Argument(help="One message to answer; left out, a conversation starts.")
    ] = None,
    system: Annotated[str | None, Option("--system", help="The system message.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Talk to the model. /reset forgets the conversation, /exit (or end of input) leaves.

    A message that does not fit is refused, and the conversation goes on without it.
    """
    params = sampling.params()
    llm = open_llm(engine)
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    for text in [message] if message is not None else _lines():
        if text == "/reset":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": text})
        try:
            stream = llm.stream_chat(messages, params)
        except ValueError as error:  # above all: no room left for it
            if message is not None:
                raise
            messages.pop()
            _say(error)
            continue
        answer = collect(llm, stream, _silent if as_json else StreamedText())
        _report(answer, as_json)
        messages.append({"role": "assistant", "content": answer.text})


@command
def pull(
    model: Annotated[
        str | None, Argument(help="A hub name; left out, the default model.", show_default=False)
    ] = None,
    revision: Annotated[str | None, Option("--revision", help="Of a hub model.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model once, so that later commands need no network."""
    source = fetch(model, revision)
    if as_json:
        print(json.dumps({"model": source.name, "path": str(source.path)}))
    else:
        print(source.path)


@command
def demo(engine: EngineOptions, sampling: SamplingOptions, as_json: JsonOption = False) -> None:
    """The same prompts plain and with drafts: speed, acceptance, and whether the text is the same."""
    params = sampling.params()
    drafting = engine.with_drafts()
    plain, speculative = open_llm(engine.without_drafts()), open_llm(drafting)
    with progress() as tell:
        pairs = demonstration.compare(plain, speculative, demonstration.TASKS, params, tell)
    result = demonstration.record(engine.model or DEFAULT_MODEL, drafting.method, pairs)
    if not as_json:
        demonstration.show(Console(highlight=False), result, pairs)
    print(json.dumps(result), flush=True)


@command
def version(as_json: JsonOption = False) -> None:
    """Print the version; with --json also Python's and the libraries'."""
    packages = ("foretell", "torch", "transformers")
    if as_json:
        found = {name: installed_version(name) for name in packages}
        print(json.dumps({**found, "python": platform.python_version()}))
    else:
        print(f"foretell {installed_version('foretell')}")


app.add_typer(bench.app, name="bench")  # behind the others, as --help lists them
bench_options.command(app, "tune")(tune.command)
command(plan.plan)
command(train.train)
command(export.export)
command(doctor.doctor)
command(profile)
bench_options.command(app, "show-tree")(show_tree.show_tree)
serve.register(app)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call: the last state of every request, finished or not."""

    outputs: Sequence[RequestOutput]
    seconds: float
    interrupted: bool
    counted: Metrics  # by this call alone

    @property
    def text(self) -> str:
        """The text of the first request."""
        return self.outputs[0].outputs[0].text if self.outputs else ""

    @property
    def tokens(self) -> int:
        """Tokens emitted by all requests."""
        return sum(len(c.token_ids) for output in self.outputs for c in output.outputs)


def collect(
    llm: LLM, stream: Generator[RequestOutput], show: Callable[[RequestOutput], None]
) -> Answer:
    """Drain a stream, showing each output. Ctrl-C ends it and keeps what has come."""
    latest: dict[str, RequestOutput] = {}
    interrupted = False
    before = llm.get_metrics()
    started = time.perf_counter()
    try:
        with closing(stream):  # closing aborts what still runs
            for output in stream:
                latest[output.request_id] = output
                show(output)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - started
    outputs = [latest[key] for key in sorted(latest, key=_request_order)]
    return Answer(outputs, seconds, interrupted, llm.get_metrics().since(before))


def _request_order(request_id: str) -> tuple[int, str]:
    return (int(request_id) if request_id.isdecimal() else 0, request_id)


class StreamedText:
    """Writes what is new in a growing text, and a line end once it is complete."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self.write = write or _write_now
        self.shown = 0

    def __call__(self, output: RequestOutput) -> None:
        """Show one more state of the request."""
        text = output.outputs[0].text
        self.write(text[self.shown :] + ("\n" if output.finished else ""))
        self.shown = len(text)


def _write_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_when_done(output: RequestOutput) -> None:
    if output.finished:
        _print_block(output)


def _print_block(output: RequestOutput) -> None:
    print(f"=== {output.prompt}\n{output.outputs[0].text}", flush=True)


def _silent(output: RequestOutput) -> None:
    """--json prints once, at the end."""


def _report(answer: Answer, as_json: bool) -> None:
    """Statistics after an answer; after Ctrl-C the command ends here."""
    if as_json:
        print(json.dumps(_record(answer), ensure_ascii=False), flush=True)
    else:
        if answer.interrupted:
            print(flush=True)
        print(_summary(answer), file=sys.stderr)
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


def _record(answer: Answer) -> dict[str, Any]:
    counted = answer.counted
    return {
        "requests": [
            {
                "prompt": output.prompt,
                "prompt_tokens": len(output.prompt_token_ids),
                "outputs": [
                    {
                        "text": c.text,
                        "token_ids": list(c.token_ids),
                        "finish_reason": c.finish_reason or "abort",
                    }
                    for c in output.outputs
                ],
            }
            for output in answer.outputs
        ],
        "completion_tokens": answer.tokens,
        "seconds": round(answer.seconds, 4),
        "tokens_per_s": round(answer.tokens / answer.seconds, 2),
        "interrupted": answer.interrupted,
        "speculation": {
            "drafts": counted.num_drafts,
            "drafted": counted.num_draft_tokens,
            "accepted": counted.num_accepted_tokens,
            "accepted_per_position": list(counted.num_accepted_tokens_per_pos),
            "mean_acceptance_length": round(counted.mean_acceptance_length, 4),
        },
    }


def _summary(answer: Answer) -> str:
    speed = answer.tokens / answer.seconds
    said = f"[{answer.tokens} tokens, {answer.seconds:.2f} s, {speed:.1f} tokens/s"
    counted = answer.counted
    if counted.num_drafts:
        said += f"; {counted.mean_acceptance_length:.2f} tokens a step with drafts"
        said += f", {counted.draft_acceptance_rate:.0%} of drafted tokens accepted"
    return said + "]"


def _prompts(given: Sequence[str]) -> list[str]:
    texts = [sys.stdin.read() if text == "-" else text for text in given]
    if "" in texts:
        raise ValueError("the prompt is empty; give a text, or pipe one in")
    return texts


def _lines() -> Iterator[str]:
    """Messages from the keyboard or from a pipe, blank lines left out."""
    asking = sys.stdin.isatty()
    while True:
        if asking:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        text = line.strip()
        if not line or text in ("/exit", "/quit"):
            return
        if text:
            yield text
