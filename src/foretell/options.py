"""Options of the command line: LLM's arguments and SamplingParams' fields, each said once.

A command takes a whole group as one parameter; `flatten` turns the group's fields into options, so
that commands share them without repeating them. It opens no model and prints nothing.

Invariant: an option that is left out adds nothing, so LLM's own defaults hold.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, get_origin, get_type_hints

from typer import Option

from foretell.configfile import SPECULATION, read_config
from foretell.model.hub import DEFAULT_DRAFTER, DEFAULT_MODEL, HEADS
from foretell.sampling_params import SamplingParams

NGRAM_TOKENS = 7  # with the last token 8 rows, which cost a CPU's bf16 product what one row costs
ENGINE, SAMPLING = "Model and speculation", "Sampling"


def _engine(*names: str, help: str) -> Any:
    return Option(*names, help=help, rich_help_panel=ENGINE, show_default=False)


def _sampling(*names: str, help: str) -> Any:
    return Option(*names, help=help, rich_help_panel=SAMPLING)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """LLM's arguments as options; what is left out is as in the config file, else LLM's own default."""

    config: Annotated[
        str | None, _engine("--config", help="YAML file of LLM's arguments; options win over it.")
    ] = None
    model: Annotated[
        str | None,
        _engine("--model", "-m", help="Directory, GGUF file or hub name; else SmolLM2-135M."),
    ] = None
    speculate_model: Annotated[
        str | None,
        _engine("--speculate-model", "--spec-model", help="What drafts: a checkpoint of any kind."),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        _engine("--num-speculative-tokens", "--spec-tokens", help="Draft tokens per step."),
    ] = None
    spec_method: Annotated[
        str | None,
        _engine(
            "--spec-method",
            help="What drafts, by name, such as ngram; checkpoints say it themselves.",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        _engine(
            "--speculative-config", "-sc", help='All speculation keys, as JSON: {"method":...}'
        ),
    ] = None
    dtype: Annotated[str | None, _engine("--dtype", help="auto, float32, bfloat16 or float16.")] = (
        None
    )
    device: Annotated[str | None, _engine("--device", help="auto, cpu or cuda.")] = None
    max_model_len: Annotated[
        int | None, _engine("--max-model-len", help="Longest prompt plus answer, in tokens.")
    ] = None
    max_num_seqs: Annotated[
        int | None, _engine("--max-num-seqs", help="Requests that run at the same time.")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, _engine("--gpu-memory-utilization", help="Share of the memory to use.")
    ] = None
    tokenizer: Annotated[
        str | None, _engine("--tokenizer", help="Where the tokenizer comes from; else the model.")
    ] = None
    revision: Annotated[str | None, _engine("--revision", help="Of a hub model.")] = None
    max_num_batched_tokens: Annotated[
        int | None, _engine("--max-num-batched-tokens", help="Tokens per step.")
    ] = None
    block_size: Annotated[int | None, _engine("--block-size", help="Tokens per KV block.")] = None
    kv_cache_memory_bytes: Annotated[
        int | None, _engine("--kv-cache-memory-bytes", help="Size of the KV pool.")
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        _engine(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Keep the KV of prompts."
        ),
    ] = None
    enforce_eager: Annotated[
        bool | None, _engine("--enforce-eager", help="No compilation and no CUDA graphs.")
    ] = None
    deterministic: Annotated[
        bool | None,
        _engine("--deterministic", help="Sums whose order no batch changes. Slower."),
    ] = None
    compat: Annotated[
        str | None,
        _engine("--compat", help="How a drafter is proved at the start: off, shapes or full."),
    ] = None
    trace: Annotated[
        str | None,
        _engine("--trace", help="Write every verification to this file, as JSON lines."),
    ] = None
    tensor_parallel_size: Annotated[
        int | None, _engine("--tensor-parallel-size", "-tp", help="Devices to spread over: 1.")
    ] = None
    plain: bool = False  # not an option: no drafter, whatever was asked for

    @property
    def drafts(self) -> bool:
        """Some drafter was asked for."""
        return any(self.arguments().get(key) for key in ("speculate_model", "speculative_config"))

    @property
    def method(self) -> str:
        """The drafter's name, as far as the options tell: its method, else its checkpoint."""
        arguments = self.arguments()
        config = arguments.get("speculative_config") or {}
        named = config.get("method") or config.get("model") or arguments.get("speculate_model")
        return str(named or "none")

    def with_drafts(self) -> EngineOptions:
        """The same engine with a drafter: the one asked for, else the default model's own EAGLE-3 head.

        Other models get n-gram, which needs no weights.
        """
        if self.drafts:
            return self
        if self.model in (None, DEFAULT_MODEL) and (HEADS / DEFAULT_DRAFTER).is_dir():
            return replace(self, speculate_model=DEFAULT_DRAFTER)
        count = self.num_speculative_tokens or NGRAM_TOKENS
        return replace(self, spec_method="ngram", num_speculative_tokens=count)

    def without_drafts(self) -> EngineOptions:
        """The same engine, plain."""
        return replace(self, plain=True)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of LLM(...).

        Raises:
            ValueError: the config file cannot be read, --speculative-config is not a JSON object, or it says other
                than --spec-method.
        """
        given = {
            name: value
            for name, value in asdict(self).items()
            if value is not None and name not in ("config", "plain")
        }
        said = self._speculation(given)
        from_file = {} if self.config is None else read_config(self.config)
        if any(key in said for key in ("speculate_model", "speculative_config")):
            from_file = {k: v for k, v in from_file.items() if k not in SPECULATION}
        elif said and "speculative_config" in from_file:
            from_file["speculative_config"] = {**from_file["speculative_config"], **said}
            said = {}
        merged = {**from_file, **given, **said}
        return {k: v for k, v in merged.items() if not (self.plain and k in SPECULATION)}

    def _speculation(self, given: dict[str, Any]) -> dict[str, Any]:
        """Takes what speaks of speculation out of `given` and returns it in LLM's words."""
        method = given.pop("spec_method", None)
        text = given.pop("speculative_config", None)
        short = {key: given.pop(key) for key in SPECULATION if key in given}
        config = {} if text is None else _json_object("--speculative-config", text)
        if method is not None:
            if config.setdefault("method", method) != method:
                raise ValueError(
                    f"--spec-method {method} and --speculative-config method {config['method']} "
                    "disagree; give one of them"
                )
            for option, key in (("num_speculative_tokens",) * 2, ("speculate_model", "model")):
                if option in short:
                    config.setdefault(key, short.pop(option))
        return {**short, **({"speculative_config": config} if config else {})}


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The everyday fields of SamplingParams as options."""

    temperature: Annotated[
        float, _sampling("--temperature", "-t", help="0 takes the likeliest token.")
    ] = 0.0
    top_p: Annotated[float, _sampling("--top-p", help="Keep the likeliest mass.")] = 1.0
    top_k: Annotated[int, _sampling("--top-k", help="Keep the likeliest k; 0 is off.")] = 0
    min_p: Annotated[float, _sampling("--min-p", help="Drop below this share of the top.")] = 0.0
    max_tokens: Annotated[int, _sampling("--max-tokens", "-n", help="Longest answer.")] = 256
    min_tokens: Annotated[int, _sampling("--min-tokens", help="No end before that many.")] = 0
    seed: Annotated[int, _sampling("--seed", help="Same seed, same text.")] = 0
    stop: Annotated[
        list[str] | None, _sampling("--stop", help="End the answer at this text (repeatable).")
    ] = None
    repetition_penalty: Annotated[float, _sampling("--repetition-penalty", help="1 is off.")] = 1.0
    presence_penalty: Annotated[float, _sampling("--presence-penalty", help="0 is off.")] = 0.0
    frequency_penalty: Annotated[float, _sampling("--frequency-penalty", help="0 is off.")] = 0.0
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on after the end token.")] = (
        False
    )

    def params(self) -> SamplingParams:
        """The same as SamplingParams; raises its ValueErrors."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(self)})


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"""{option} is not JSON ({error}): {text!r}; write it like '{{"method": "ngram"}}'"""
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, got {text!r}")
    return value


def flatten(function: Callable[..., None]) -> Callable[..., None]:
    """The same command with each option group replaced by the group's fields, as typer reads them.

    Example: `generate(engine: EngineOptions, as_json: bool)` -> `generate(*, model, dtype, ..., as_json)`.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{key: values.pop(key) for key in _options(group)})
        function(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        own = [parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += _field_parameters(groups[name]) if name in groups else own
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _options(group: type) -> dict[str, Any]:
    """Name -> annotation of the fields that are options; a field without an Option is not one."""
    hints = get_type_hints(group, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is Annotated}


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    defaults = {f.name: f.default for f in fields(group)}
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint
        )
        for name, hint in _options(group).items()
    ]
