"""From a checked body to jobs: prompts are rendered and tokenised, sampling parameters made, constraints compiled.

Everything here may take a while (a huge prompt, a large schema), so it runs in worker threads, never in the event loop.
Nothing is queued here.

Invariant: whatever is wrong with a request is an ApiError with status 400 or 404 that names the field.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from foretell.jobs import Job, Limits, make_jobs
from foretell.llm import LLMParts
from foretell.prompts import ChatOptions, Prompt, encode_chat
from foretell.sampling_params import RequestOutputKind, SamplingParams
from foretell.server.errors import ApiError, from_value_error
from foretell.server.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    Message,
    NamedTool,
    TokenizeRequest,
    Tool,
)
from foretell.server.settings import ServerSettings
from foretell.server.tools import call_schema, calls_schema
from foretell.spec.grammar import Tokenizer as GrammarTokenizer
from foretell.structured_outputs import StructuredOutputsParams
from foretell.text import TokenText

_PLAIN = [
    "n",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "speculate",
    "num_speculative_tokens",
    "report_drafts",
]
_FIELDS = tuple(f.name for f in fields(SamplingParams))
_TEMPLATE_OWN = frozenset(
    [
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be queued."""

    jobs: tuple[Job, ...]
    prefix: str = ""  # text that `echo` puts in front of an answer to a conversation


