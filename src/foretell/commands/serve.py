"""`foretell serve` and `foretell batch`: the options of the server, under vLLM's names.

Options turn into LLM's arguments and ServerSettings; a config file may hold both. The server's own libraries are loaded
only when a command runs, so that the others need none of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from foretell import arguments
from foretell.config import refuse_unknown
from foretell.configfile import read_config
from foretell.options import EngineOptions, flatten
from foretell.speculation import Missing

if TYPE_CHECKING:
    from foretell.llm import LLM
    from foretell.server.settings import ServerSettings

SERVER = "Server"
KEY_VARIABLES = ("FORETELL_API_KEY", "VLLM_API_KEY")
EXTRA = "foretell serve and foretell batch need the extra `serve`: pip install 'foretell[serve]'"


def _server(*names: str, help: str) -> Any:
    return Option(*names, help=help, rich_help_panel=SERVER, show_default=False)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the server takes besides the model; None = the default of ServerSettings or LLM."""

    host: Annotated[str | None, _server("--host", help="[default: 127.0.0.1]")] = None
    port: Annotated[int | None, _server("--port", help="[default: 8000]")] = None
    uds: Annotated[str | None, _server("--uds", help="A unix socket instead of host and port.")] = (
        None
    )
    api_key: Annotated[
        list[str] | None,
        _server("--api-key", help="Asked of clients (repeatable); or FORETELL_API_KEY."),
    ] = None
    served_model_name: Annotated[
        list[str] | None, _server("--served-model-name", help="Names of the model (repeatable).")
    ] = None
    chat_template: Annotated[
        str | None, _server("--chat-template", help="Jinja text, or a file with it.")
    ] = None
    trust_request_chat_template: Annotated[
        bool | None,
        _server("--trust-request-chat-template", help="Requests may bring chat templates."),
    ] = None
    response_role: Annotated[
        str | None, _server("--response-role", help="[default: assistant]")
    ] = None
    enable_auto_tool_choice: Annotated[
        bool | None, _server("--enable-auto-tool-choice", help="On anyway; for vLLM's scripts.")
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _server("--tool-call-parser", help="auto, hermes, llama3_json, mistral or none."),
    ] = None
    reasoning_parser: Annotated[
        str | None, _server("--reasoning-parser", help="qwen3 or deepseek_r1: thoughts apart.")
    ] = None
    scheduling_policy: Annotated[
        str | None, _server("--scheduling-policy", help="fcfs or priority.")
    ] = None
    max_logprobs: Annotated[int | None, _server("--max-logprobs", help="[default: 20]")] = None
    seed: Annotated[int | None, _server("--seed", help="Of requests without one. [default: 0]")] = (
        None
    )
    max_queue: Annotated[
        int | None, _server("--max-queue", help="Requests that may wait. [default: 1024]")
    ] = None
    max_body_bytes: Annotated[
        int | None, _server("--max-body-bytes", help="[default: 8388608]")
    ] = None
    body_timeout: Annotated[
        float | None, _server("--body-timeout", help="Seconds to receive a request. [default: 30]")
    ] = None
    request_timeout: Annotated[
        float | None, _server("--request-timeout", help="Seconds to answer one. [default: none]")
    ] = None
    drain_timeout: Annotated[
        float | None, _server("--drain-timeout", help="Seconds after SIGTERM. [default: 120]")
    ] = None
    metrics_prefix: Annotated[
        str | None, _server("--metrics-prefix", help="foretell: or vllm: [default: foretell:]")
    ] = None
    allowed_origins: Annotated[
        list[str] | None, _server("--allowed-origins", help="For other sites' pages (repeatable).")
    ] = None
    page: Annotated[bool | None, _server("--page/--no-page", help="The page at /.")] = None
    enable_force_include_usage: Annotated[
        bool | None, _server("--enable-force-include-usage", help="Usage in every stream.")
    ] = None
    enable_log_requests: Annotated[
        bool | None,
        _server("--enable-log-requests/--disable-log-requests", help="A line a request."),
    ] = None
    uvicorn_log_level: Annotated[
        str | None, _server("--uvicorn-log-level", "--log-level", help="[default: info]")
    ] = None
    ssl_keyfile: Annotated[str | None, _server("--ssl-keyfile", help="For TLS.")] = None
    ssl_certfile: Annotated[str | None, _server("--ssl-certfile", help="For TLS.")] = None
    root_path: Annotated[str | None, _server("--root-path", help="Behind a proxy.")] = None

    def merged(self, file: Mapping[str, Any]) -> dict[str, Any]:
        """What was said, options first, then the file."""
        said = {f.name: file[f.name] for f in fields(self) if f.name in file}
        for name in ("api_key", "served_model_name", "allowed_origins"):
            if isinstance(said.get(name), str):
                said[name] = [said[name]]
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return said | {name: value for name, value in own.items() if value is not None}


