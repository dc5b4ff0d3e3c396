"""From a folder to text: every format drafts in the engine, and the text is that of plain decoding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import checkpoints as files
import pytest
import torch
from drafting import NoHost, Request, law
from lab import Lab, make_lab, prompts, tiny_decoder

from foretell.sampling_params import SamplingParams
from foretell.spec.checkpoint.load import Loaded, Wanted, identify, load_drafter
from foretell.spec.checkpoint.recognise import Family
from foretell.spec.dynamic_tree import EAGLE2, EAGLE3, Growth
from foretell.spec.nodes import static_shape
from foretell.spec.presets import cut, preset
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

TARGET = tiny_decoder(0, layers=7, vocabulary=files.V)
PROMPTS = prompts(6)


def load(folder: Path, name: str, acceptance: str = "match", **wanted: object) -> Loaded:
    tensors, config, file = files.FORMATS[name]()
    files.write(folder, tensors, config, file)
    wish = Wanted(**wanted)  # type: ignore[arg-type]
    return load_drafter(identify(folder, wish.method), TARGET, Acceptance(acceptance), wish)


def lab_of(loaded: Loaded, acceptance: str = "match", **config: object) -> Lab:
    return make_lab(loaded.drafter, loaded.tree, TARGET, acceptance, **config)


def texts(lab: Lab, params: Sequence[SamplingParams]) -> list[list[int]]:
    for i, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
        lab.add(str(i), prompt, one, seed=100 + i)
    runs = lab.drain()
    return [runs[str(i)].tokens for i in range(len(PROMPTS))]


MIX = [
    SamplingParams(temperature=0.0, max_tokens=16),
    SamplingParams(temperature=0.7, max_tokens=16),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.02, max_tokens=16),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.2, max_tokens=16),
    SamplingParams(temperature=0.9, logit_bias={5: 4.0}, logprobs=2, max_tokens=16),
    SamplingParams(temperature=1.3, top_k=9, max_tokens=16),
]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=16)] * 6


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    return {
        "mix": texts(make_lab(target=TARGET), MIX),
        "greedy": texts(make_lab(target=TARGET), GREEDY),
    }


@pytest.mark.parametrize("name", files.FORMATS)
def test_the_text_is_that_of_plain_decoding(
    tmp_path: Path, name: str, plain: dict[str, list[list[int]]]
) -> None:
    loaded = load(tmp_path / "draft", name)
    assert texts(lab_of(loaded, max_num_batched_tokens=512), MIX) == plain["mix"]


@pytest.mark.parametrize("name", ["medusa vllm", "eagle bin", "eagle3", "mlp_speculator", "pard"])
@pytest.mark.parametrize("tree", [chain(3), Tree((-1, 0, 0, 1, 1, 2, 3))])
def test_under_rejection_greedy_text_is_that_of_plain_decoding(
    tmp_path: Path, name: str, tree: Tree, plain: dict[str, list[list[int]]]
) -> None:
    loaded = load(tmp_path / "draft", name, "rejection", tree=tree)
    assert loaded.draws == (name != "medusa vllm" or tree.is_chain)
    assert texts(lab_of(loaded, "rejection"), GREEDY) == plain["greedy"]


@pytest.mark.parametrize("name", ["eagle bin", "eagle3"])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_grown_trees_give_the_text_of_plain_decoding(
    tmp_path: Path, name: str, acceptance: str, plain: dict[str, list[list[int]]]
) -> None:
    loaded = load(tmp_path / "draft", name, acceptance, tree=Growth(4, 4, 14))
    assert loaded.grows
    assert not loaded.draws
    assert texts(lab_of(loaded, acceptance), GREEDY) == plain["greedy"]
    if acceptance == "match":
        assert texts(lab_of(loaded, acceptance), MIX) == plain["mix"]


@pytest.mark.parametrize(
    ("name", "wanted", "tree"),
    [
        ("medusa pt", {}, preset("vicuna_7b_stage2")),
        ("medusa vllm", {}, chain(5)),
        ("medusa full", {}, preset("mc_sim_7b_63")),
        ("eagle bin", {}, EAGLE2.bound),
        ("eagle bin", {"method": "eagle1"}, preset("eagle")),
        ("eagle bin", {"method": "eagle2"}, EAGLE2.bound),
        ("eagle bin", {"tokens": 4}, chain(4)),
        ("eagle3", {}, EAGLE3.bound),
        ("mlp_speculator", {}, chain(3)),
        ("mtp qwen", {}, chain(1)),
        ("medusa pt", {"tree": Tree((-1, 0, 0))}, Tree((-1, 0, 0))),
        ("medusa pt", {"tokens": 2}, cut(preset("vicuna_7b_stage2"), 2)),
        ("medusa pt", {"tokens": 5}, preset("vicuna_7b_stage2")),
        ("medusa vllm", {"tokens": 3}, chain(3)),
        ("speculators", {}, chain(3)),
        ("speculators", {"tokens": 6}, chain(6)),
    ],
)
def test_the_tree_is_chosen_as_the_originals_do(
    tmp_path: Path, name: str, wanted: dict[str, object], tree: Tree
) -> None:
    assert load(tmp_path / "draft", name, **wanted).tree == tree


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("medusa safetensors", {"tokens": 5}, "depth 5 needs 5 Medusa heads, the checkpoint has 4"),
        ("mlp_speculator", {"tokens": 4}, "n_predict=3"),
        ("medusa pt", {"tree": Growth(2, 3, 6)}, "need an EAGLE drafter"),
        ("eagle3", {"method": "eagle"}, "'eagle3'"),
        ("pard", {"method": "medusa"}, "'pard'"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, name: str, wanted: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "draft", name, **wanted)


def test_what_was_recognised_and_decided_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "foretell"):
        load(tmp_path / "draft", "eagle3")
    told = [record.getMessage() for record in caplog.records]
    assert identify(tmp_path / "draft").evidence.startswith("a hidden_norm")
    for words in (
        "target layers [2, 3, 4]",
        "rotary base 10000",
        "tree: grown",
    ):
        assert sum(words in line for line in told) == 1, words


def test_a_gguf_file_is_a_draft_model(tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    path.write_bytes(b"GGUF")
    assert identify(path).family is Family.DRAFT_MODEL
    with pytest.raises(ValueError, match="GGUF"):
        identify(path, "eagle3")


@pytest.mark.parametrize("name", files.FORMATS)
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_drafting_never_waits_for_the_device(tmp_path: Path, name: str, acceptance: str) -> None:
    wanted: list[dict[str, object]] = [{"tree": Tree((-1, 0, 0, 1))}]
    if name.startswith(("eagle", "mtp", "speculators")):
        wanted.append({"tree": Growth(3, 3, 9)})
    for i, wish in enumerate(wanted):
        loaded = load(tmp_path / str(i), name, acceptance, **wish)
        request = Request(loaded.drafter, TARGET, width=3)
        width = TARGET.feature_width(loaded.drafter.features)
        features = torch.randn(9, width, dtype=torch.float64) if width else None
        request.observe(PROMPTS[0][:6], None if features is None else features[:6])
        window = request.window(
            PROMPTS[0][6:8], None if features is None else features[6:8], law(temperature=0.8)
        )
        shape = static_shape(loaded.tree, torch.device("cpu"))
        with NoHost():
            draft = loaded.drafter.propose(window, shape)
        assert (draft.tokens[:, 1:] >= 0).all()
