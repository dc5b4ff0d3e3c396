"""Prompt and answer files, spans, packing and masks: each rule pinned so that one off fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lab import make_lab, tiny_decoder

from foretell.sampling_params import SamplingParams
from foretell.training import answers
from foretell.training.answers import Job, complete, continue_file
from foretell.training.data import (
    Example,
    Header,
    draft_vocabulary,
    pack,
    read_answers,
    read_asked,
    to_line,
    token_counts,
)
from foretell.training.recipe import ahead, roots_ahead

GOOD = '{"id": "a", "turns": ["one\\u2028two", "later"]}'
HEADER = Header("0123", 96)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "line 2: the line is empty"),
        ('{"turns": ["cut', "line 2: not JSON"),
        ("[1]", "line 2: must be a JSON object"),
        ('{"turns": []}', "line 2: there is neither 'turns'"),
        ('{"messages": [{"content": "x"}]}', "line 2: 'messages' must be"),
    ],
)
def test_a_broken_line_is_named_by_number_and_stops_or_is_left_out(
    line: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, GOOD, line, '{"prompt": "three"}')
    with pytest.raises(ValueError, match=said):
        read_asked(path)
    found = read_asked(path, on_broken="skip")
    assert [one.messages[0]["content"] for one in found] == ["one\u2028two", "three"]
    assert said in caplog.text


def test_a_line_separator_inside_a_text_is_no_end_of_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False))
    assert read_asked(path)[0].messages[0]["content"] == "a\u2028b\u0085c"


def test_answers_of_another_template_or_vocabulary_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(HEADER.line() + to_line(Example("a", (1, 2, 3), ((1, 3),))))
    assert [e.tokens for e in read_answers(path, HEADER)] == [(1, 2, 3)]
    with pytest.raises(ValueError, match="another chat template"):
        list(read_answers(path, Header("9999", 96)))
    with pytest.raises(ValueError, match="vocabulary of 96, the target's has 97"):
        list(read_answers(path, Header("0123", 97)))


def test_a_cut_last_line_is_removed_and_the_rest_counts_as_answered(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    whole = HEADER.line() + to_line(Example("a", (1, 2), ((1, 2),)))
    path.write_text(whole + '{"id": "b", "spans": [[1')
    assert continue_file(path, HEADER) == {"a"}
    assert path.read_text() == whole
    assert continue_file(tmp_path / "new.jsonl", HEADER) == set()


def test_answers_are_the_engines_whatever_runs_beside_them() -> None:
    lab = make_lab(target=tiny_decoder(0))
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    jobs = [Job(str(i), (5 + i, 9, 20 + i), seed=i) for i in range(7)]
    found = {job.id: tokens for job, tokens in complete(lab.engine, iter(jobs), params, 3)}
    alone = make_lab(target=tiny_decoder(0))
    for job in jobs:
        assert found[job.id] == alone.solo(job.prompt, params).tokens


def test_a_full_disk_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Template:
        chat_template = "x"

    class Engine:
        vocab_size, max_model_len = 96, 64

    def two(*_: object) -> Iterator[tuple[Job, list[int]]]:
        yield Job("a", (1, 2), 0), [3, 4]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers, "complete", two)
    path = tmp_path / "answers.jsonl"
    with pytest.raises(OSError, match=r"No space left.*1 answers are kept"):
        answers.answer_file(path, [], Engine(), Template(), SamplingParams(), 1)  # type: ignore[arg-type]
    assert [e.id for e in read_answers(path)] == ["a"]


def test_only_the_assistants_tokens_of_the_same_document_count_at_their_exact_distance() -> None:
    first = Example("a", (10, 11, 12, 13, 14, 15), ((3, 6),))  # the assistant wrote 13, 14, 15
    second = Example("b", (20, 21, 22, 23), ((1, 3),))  # 21, 22; 23 is the template's
    packed = pack([first, second], 12)
    assert packed.tokens[0, :10].tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22, 23]
    # Row r predicts token r + distance.
    assert roots_ahead(packed, 1, 0).tolist() == [2, 3, 4, 6, 7]
    assert roots_ahead(packed, 2, 0).tolist() == [1, 2, 3, 6]  # none from the first document
    assert roots_ahead(packed, 1, 1).tolist() == [2, 3, 4, 7]  # entry 0 has no feature
    assert roots_ahead(packed, 12, 0).tolist() == []
    assert ahead(packed.tokens, 2)[0, :3].tolist() == [12, 13, 14]


def test_texts_without_assistant_tokens_in_reach_are_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="no assistant tokens are left"):
        pack([Example("a", tuple(range(9)), ((6, 9),))], 6)
    with pytest.raises(ValueError, match="no assistant tokens are left"):
        pack([Example("a", (1, 2), ())], 6)


def test_packing_loses_and_doubles_nothing() -> None:
    examples = [Example(str(i), tuple(range(3, 5 + i)), ((1, 2 + i),)) for i in range(20)]
    packed = pack(examples, 32)
    assert int((packed.documents >= 0).sum()) == sum(len(e.tokens) for e in examples)
    assert int(packed.assistant.sum()) == sum(1 + i for i in range(20))


def test_the_draft_vocabulary_is_what_the_assistant_wrote_most_with_the_ends() -> None:
    examples = [Example("a", (9, 9, 9, 4, 5, 5, 7), ((3, 7),))]
    ids, covered = draft_vocabulary(token_counts(examples, 12), 3, always=(2,))
    assert ids.tolist() == [2, 4, 5]
    assert covered == pytest.approx(3 / 4)
    with pytest.raises(ValueError, match="draft_vocab_size=13"):
        draft_vocabulary(torch.zeros(12), 13)