_LOGS = Missing((None, False, True), "Logs are JSON lines, one for each request.")
_ONE = Missing((None, 1), "One process serves one model; put a proxy before several.")
MISSING: Mapping[str, Missing] = {
    **arguments.MISSING,
    "disable_uvicorn_access_log": _LOGS,
    "max_log_len": Missing((None,), "Prompts are not logged."),
    "log_config_file": Missing((None,), "Logs are JSON lines on stderr."),
    "disable_fastapi_docs": Missing((None, True, False), "There are none."),
    "enable_server_load_tracking": Missing((None, True), "The load is always counted: /load."),
    "enable_prompt_tokens_details": Missing((None, True), "Usage always has the details."),
    "enable_request_id_headers": Missing((None, True), "Every response has X-Request-Id."),
    "return_tokens_as_token_ids": Missing((None, False), "Requests say it themselves."),
    "allow_credentials": Missing((None, False), "Other sites' pages must send a key."),
    "allowed_methods": Missing((None,), "GET and POST are allowed to --allowed-origins."),
    "allowed_headers": Missing((None,), "What the API reads is allowed to --allowed-origins."),
    "middleware": Missing((None, []), "Put a proxy in front."),
    "ssl_ca_certs": Missing((None,), "Let a proxy check the certificates of clients."),
    "lora_modules": Missing((None, []), "Merge the adapter into the model's weights."),
    "chat_template_content_format": Missing((None, "auto", "string"), "Parts are joined to text."),
    "structured_outputs_config": Missing((None,), "Grammars are llguidance's."),
    "per_request_spec_decode_metrics": Missing(
        (None, "none"), "Requests ask with speculation_metrics."
    ),
    "stream_interval": Missing((None, 1), "A piece is sent for every step."),
    "api_server_count": _ONE,
    "headless": Missing((None, False), "The engine and its routes are one process."),
}
_OWN_NAMES = {
    "api_key": "api_keys",
    "tool_call_parser": "tool_parser",
    "enable_force_include_usage": "force_include_usage",
    "enable_log_requests": "log_requests",
}
_LLM_NAMES = ("chat_template", "scheduling_policy", "max_logprobs", "seed")
_LISTEN = ("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "root_path")


def settings_of(said: Mapping[str, Any], model: str) -> ServerSettings:
    """ServerSettings of what was said.

    Raises:
        ValueError: a value is out of range.
    """
    from foretell.server.settings import ServerSettings

    known = {f.name for f in fields(ServerSettings)}
    given = {_OWN_NAMES.get(name, name): value for name, value in said.items()}
    given = {name: value for name, value in given.items() if name in known}
    for name in ("api_keys", "allowed_origins"):
        if name in given:
            given[name] = tuple(str(one) for one in given[name])
    variables = (os.environ.get(name) for name in KEY_VARIABLES)
    given.setdefault("api_keys", tuple(key for key in variables if key)[:1])
    if given.get("tool_parser") == "none":
        given["tool_parser"] = None
    names = tuple(str(name) for name in said.get("served_model_name") or (model,))
    return ServerSettings(model_names=names, **given)


def open_server(
    engine: EngineOptions, options: ServeOptions, model: str | None
) -> tuple[LLM, ServerSettings, dict[str, Any]]:
    """The model, the settings, and all that was said.

    Raises:
        ValueError: an option or a key of the file is wrong.
        ImportError: the extra `serve` is not installed.
    """
    try:
        import fastapi
        import prometheus_client
        import uvicorn
    except ImportError as error:
        raise ImportError(f"{EXTRA} ({error.name} is missing)") from None
    del fastapi, prometheus_client, uvicorn
    from foretell.cli import fetch, notes_on_stderr, progress
    from foretell.llm import LLM
    from foretell.model.hub import DEFAULT_MODEL

    if model is not None and engine.model not in (None, model):
        raise ValueError(f"the model was named twice: {model!r} and --model {engine.model!r}")
    engine = replace(engine, model=model or engine.model)
    file = {} if engine.config is None else read_config(engine.config)
    said = options.merged(file)
    own = [f.name for f in fields(ServeOptions) if f.name not in _LLM_NAMES]
    given = {name: value for name, value in engine.arguments().items() if name not in own}
    given |= {name: said[name] for name in _LLM_NAMES if name in said}
    settings = settings_of(said, str(given.get("model") or DEFAULT_MODEL))
    fetch(given.get("model"), given.get("revision"))
    with progress() as tell, notes_on_stderr():
        tell(f"loading {given.get('model') or DEFAULT_MODEL}")
        return LLM(**given), settings, said


def serve(
    engine: EngineOptions,
    options: ServeOptions,
    served: Annotated[
        list[str] | None,
        Argument(metavar="MODEL", help="Directory, GGUF file or hub name.", show_default=False),
    ] = None,
) -> None:
    """Serve a model to OpenAI clients, with a page at /."""
    llm, settings, said = open_server(engine, options, named_model(served or ()))
    from foretell.server.run import Listen, serve

    listen = Listen(
        **{name: said[name] for name in _LISTEN if name in said},
        log_level=str(said.get("uvicorn_log_level", "info")),
    )
    where = f"unix:{listen.uds}" if listen.uds else f"http://{listen.host}:{listen.port}"
    print(f"foretell: serving {settings.model_names[0]} at {where}", file=sys.stderr, flush=True)
    code = serve(llm.parts(), settings, listen)
    if code:
        raise typer.Exit(code)


def batch(
    engine: EngineOptions,
    options: ServeOptions,
    source: Annotated[Path, Argument(metavar="IN.JSONL", help="Requests, in OpenAI's format.")],
    target: Annotated[Path, Argument(metavar="OUT.JSONL", help="Where the answers go.")],
) -> None:
    """Answer a batch file without a server; a run that was stopped goes on where it was."""
    llm, settings, _ = open_server(engine, options, None)
    from foretell.server.batch import BatchRun
    from foretell.server.state import build_server

    count = BatchRun(build_server(llm.parts(), settings)).run(source, target)
    said = f"{count.answered} answered, {count.failed} refused or failed"
    print(f"foretell: {said}, {count.skipped} were answered before: {target}", file=sys.stderr)


def named_model(given: Sequence[str]) -> str | None:
    """The model among words that are no option of ours.

    Options that only vLLM has are accepted where they say what is so anyway, else refused with what to do instead.

    Raises:
        ValueError: names the option, or there are several models.
    """
    models, place = list[str](), 0
    while place < len(given):
        word = given[place]
        place += 1
        if not word.startswith("-"):
            models.append(word)
            continue
        name, sign, value = word.partition("=")
        key = name.lstrip("-").replace("-", "_")
        missing = MISSING.get(key.removeprefix("no_"))
        if missing is None:
            known = [f.name for group in (ServeOptions, EngineOptions) for f in fields(group)]
            refuse_unknown("foretell serve", [key], known)
            raise ValueError(f"{name} needs a value")
        said: object = not key.startswith("no_")
        if sign or (place < len(given) and not any(isinstance(off, bool) for off in missing.off)):
            said = _read(value if sign else given[place])
            place += not sign
        if said not in missing.off:
            raise ValueError(f"{name} {said} is not supported. {missing.remedy}")
    if len(models) > 1:
        raise ValueError(f"one model can be served, got {' and '.join(map(repr, models))}")
    return models[0] if models else None


def _read(text: str) -> object:
    """A value of the command line as YAML reads it."""
    import yaml  # type: ignore[import-untyped]

    return yaml.safe_load(text)


def register(app: typer.Typer) -> None:
    """Add both commands."""
    foreign = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("serve", context_settings=foreign)(flatten(_guarded(serve)))
    app.command("batch")(flatten(_guarded(batch)))


def _guarded(function: Any) -> Any:
    @wraps(function)
    def guarded(*args: Any, **values: Any) -> None:
        from foretell.cli import errors_as_lines  # here, since cli.py imports the commands

        with errors_as_lines():
            function(*args, **values)

    return guarded
