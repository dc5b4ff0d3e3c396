"""Request bodies, as OpenAI and vLLM name their fields; ours are `speculate`, `num_speculative_tokens`,
`speculation_metrics` and `report_drafts`.

Types and shapes only: ranges are SamplingParams' to check, so that both APIs refuse alike. A field that is not known is
refused: nothing is ignored in silence but what says who asks (`user`, `metadata`, ...).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Strings = list[str]
Ids = list[int]
MAX_LIST = 4096


class Strict(BaseModel):
    """No coercion between JSON's types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Strict):
    """What a stream says besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Strict):
    """vLLM's name for constraints; exactly one of them."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchema(BaseModel):
    """The schema of a response_format."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's name for constraints."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (
            self.json_schema is None or self.json_schema.schema_ is None
        ):
            raise ValueError("response_format of type json_schema needs json_schema.schema")
        return self


class Common(Strict):
    """What both kinds of completion take."""

    model: str | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ids | None = Field(default=None, max_length=MAX_LIST)
    bad_words: Strings | None = Field(default=None, max_length=MAX_LIST)
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    echo: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0
    request_id: str | None = Field(default=None, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Speculation, per request.
    speculate: bool | None = None
    num_speculative_tokens: int | None = None
    speculation_metrics: Literal["none", "summary", "detailed"] = "none"
    report_drafts: bool = False
    # Who asks, and what changes nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Beam search and the like: only their neutral values.
    best_of: int | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: float | None = None


class Part(BaseModel):
    """A part of a message; only text is understood."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None


class FunctionCall(Strict):
    """A call that an earlier answer made."""

    name: str
    arguments: str


class ToolCall(Strict):
    """The same, with its id."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(BaseModel):
    """One message; templates may read more fields than these."""

    model_config = ConfigDict(extra="allow")
    role: str = Field(min_length=1, max_length=64)
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Strict):
    """A function that may be called."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """The same, as OpenAI wraps it."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by name."""

    name: str


class NamedTool(Strict):
    """The same, as OpenAI wraps it."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_LIST)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: str | Strings | Ids | list[Ids]
    logprobs: int | None = None
    suffix: Literal[""] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, max_length=MAX_LIST)
    tools: list[Tool] | None = Field(default=None, max_length=128)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("tokenize needs either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids = Field(max_length=1 << 20)
