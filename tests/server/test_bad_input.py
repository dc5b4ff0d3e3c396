"""Every malformed request gets the OpenAI error object with a 4xx that names the parameter; limits hold."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest
from serving_lab import MODEL, Live, start

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def post(live: Live, path: str, **body: object) -> httpx.Response:
    return httpx.post(live.url + path, json=body, timeout=30)


def refused(answer: httpx.Response, param: str | None, status: int = 400) -> str:
    """The message of an error that names `param`."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    return str(error["message"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 1 << 80}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 100}, "logprobs"),
        ({"prompt_logprobs": 100}, "prompt_logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options.x"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "x"}]}, "tools[0].type"),
        ({"priority": 3}, "priority"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"speculate": "yes"}, "speculate"),
        ({"request_id": "a b"}, "request_id"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "add_generation_prompt"),
        ({"temprature": 1}, "temprature"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
def test_a_wrong_parameter_is_named(live: Live, body: dict[str, object], param: str) -> None:
    refused(post(live, CHAT, **({"model": MODEL, "messages": MESSAGES} | body)), param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [70000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x" * 500}, "prompt"),
        ({"prompt": "x" * 900_000}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": -5}, "logprobs"),
        ({}, "prompt"),
    ],
)
def test_a_wrong_prompt_is_named(live: Live, body: dict[str, object], param: str) -> None:
    answer = post(live, TEXT, **body)
    said = refused(answer, answer.json()["error"]["param"])
    assert str(answer.json()["error"]["param"]).startswith(param), said


@pytest.mark.parametrize("length", range(190, 203))
def test_the_context_limit_is_exact(live: Live, length: int) -> None:
    """R39: prompts up to one below the limit get the rest of the room; longer ones are refused."""
    prompt = [5] * length
    answer = post(live, TEXT, prompt=prompt, max_tokens=100, ignore_eos=True)
    if length >= 200:
        assert "maximum context length is 200" in refused(answer, "prompt")
    else:
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 200 - length
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"a":' * 100_000,
        b"[" * 5000 + b"]" * 5000,
        b'{"messages":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"seed": ' + b"9" * 10_000 + b"}",
        b'{"messages": [], "temperature": NaN}',
    ],
)
def test_what_is_no_request_is_refused(live: Live, body: bytes) -> None:
    answer = httpx.post(
        live.url + CHAT, content=body, headers={"content-type": "application/json"}, timeout=30
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "BadRequestError"


def test_a_body_that_is_too_large_is_refused_unread(live: Live) -> None:
    answer = httpx.post(live.url + CHAT, content=b"x" * (2 << 20))
    refused(answer, None, 413)

    def pieces():
        for _ in range(40):
            yield b" " * (1 << 16)

    try:
        answer = httpx.post(live.url + CHAT, content=pieces())
        refused(answer, None, 413)
    except httpx.WriteError:
        pass  # the server has closed the connection already


def raw(live: Live, text: bytes, wait: float = 5.0) -> bytes:
    """What the server answers to bytes."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=wait) as connection:
        connection.sendall(text)
        found = b""
        while True:
            try:
                got = connection.recv(65536)
            except (TimeoutError, ConnectionResetError):
                return found
            if not got:
                return found
            found += got


def test_a_request_that_never_ends_is_given_up(live: Live) -> None:
    start_at = time.monotonic()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    answer = raw(live, head + b"Content-Length: 100\r\n\r\n{", wait=10)
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert time.monotonic() - start_at < 8


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
        b"Content-Length: +4\r\n",
        b"Content-Length: 4, 4\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Content-Length : 4\r\n",
        b"X-Bad: a\r\n b\r\n\tc: d\r\nContent-Length: 99999999999999999999\r\n",
    ],
)
def test_a_request_that_lies_about_its_length_is_refused(live: Live, headers: bytes) -> None:
    smuggled = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    text = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n0\r\n\r\n" + smuggled
    answer = raw(live, text, wait=4)
    assert b"prompt_tokens_total" not in answer, "the second request was answered"
    assert answer.split(b" ")[1][:1] == b"4"


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/app.js/../../server/app.py",
        "/page/index.html",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/style.css",
        "//etc/passwd",
    ],
)
def test_no_path_leads_to_a_file(live: Live, path: str) -> None:
    answer = raw(live, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert b" 404 " in answer.split(b"\r\n")[0]
    assert b"root:" not in answer
    assert b'"error"' in answer


def test_wrong_methods_and_paths_are_errors_too(live: Live) -> None:
    assert httpx.get(live.url + CHAT).json()["error"]["code"] == 405
    assert httpx.post(live.url + "/v1/nothing", json={}).json()["error"]["code"] == 404


def test_a_template_that_refuses_is_the_client_s_fault(live: Live) -> None:
    tool = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    said = refused(post(live, CHAT, messages=[*MESSAGES, tool]), "messages")
    assert "not JSON" in said


def test_a_request_id_is_kept_if_it_is_harmless(live: Live) -> None:
    kept = httpx.get(live.url + "/health", headers={"x-request-id": "abc-1.2"})
    assert kept.headers["x-request-id"] == "abc-1.2"
    odd = httpx.get(live.url + "/health", headers={"x-request-id": 'a"b {}'})
    assert odd.headers["x-request-id"] != 'a"b {}'


def test_errors_repeat_little_of_what_was_sent(live: Live) -> None:
    answer = post(live, CHAT, messages=MESSAGES, model="m" * 100_000)
    assert len(answer.text) < 2000
    answer = post(live, CHAT, messages=MESSAGES, response_format={"type": "x" * 100_000})
    assert len(answer.text) < 3000


def test_keys_are_asked_for_and_nothing_leaks() -> None:
    live = start(api_keys=("secret-one", "secret-two"))
    try:
        body = {"prompt": "a", "max_tokens": 1}
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic secret-one"},
            {"authorization": "secret-one"},
            {"authorization": "Bearer secret-one2"},
            {"authorization": "Bearer secret-on"},
        ):
            for path in (
                TEXT,
                "/tokenize",
                "/v1/models",
                "/stats",
                "/server_info",
                "/openapi.json",
            ):
                answer = httpx.post(live.url + path, json=body, headers=headers)
                assert refused(answer, None, 401) == "Unauthorized"
                assert "secret" not in answer.text + str(answer.headers)
        for key in ("secret-one", "secret-two"):
            good = {"authorization": f"Bearer {key}"}
            assert httpx.post(live.url + TEXT, json=body, headers=good).status_code == 200
        for path in ("/health", "/ping", "/version", "/metrics", "/"):
            assert httpx.get(live.url + path).status_code == 200
        shown = httpx.get(live.url + "/server_info", headers={"authorization": "Bearer secret-one"})
        assert "secret" not in shown.text
    finally:
        live.close()


def test_a_regex_bomb_does_not_stop_the_others(live: Live) -> None:
    bombs = ["(.*a){400}b", "((((a{1,90}){1,90}){1,90}){1,90}){1,90}", "(x+x+)+y" * 50]
    for bomb in bombs:
        begin = time.monotonic()
        answer = post(live, TEXT, prompt="a", max_tokens=2, structured_outputs={"regex": bomb})
        assert answer.status_code in (200, 400), answer.text
        assert time.monotonic() - begin < 20
    assert httpx.get(live.url + "/health").status_code == 200
    deep: dict[str, object] = {"type": "object"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    answer = post(live, TEXT, prompt="a", max_tokens=2, structured_outputs={"json": deep})
    assert answer.status_code == 400
    assert "nested" in json.dumps(answer.json())
