"""Settings of the server itself; the engine's are EngineConfig. Plain data, without the web libraries.

Invariant: an instance is valid; every limit is finite or None, and None means no limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ToolParser = Literal["auto", "hermes", "llama3_json", "mistral"]
ReasoningParser = Literal["qwen3", "deepseek_r1"]
Prefix = Literal["foretell:", "vllm:"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How requests are taken in.

    Args:
        model_names: names that requests may call the model by; the first is the one shown.
        api_keys: any of them opens the guarded routes; () = no key is asked for.
        max_queue: requests that may wait for a slot before more are refused with 503.
        max_body_bytes: largest request body.
        body_timeout: seconds for a request to arrive.
        request_timeout: seconds for a request to be answered; None = no limit.
        max_json_depth: deepest nesting of a body.
        max_n, max_prompts: answers per prompt and prompts per request.
        trust_request_chat_template: requests may bring a chat template.
        drain_timeout: seconds that running requests get after SIGTERM.
        metrics_prefix: of every name at /metrics.
        tool_parser, reasoning_parser: how calls and thoughts are found in the text; None = they stay text.
        response_role: of answers.
        page: serve the page at /.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_queue: int = 1024
    max_body_bytes: int = 8 * MIB
    body_timeout: float = 30.0
    request_timeout: float | None = None
    max_json_depth: int = 64
    max_n: int = 128
    max_prompts: int = 1024
    trust_request_chat_template: bool = False
    drain_timeout: float = 120.0
    metrics_prefix: Prefix = "foretell:"
    tool_parser: ToolParser | None = "auto"
    reasoning_parser: ReasoningParser | None = None
    response_role: str = "assistant"
    page: bool = True
    allowed_origins: tuple[str, ...] = ()
    log_requests: bool = True
    force_include_usage: bool = False
    death_grace: float = 5.0  # seconds that /health says what happened before the process ends

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError("served_model_name must name the model, and no name may be empty")
        if not all(self.api_keys):
            raise ValueError("api_key must not be empty; leave it out to serve without a key")
        for name in ("max_queue", "max_body_bytes", "max_json_depth", "max_n", "max_prompts"):
            low = 0 if name == "max_queue" else 1
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("body_timeout", "drain_timeout", "request_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        for name, known in (
            ("tool_parser", get_args(ToolParser)),
            ("reasoning_parser", get_args(ReasoningParser)),
            ("metrics_prefix", get_args(Prefix)),
        ):
            value = getattr(self, name)
            if value not in known and not (value is None and name != "metrics_prefix"):
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
