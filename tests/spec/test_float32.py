"""Greedy text in float32, which real models run in on a CPU without bf16: plain decoding's, token for token."""

from __future__ import annotations

from pathlib import Path

import checkpoints as files
import pytest
import torch
from lab import Lab, Run, make_lab, prompts, tiny_decoder

from foretell.config import EngineConfig
from foretell.engine.build import engine_around
from foretell.model.decoder import Decoder
from foretell.runner.build import Parts, assemble
from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.checkpoint.load import Wanted, identify, load_drafter
from foretell.spec.dynamic_tree import Growth
from foretell.spec.ngram import NgramDrafter
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

WIDE = Tree((-1, *[0] * 4, *[1] * 4, *[5] * 4))
TREES: dict[str, Tree | Growth] = {
    "k1": chain(1),
    "k3": chain(3),
    "k5": chain(5),
    "width 4": WIDE,
    "grown": Growth(4, 3, 14),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
METHODS = ["ngram", "draft model", "medusa pt", "eagle bin", "eagle3", "mtp mimo"]


def single(seed: int, layers: int) -> Decoder:
    config = tiny_decoder(0, layers=layers, vocabulary=files.V).config
    return Decoder.random(config, seed=seed, dtype=torch.float32)


TARGET = single(0, 7)


def parts(folder: Path, method: str, tree: Tree | Growth) -> Parts:
    if method == "ngram":
        assert isinstance(tree, Tree)
        return Parts(TARGET, NgramDrafter(1, 3), torch.float32, tree=tree)
    if method == "draft model":
        assert isinstance(tree, Tree)
        vocabulary = same(files.V, files.V, files.V, torch.device("cpu"))
        drafter = DraftModelDrafter(single(0, 7), vocabulary, Acceptance.MATCH)
        return Parts(TARGET, drafter, torch.float32, tree=tree)
    files.write(folder, *files.FORMATS[method]())
    found = load_drafter(identify(folder), TARGET, Acceptance.MATCH, Wanted(tree=tree))
    return Parts(
        TARGET,
        found.drafter,
        torch.float32,
        tree=found.tree,
        grows=found.grows,
        scratch=found.scratch,
    )


def texts(lab: Lab) -> dict[str, Run]:
    for i, prompt in enumerate(prompts(32, seed=2, high=24)):
        lab.add(str(i), prompt, GREEDY)
    return lab.drain()


@pytest.fixture(scope="module")
def plain() -> dict[str, Run]:
    return texts(make_lab(target=TARGET, max_num_seqs=8))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method", METHODS)
def test_R01_greedy_text_is_that_of_plain_decoding(
    method: str,
    tree: str,
    tmp_path: Path,
    plain: dict[str, Run],
) -> None:
    shape = TREES[tree]
    if isinstance(shape, Growth) and not method.startswith("eagle"):
        pytest.skip("only EAGLE grows trees")
    config = EngineConfig(
        max_model_len=160,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
    )
    built = assemble(config, parts(tmp_path / "d", method, shape), tokenizer=None)
    runs = texts(Lab(engine_around(built, config)))
    assert {k: run.tokens for k, run in runs.items()} == {k: run.tokens for k, run in plain.items()}
    assert sum(run.drafted for run in runs.values()) > 0
