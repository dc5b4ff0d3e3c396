"""Requests made up from the OpenAPI document find no 5xx, and every error is the OpenAI error object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from serving_lab import MODEL, Live, start, tiny_llm

from foretell.server.app import build_app
from foretell.server.settings import ServerSettings
from foretell.server.state import build_server

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Live]:
    server = start(max_n=4, max_prompts=4, request_timeout=20)
    yield server
    server.idle()
    server.close()


def document() -> Any:
    """The OpenAPI document, from an application that does not listen."""
    server = build_server(tiny_llm().parts(), ServerSettings(model_names=(MODEL,)))
    return build_app(server).inner.openapi()  # type: ignore[attr-defined]


schema = schemathesis.openapi.from_dict(document())
statuses: dict[str, set[int]] = {}


@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case: Any, fuzzed: Live) -> None:
    if isinstance(case.body, dict):
        if case.path.startswith("/v1/") and not isinstance(case.body.get("max_tokens"), int):
            case.body["max_tokens"] = 4  # else an answer may be as long as the context
        if len(case.body) % 2:
            case.body["model"] = MODEL  # else nearly all end at the name
    answer = case.call(base_url=fuzzed.url, timeout=30)
    statuses.setdefault(case.path, set()).add(answer.status_code)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_the_requests_were_not_all_refused() -> None:
    """Else the test above would say nothing of the routes behind the checks."""
    if not statuses:
        pytest.skip("the test before this one did not run")
    assert 400 in statuses["/v1/completions"]
    for path in ("/v1/models", "/tokenize", "/detokenize", "/health"):
        assert 200 in statuses[path], path
    print(statuses)
