"""Traces: every verification in the file, probabilities by hand, nothing in the step when they are off, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import oracle_files as oracles
import pytest
import torch
from lab import draft_model, make_lab, prompts, tiny_decoder
from typer.testing import CliRunner

from foretell import LLM, SamplingParams
from foretell.cli import app
from foretell.engine.trace import TraceWriter
from foretell.runner import step as steps
from foretell.spec.tree import Tree, chain
from foretell.trace import PlaceCount, Summary, places_of, read_trace, summarise
from foretell.trace_drawing import draw_summary, draw_tree, save_drawing, to_svg

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def start(model: Path, drafter: Path | str | None, **more: object) -> LLM:
    settings: dict[str, object] = {
        "dtype": "float64",
        "device": "cpu",
        "kv_cache_memory_bytes": 32 << 20,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "compat": "off",
    }
    named = None if drafter is None else str(drafter)
    config = more.pop("speculative_config", None) or {}
    assert isinstance(config, dict)
    more["speculative_config"] = {"adaptive": False} | config
    return LLM(str(model), speculate_model=named, **(settings | more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracles.write_target(tmp_path_factory.mktemp("models") / "cycle")


@pytest.mark.parametrize("tree", ["chain", "eagle", {"top_k": 3, "depth": 4, "nodes": 12}])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_trace_is_the_text_again(
    tree: object, acceptance: str, tmp_path: Path, cycle: Path
) -> None:
    """Lines of a request in order give its text; accepted nodes are a path that holds the emitted tokens."""
    folder, file = oracles.write_eagle1(tmp_path / "d"), tmp_path / "t.jsonl"
    config = {"tree": tree, "acceptance": acceptance}
    if tree == "chain":
        config["num_speculative_tokens"] = 4
    llm = start(cycle, folder, speculative_config=config, trace=str(file))
    given = [{"prompt_token_ids": [3 * i, 9, 4 + i]} for i in range(3)]
    params = [
        SamplingParams(temperature=0.3 * i, seed=i, max_tokens=30, ignore_eos=True)
        for i in range(3)
    ]
    outputs = llm.generate(given, params, use_tqdm=False)
    assert all(output.outputs[0].steps is None for output in outputs), "nobody asked for reports"
    first = json.loads(file.read_text().splitlines()[0])
    assert first["trace"] == 1
    assert first["speculation"]["method"] == "eagle"
    read = list(read_trace(file))
    counted = llm.get_metrics()
    assert len(read) == counted.num_drafts
    assert sum(len(one.accepted) for one in read) == counted.num_accepted_tokens
    assert sum(sum(t >= 0 for t in one.tokens[1:]) for one in read) == counted.num_draft_tokens
    for output, prompt in zip(outputs, given, strict=True):
        text = [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]
        own = [one for one in read if one.request == output.request_id]
        assert [one.step for one in own] == list(range(len(own)))
        for one in own:
            end = one.length + len(one.emitted)
            assert list(one.emitted) == text[one.length : end]
            assert one.tokens[0] == text[one.length - 1]
            path = [one.tokens[node] for node in one.accepted]
            assert path == list(one.emitted[: len(path)])
            above = 0
            for node in one.accepted:
                assert one.parents[node] == above
                above = node
            assert all(0 <= p <= 1 for p in one.target_probs)
    drawn = acceptance == "rejection" and not isinstance(tree, dict)
    assert all((one.draft_probs is not None) == drawn for one in read)
    total = summarise(read)
    assert total.accepted_length == pytest.approx(counted.mean_acceptance_length)
    assert total.places[(0,)].accepted == counted.num_accepted_tokens_per_pos[0] or tree != "chain"


def test_probabilities_are_those_of_the_targets_law(tmp_path: Path) -> None:
    """A draft model equal to the target, at temperature 1: both laws of a traced chain agree."""
    lab = make_lab(draft_model(tiny_decoder(0), "rejection"), chain(3), acceptance="rejection")
    writer = TraceWriter(str(tmp_path / "t.jsonl"), None)
    lab.engine.watcher, lab.engine.runner._traced = writer, True
    writer.begin("m", lab.engine.resolved)
    run = lab.solo(prompts(1)[0], SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True))
    writer.close()
    read = list(read_trace(tmp_path / "t.jsonl"))
    assert len(read) >= 10
    assert sum(len(one.accepted) for one in read) == run.accepted
    for one in read:
        assert one.draft_probs is not None
        for node, token in enumerate(one.tokens):
            if node and token >= 0:
                assert one.target_probs[node] == pytest.approx(one.draft_probs[node], abs=1e-5)
                assert 0 < one.target_probs[node] < 1


def test_untraced_steps_compute_nothing_for_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor | None] = []
    inner = steps._node_probs

    def watched(*arguments: object) -> torch.Tensor | None:
        seen.append(inner(*arguments))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(steps, "_node_probs", watched)
    make_lab(draft_model(tiny_decoder(0)), chain(3)).solo(prompts(1)[0], GREEDY)
    assert len(seen) > 3
    assert seen == [None] * len(seen)


def test_a_trace_that_cannot_be_written_stops_the_start(tmp_path: Path, cycle: Path) -> None:
    with pytest.raises(ValueError, match=r"trace: .*nowhere.* cannot be written"):
        start(cycle, "suffix", trace=str(tmp_path / "nowhere" / "t.jsonl"))


def test_a_trace_that_was_cut_off_is_read_to_its_last_whole_line(
    tmp_path: Path, cycle: Path
) -> None:
    file = tmp_path / "t.jsonl"
    llm = start(cycle, oracles.write_medusa(tmp_path / "d", 3), trace=str(file))
    llm.generate({"prompt_token_ids": [3, 4]}, GREEDY, use_tqdm=False)
    whole = list(read_trace(file))
    file.write_text(file.read_text()[:-20])
    assert list(read_trace(file)) == whole[:-1]
    lines = file.read_text().splitlines()
    file.write_text("\n".join((lines[0], "{}", *lines[1:])) + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2, is not of a trace"):
        list(read_trace(file))
    file.write_text('{"some": "json"}\n')
    with pytest.raises(ValueError, match=r"line 1, is not of a trace"):
        list(read_trace(file))


def test_places_are_paths_of_ranks() -> None:
    assert places_of((0, 0, 0, 1, 1, 4)) == [(), (0,), (1,), (0, 0), (0, 1), (0, 1, 0)]


def shapes(svg: str) -> tuple[int, int, list[str]]:
    """(circles, lines, labels) of a document."""
    root = ElementTree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    labels = [text.text or "" for text in root.iter(f"{name}text")]
    return len(list(root.iter(f"{name}circle"))), len(list(root.iter(f"{name}line"))), labels


def test_a_picture_has_every_node_and_every_rate() -> None:
    places = {(0,): PlaceCount(10, 8, 7.0), (1,): PlaceCount(10, 1, 1.0)}
    places[(0, 0)] = PlaceCount(8, 2, 2.0)
    places[(3, 0)] = PlaceCount(5, 1, 1.0)  # its parent was never drafted: it hangs in the air
    drawing = draw_summary(Summary(10, 21, places), "a <trace> & more")
    circles, lines, labels = shapes(to_svg(drawing))
    assert (circles, lines) == (4, 3)
    assert labels[0] == "a <trace> & more: 2.10 tokens a step over 10 steps (3 nodes)"
    assert sorted(labels[1:]) == ["", "10", "25", "80"]
    about = {dot.place: dot.about for dot in drawing.dots}
    assert "8 of 10 accepted (80.0 %), the target's mean probability 0.700" in about[(0,)]
    with pytest.raises(ValueError, match="no node that was drafted 20 times"):
        draw_summary(Summary(10, 21, places), "t", least=20)


def test_nodes_of_a_picture_do_not_overlap() -> None:
    tree = Tree((-1, 0, 0, 0, 1, 1, 2, 4, 4, 4))
    drawing = draw_tree(places_of((0, *tree.parents[1:])), "t")
    spots = [(dot.x, dot.y) for dot in drawing.dots]
    for i, (x, y) in enumerate(spots):
        assert 0 < x < drawing.width
        assert 0 < y < drawing.height
        assert all(abs(x - a) >= 20 or y != b for a, b in spots[i + 1 :])


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_show_tree_draws_names_lists_and_traces(kind: str, tmp_path: Path, cycle: Path) -> None:
    if kind == "png":
        pytest.importorskip("matplotlib")
    trace = tmp_path / "t.jsonl"
    llm = start(cycle, oracles.write_eagle1(tmp_path / "d"), trace=str(trace))
    llm.generate({"prompt_token_ids": [3, 4]}, GREEDY, use_tqdm=False)
    for number, (what, nodes) in enumerate(
        [("eagle", 26), ("[[0], [1], [1, 3]]", 4), ("[-1, 0, 0, 1]", 4), (str(trace), None)]
    ):
        out = tmp_path / f"{number}.{kind}"
        done = CliRunner().invoke(app, ["show-tree", what, "--out", str(out)])
        assert done.exit_code == 0, done.output
        assert done.output.startswith(f"{out}: ")
        content = out.read_bytes()
        if kind == "png":
            assert content.startswith(b"\x89PNG")
        elif nodes is not None:
            assert shapes(content.decode())[0] == nodes
        else:
            assert "100" in shapes(content.decode())[2], "an exact drafter's first path"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("[[0], [1, 0]]", "has a gap"),
        ("[[0]", "tree is not JSON"),
        ("eagel", "tree preset 'eagel' is unknown"),
        ("chain", "a chain has no branches to draw"),
        ("none.jsonl", "trace 'none.jsonl' does not exist"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    what: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = CliRunner().invoke(app, ["show-tree", what])
    assert done.exit_code == 2
    assert message in done.output + done.stderr


def test_other_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"as \.svg or \.png, not \.gif"):
        save_drawing(draw_tree([(), (0,)], "t"), tmp_path / "t.gif")
