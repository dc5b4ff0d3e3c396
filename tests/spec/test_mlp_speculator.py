"""MLPSpeculator: read from its files, equal to its equations on every path of a tree."""

from __future__ import annotations

from pathlib import Path

import checkpoints as files
import equations
import pytest
import torch
from drafting import Request
from lab import tiny_decoder
from torch import Tensor

from foretell.spec.checkpoint.mlp_speculator import read_mlp_speculator
from foretell.spec.checkpoint.source import open_checkpoint
from foretell.spec.mlp_speculator import MlpSpeculatorDrafter
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

TARGET = tiny_decoder(0, vocabulary=files.V)
TREE = Tree((-1, 0, 0, 0, 1, 1, 3, 4, 6, 6))


def drafter(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, object]
) -> MlpSpeculatorDrafter:
    files.write(folder, tensors, config, "model.safetensors")
    reading = read_mlp_speculator(open_checkpoint(folder), TARGET)
    return MlpSpeculatorDrafter(reading.net, reading.vocabulary, Acceptance.MATCH)


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize(("tied", "copies"), [(False, True), (True, True), (True, False)])
def test_every_path_equals_the_equations(
    tmp_path: Path, tied: bool, copies: bool, scale_input: bool
) -> None:
    config = files.mlp_speculator_config(tie_weights=tied, scale_input=scale_input)
    made = drafter(tmp_path / "d", files.mlp_speculator(tied=tied, copies=copies), config)
    whole = files.mlp_speculator(tied=tied)
    request = Request(made, TARGET, width=4)
    request.tokens = [1, 2]
    features = files.noise(2, files.H, seed=3) * 5
    draft = request.propose([7, 11], features, TREE).tokens[0].tolist()
    paths: list[list[int]] = [[11]]
    for node in range(1, TREE.nodes):
        parent = paths[TREE.parents[node]]
        logits = equations.mlp_speculator(features[1], parent, whole, 3, scale_input)
        state_logits = logits.topk(4).indices
        assert draft[node] == int(state_logits[TREE.ranks[node]]), f"node {node}"
        paths.append([*parent, draft[node]])


def test_states_equal_the_equations_to_the_last_digits(tmp_path: Path) -> None:
    made = drafter(tmp_path / "d", files.mlp_speculator(), files.mlp_speculator_config())
    feature = files.noise(1, files.H, seed=3)[0] * 5
    state = made.net.start(feature)
    for step, token in enumerate([4, 9, 30]):
        state = made.net.advance(state, torch.tensor(token), step)
        expected = equations.mlp_speculator(
            feature, [4, 9, 30][: step + 1], files.mlp_speculator(), 3, False
        )
        assert (made.net.logits(state, step) - expected).abs().max() < 1e-9


def test_a_deeper_tree_than_its_heads_is_refused(tmp_path: Path) -> None:
    made = drafter(tmp_path / "d", files.mlp_speculator(), files.mlp_speculator_config())
    with pytest.raises(ValueError, match="n_predict=3"):
        made.check_tree(chain(4))


@pytest.mark.parametrize(("key", "value"), [("emb_dim", 64), ("vocab_size", 50)])
def test_another_target_is_refused(tmp_path: Path, key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{key}={value}"):
        drafter(tmp_path / "d", files.mlp_speculator(), files.mlp_speculator_config(**{key: value}))


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {n: t for n, t in files.mlp_speculator().items() if "ln.1.bias" not in n}
    with pytest.raises(ValueError, match=r"ln\.1\.bias"):
        drafter(tmp_path / "d", tensors, files.mlp_speculator_config())
