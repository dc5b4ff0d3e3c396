"""Batch files: every line gets one line, a stopped run goes on, wrong lines are answered with errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving_lab import MODEL, drafting, tiny_llm

from foretell.sampling_params import SamplingParams
from foretell.server.batch import BatchRun
from foretell.server.settings import ServerSettings
from foretell.server.state import Server, build_server
from foretell.spec.tree import chain

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def server() -> Server:
    llm = tiny_llm(drafting(0), chain(3), max_num_seqs=2)
    return build_server(llm.parts(), ServerSettings(model_names=(MODEL,)))


def line(name: str, url: str = TEXT, **body: object) -> dict[str, object]:
    asked = {"max_tokens": 6, "seed": 1, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def read(path: Path) -> dict[str, dict]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {one["custom_id"]: one["response"] for one in found}
    assert len(by_id) == len(found), "a line was answered twice"
    return by_id


def test_every_line_is_answered_as_a_server_would(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        *(line(f"r{i}", prompt=f"p{i}") for i in range(7)),
        line("chat", CHAT, messages=[{"role": "user", "content": "hi"}], stream=True),
        line("wrong", prompt="a", temperature=-1),
        line("odd", prompt="a", nonsense=1),
        line("other", prompt="a", model="gpt"),
    )
    count = BatchRun(server()).run(source, tmp_path / "out.jsonl")
    found = read(tmp_path / "out.jsonl")
    assert (count.answered, count.failed, count.skipped) == (8, 3, 0)
    with tiny_llm() as llm:
        for i in range(7):
            params = SamplingParams(max_tokens=6, seed=1)
            text = llm.generate(f"p{i}", params, False)[0].outputs[0].text
            assert found[f"r{i}"]["body"]["choices"][0]["text"] == text
    assert found["chat"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert found["wrong"]["status_code"] == 400
    assert found["wrong"]["body"]["error"]["param"] == "temperature"
    assert found["odd"]["body"]["error"]["param"] == "nonsense"
    assert found["other"]["status_code"] == 404


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(line(f"r{i}", prompt=f"p{i}") for i in range(6)))
    target = tmp_path / "out.jsonl"
    run = BatchRun(server())
    pump, steps = run._driver.pump, 0

    def stopping() -> None:
        nonlocal steps
        steps += 1
        if steps > 6:
            raise KeyboardInterrupt
        pump()

    run._driver.pump = stopping  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.run(source, target)
    assert not run._driver.engine.has_work()
    before = target.read_text()
    done = before.count("\n")
    assert 0 < done < 6
    target.write_text(before + '{"custom_id": "r5", "respo')  # a line that was cut short
    count = BatchRun(server()).run(source, target)
    assert (count.answered, count.skipped) == (6 - done, done)
    assert set(read(target)) == {f"r{i}" for i in range(6)}
    assert BatchRun(server()).run(source, target).skipped == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "in.jsonl:1: the body is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"custom_id": 3}', "custom_id must be a text"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "only POST to"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": 3}', "body must be"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2, "in.jsonl:2: custom_id"),
    ],
)
def test_what_is_no_batch_is_refused_before_anything_runs(
    tmp_path: Path, text: str, said: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(ValueError, match=said):
        BatchRun(server()).run(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a", prompt="x"))
    target = tmp_path / "notes.txt"
    target.write_text("my notes\n")
    with pytest.raises(ValueError, match="name another output file"):
        BatchRun(server()).run(source, target)
    assert target.read_text() == "my notes\n"


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        BatchRun(server()).run(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