class Asker:
    """Reads requests for one engine; any thread may call it.

    Args:
        parts: of the LLM that is served.
    """

    def __init__(self, parts: LLMParts, settings: ServerSettings) -> None:
        self.settings = settings
        self.defaults = parts.defaults
        engine = parts.driver.engine
        self.limits = Limits(
            engine.vocab_size,
            engine.max_model_len,
            parts.config.max_logprobs,
            priorities=parts.config.scheduling_policy == "priority",
        )
        self.text = TokenText(copy.deepcopy(parts.tokenizer))  # the engine's thread has its own
        self._template = parts.chat_template
        self._grammars = engine.grammars
        self._lock = threading.Lock()
        self._longest = max((len(t) for t in self._vocabulary()), default=1)

    @property
    def template(self) -> str:
        """The chat template in force, "" without one."""
        own = self.text.tokenizer.chat_template
        return self._template or (own if isinstance(own, str) else json.dumps(own or ""))

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: the model is another one.
        """
        names = self.settings.model_names
        if name is not None and name not in names:
            raise ApiError(404, f"The model `{name[:200]}` does not exist.", "model")
        return name or names[0]

    def completion(self, body: CompletionRequest) -> Asked:
        """Jobs of POST /v1/completions, one per prompt."""
        self._check_common(body)
        texts = _prompts(body.prompt)
        if not texts:
            raise ApiError(400, "prompt is empty: give a text or at least one token id.", "prompt")
        if len(texts) > self.settings.max_prompts:
            raise ApiError(
                400, f"prompt: at most {self.settings.max_prompts} prompts at once.", "prompt"
            )
        special = body.add_special_tokens is not False
        prompts = [self._cut(self.encode(one, special), body) for one in texts]
        extra: dict[str, Any] = {"logprobs": body.logprobs}
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            extra["prompt_logprobs"] = body.logprobs
        return Asked(self._jobs(body, prompts, extra, "prompt"))

    def chat(self, body: ChatRequest) -> Asked:
        """The job of POST /v1/chat/completions."""
        self._check_common(body)
        prompt = self._cut(self._conversation(body), body)
        extra: dict[str, Any] = {"max_tokens": body.max_completion_tokens or body.max_tokens}
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true.", "top_logprobs")
        if body.logprobs:
            extra["logprobs"] = body.top_logprobs or 0
        if body.tools and self.settings.tool_parser == "mistral":
            extra["skip_special_tokens"] = False  # the sign that starts its calls is one
        prefix = ""
        if body.echo and isinstance(body.messages[-1].content, str):
            prefix = body.messages[-1].content
        return Asked(self._jobs(body, [prompt], extra, "messages"), prefix)

    def tokens(self, body: TokenizeRequest) -> tuple[int, ...]:
        """The tokens of POST /tokenize."""
        if body.prompt is not None:
            return self.encode(body.prompt, body.add_special_tokens is not False).token_ids
        assert body.messages is not None
        options = ChatOptions(
            self._template,
            body.add_generation_prompt and not body.continue_final_message,
            body.continue_final_message,
            _tools(body.tools),
            _template_arguments(body.chat_template_kwargs),
        )
        return self._render(body.messages, options).token_ids

    def encode(self, given: str | list[int], special: bool) -> Prompt:
        """A text or ids as a prompt."""
        if not isinstance(given, str):
            return Prompt(None, tuple(given))
        self._check_length(given, "prompt")
        with self._lock:
            ids = tuple(self.text.tokenizer.encode(given, add_special_tokens=special))
        return Prompt(given, ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of POST /detokenize."""
        wrong = next((i for i in ids if not 0 <= i < self.limits.vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"tokens: id {wrong} is out of vocabulary.", "tokens")
        return self.text.decode(ids)

    # Parts of a request.

    def _check_common(self, body: Common) -> None:
        if body.n is not None and body.n > self.settings.max_n:
            raise ApiError(400, f"n must be at most {self.settings.max_n}, got {body.n}.", "n")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise ApiError(
                400,
                "best_of must be n: answers are not ranked here; rank them yourself.",
                "best_of",
            )
        if body.length_penalty not in (None, 1.0):
            raise ApiError(
                400, "length_penalty is for beam search, which is not available.", "length_penalty"
            )
        if body.stream_options is not None and not body.stream:
            raise ApiError(
                400, "Stream options can only be defined when `stream=True`.", "stream_options"
            )
        if abs(body.priority) >= 1 << 62:
            raise ApiError(400, "priority must be a 63-bit integer.", "priority")
        if body.structured_outputs is not None and body.response_format is not None:
            raise ApiError(
                400, "give response_format or structured_outputs, not both.", "response_format"
            )

    def _jobs(
        self, body: Common, prompts: Sequence[Prompt], extra: Mapping[str, Any], place: str
    ) -> tuple[Job, ...]:
        given = {name: getattr(body, name) for name in _PLAIN} | dict(extra)
        chat = isinstance(body, ChatRequest)
        try:
            wanted = self._constraint(body)
            base = replace(self.defaults, max_tokens=None) if chat else self.defaults
            params = replace(
                base,
                **{name: value for name, value in given.items() if value is not None},
                structured_outputs=wanted,
                output_kind=RequestOutputKind.DELTA
                if body.stream
                else RequestOutputKind.FINAL_ONLY,
            )
            if wanted is not None:
                self._compile(wanted)
            priority = [body.priority] * len(prompts)
            return tuple(make_jobs(prompts, params, priority, self.limits))
        except ValueError as error:
            raise from_value_error(error, (*_FIELDS, "priority", place), place) from error
        except OverflowError as error:
            raise ApiError(400, f"a number is out of range: {error}") from error

    def _compile(self, wanted: StructuredOutputsParams) -> None:
        if self._grammars is None:
            raise ValueError("structured_outputs needs a tokenizer, and this engine has none")
        try:
            self._grammars.compile(wanted)
        except ImportError as error:
            raise ApiError(501, str(error), "structured_outputs") from error

    def _constraint(self, body: Common) -> StructuredOutputsParams | None:
        after = (
            "</think>" if self.settings.reasoning_parser and isinstance(body, ChatRequest) else None
        )
        given = body.structured_outputs
        if given is not None:
            return StructuredOutputsParams(
                given.json_schema,
                given.regex,
                given.choice,
                given.grammar,
                given.json_object,
                begins_after=after,
            )
        if isinstance(body, ChatRequest) and body.tools:
            forced = _forced_schema(body)
            if forced is not None:
                return StructuredOutputsParams(json=forced, begins_after=after)
        wanted = body.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return StructuredOutputsParams(json_object=True, begins_after=after)
        assert wanted.json_schema is not None
        return StructuredOutputsParams(json=wanted.json_schema.schema_, begins_after=after)

    def _conversation(self, body: ChatRequest) -> Prompt:
        template = self._template
        if body.chat_template is not None:
            if not self.settings.trust_request_chat_template:
                raise ApiError(
                    400,
                    "chat_template: templates in requests are not accepted; start the server with "
                    "--trust-request-chat-template to accept them.",
                    "chat_template",
                )
            template = body.chat_template
        named = isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required"
        if named and not body.tools:
            raise ApiError(400, "tool_choice needs tools.", "tool_choice")
        arguments = _template_arguments(body.chat_template_kwargs)
        if body.documents is not None:
            arguments["documents"] = body.documents
        if body.reasoning_effort is not None:
            arguments["reasoning_effort"] = body.reasoning_effort
        tools = None if body.tool_choice == "none" else _tools(body.tools)
        try:
            options = ChatOptions(
                template,
                body.add_generation_prompt,
                body.continue_final_message,
                tools,
                arguments,
            )
        except ValueError as error:
            raise ApiError(400, str(error), "add_generation_prompt") from error
        return self._render(body.messages, options)

    def _render(self, messages: Sequence[Message], options: ChatOptions) -> Prompt:
        plain = [_plain(message) for message in messages]
        self._check_length("".join(_texts(plain)), "messages")
        try:
            with self._lock:
                prompt = encode_chat(plain, self.text.tokenizer, options, "messages")
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
        return prompt

    def _cut(self, prompt: Prompt, body: Common) -> Prompt:
        keep = body.truncate_prompt_tokens
        if keep is None:
            return prompt
        if keep == -1:
            keep = self.limits.max_model_len - 1
        if not 1 <= keep < self.limits.max_model_len:
            raise ApiError(
                400,
                f"truncate_prompt_tokens must be -1 or in [1, {self.limits.max_model_len - 1}], got {keep}.",
                "truncate_prompt_tokens",
            )
        return Prompt(prompt.text, prompt.token_ids[-keep:])

    def _check_length(self, text: str, param: str) -> None:
        """Refuse what cannot fit before it is tokenised."""
        most = self.limits.max_model_len * self._longest
        if len(text) > most:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.limits.max_model_len} tokens, but {param} has "
                f"{len(text)} characters, which are more tokens than that. Shorten it.",
                param,
            )

    def _vocabulary(self) -> Sequence[str]:
        tokenizer = cast("GrammarTokenizer", self.text.tokenizer)
        return tuple(tokenizer.get_vocab())


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several; a list of integers is one."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    return list(cast("list[str | list[int]]", given))


def _forced_schema(body: ChatRequest) -> dict[str, Any] | None:
    """What an answer must be when a tool has to be called."""
    assert body.tools is not None
    functions = [tool.function for tool in body.tools]
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        chosen = next((f for f in functions if f.name == name), None)
        if chosen is None:
            raise ApiError(
                400, f"tool_choice names {name!r}, which is not in tools.", "tool_choice"
            )
        return call_schema(chosen.parameters)
    if body.tool_choice == "required":
        return calls_schema([(f.name, f.parameters) for f in functions])
    return None


def _tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def _template_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    own = sorted(_TEMPLATE_OWN & set(given or ()))
    if own:
        raise ApiError(
            400, f"chat_template_kwargs must not set {own[0]!r}.", "chat_template_kwargs"
        )
    return dict(given or {})


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: arguments of calls as objects, unset fields left out."""
    plain = message.model_dump(exclude_unset=True)
    for call in plain.get("tool_calls") or ():
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise ApiError(
                400, "messages: the arguments of a tool call are not JSON.", "messages"
            ) from None
        call["function"]["arguments"] = arguments
    return plain


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                found.append(text)
    return found
