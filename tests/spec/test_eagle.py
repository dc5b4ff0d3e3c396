"""EAGLE networks row by row against their plain equations, and exact networks end to end.

The rows of a prompt, of prompt chunks, of windows after rejections and of drafted nodes must equal the transcription in
`equations` to 1e-9, with poisoned KV everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import checkpoints as files
import equations
import pytest
import torch
from drafting import Request
from equations import Frame
from lab import tiny_decoder
from torch import Tensor

from foretell.spec.checkpoint.eagle import EagleReading, read_eagle
from foretell.spec.checkpoint.eagle3 import read_eagle3
from foretell.spec.checkpoint.mtp import read_mtp
from foretell.spec.checkpoint.source import open_checkpoint
from foretell.spec.dynamic_tree import Growth
from foretell.spec.eagle import EagleDrafter
from foretell.spec.presets import preset
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

TARGET = tiny_decoder(0, layers=7, vocabulary=files.V)
CPU = torch.device("cpu")
LENGTH = 40
TOKENS = torch.randint(0, files.V, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
TREES = {
    "chain": chain(4),
    "eagle": preset("eagle"),
    "gaps": Tree((-1, 0, 0, 1, 1, 3), (0, 0, 2, 0, 1, 1)),
}


@dataclass
class Case:
    """A network as a checkpoint and as equations."""

    tensors: dict[str, Tensor]
    config: dict[str, object]
    features: Tensor  # [LENGTH, F], of each position
    base: float = 10000.0
    factor: float = 1.0
    norm_before_residual: bool = False
    norm_output: bool = False
    mtp: str = ""  # family
    rotary: float = 1.0

    @property
    def third(self) -> bool:
        return not self.mtp and any("hidden_norm" in name for name in self.plain)

    @property
    def plain(self) -> dict[str, Tensor]:
        """Weights under the names that the equations use."""
        if self.mtp:
            return _mtp_names(self.tensors, self.mtp)
        names = {
            n: n.removeprefix("model.").replace("midlayer.", "layers.0.") for n in self.tensors
        }
        return {names[n]: t.double() for n, t in self.tensors.items()}

    def read(self, folder: Path) -> EagleReading:
        files.write(folder, self.tensors, self.config, "model.safetensors")
        reader = read_eagle3 if self.third else read_mtp if self.mtp else read_eagle
        return reader(open_checkpoint(folder), TARGET)

    def fuse(self, features: Tensor) -> Tensor:
        return equations.eagle3_fuse(features, self.plain) if self.third else features

    def rows(self, tokens: list[int], hidden: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        table = self.plain.get("embed_tokens.weight", TARGET.embedding.detach())
        frame = Frame(positions, sees, base=self.base, factor=self.factor, rotary=self.rotary)
        if self.mtp:
            return equations.mtp(table[tokens], hidden, self.plain, frame, self.mtp == "mimo")
        if self.third:
            return equations.eagle3(
                table[tokens], hidden, self.plain, frame, self.norm_before_residual
            )
        return equations.eagle1(table[tokens], hidden, self.plain, frame)

    def feed_back(self, out: Tensor) -> Tensor:
        if self.mtp:
            return equations.rms(out, self.plain["norm"])
        return equations.rms(out, self.plain["norm.weight"]) if self.norm_output else out

    def logits(self, out: Tensor) -> Tensor:
        """Over target ids, -inf where the draft has no token."""
        if self.mtp:
            return TARGET.logits(self.feed_back(out))
        if "norm.weight" in self.plain:
            out = equations.rms(out, self.plain["norm.weight"])
        if "lm_head.weight" not in self.plain:
            return TARGET.logits(out)
        own = out @ self.plain["lm_head.weight"].T
        if "d2t" not in self.plain:
            return own
        ids = torch.arange(own.shape[-1]) + self.plain["d2t"].long()
        return torch.full((*own.shape[:-1], files.V), -torch.inf, dtype=own.dtype).index_copy(
            -1, ids, own
        )

    def text(self, count: int) -> Tensor:
        """[count - 1, H] outputs of rows 1 .. count - 1: (f_{i-1}, t_i) at rotary position i - 1."""
        hidden = self.fuse(self.features[: count - 1])
        rows = count - 1
        if rows == 0:
            return hidden.new_zeros(0, files.H)
        sees = torch.ones(rows, rows, dtype=torch.bool).tril()
        return self.rows(TOKENS[1:count], hidden, torch.arange(rows), sees)

    def nodes(self, count: int, drafted: list[int], parents: list[int]) -> list[Tensor]:
        """[H] output of each node after `count` committed tokens; node 0 is the row of the pending token."""
        hidden = list(self.fuse(self.features[: count - 1]))
        tokens, positions = TOKENS[1:count], list(range(count - 1))
        seen = [set(range(i + 1)) for i in range(count - 1)]
        outs = [self.text(count)[-1]]
        places, depths = [count - 2], [0]
        for token, parent in zip(drafted[1:], parents[1:], strict=True):
            depths.append(depths[parent] + 1)
            places.append(len(tokens))
            hidden.append(self.feed_back(outs[parent]))
            tokens.append(token)
            positions.append(count - 2 + depths[-1])
            seen.append(seen[places[parent]] | {places[-1]})
            sees = torch.tensor([[j in row for j in range(len(tokens))] for row in seen])
            outs.append(self.rows(tokens, torch.stack(hidden), torch.tensor(positions), sees)[-1])
        return outs


def _mtp_names(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """What the equations call MTP weights; norm weights as they multiply."""
    names = {
        "qwen": {
            "mtp.fc.weight": "fc",
            "mtp.pre_fc_norm_embedding.weight": "embedding_norm",
            "mtp.pre_fc_norm_hidden.weight": "feature_norm",
            "mtp.norm.weight": "norm",
            "mtp.layers.": "layers.",
        },
        "mimo": {
            "model.mtp_layers.0.input_proj.weight": "fc",
            "model.mtp_layers.0.token_layernorm.weight": "embedding_norm",
            "model.mtp_layers.0.hidden_layernorm.weight": "feature_norm",
            "model.mtp_layers.0.final_layernorm.weight": "norm",
            "model.mtp_layers.0.": "layers.0.",
        },
    }[family]
    result = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            if name.startswith(theirs):
                result[ours + name.removeprefix(theirs)] = tensor + (
                    family == "qwen" and "norm" in name
                )
                break
    return result


def features(width: int) -> Tensor:
    return torch.randn(
        LENGTH, width, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )


def first(config: dict[str, object] | None = None, **more: object) -> Case:
    tensors = files.eagle1(**more)  # type: ignore[arg-type]
    layers = int(str(more.get("layers", 1)))
    return Case(tensors, files.llama_config(layers) | (config or {}), features(files.H))


def third(config: dict[str, object] | None = None, **more: object) -> Case:
    tensors = files.eagle3(**more)  # type: ignore[arg-type]
    layers = int(str(more.get("layers", 1)))
    draft = more.get("draft_vocabulary", 40) or files.V
    settings = files.eagle3_config(num_hidden_layers=layers, draft_vocab_size=draft) | (
        config or {}
    )
    return Case(tensors, settings, features(3 * files.H))


def last_hidden() -> Case:
    case = third({"eagle_config": {"use_aux_hidden_state": False}}, fc=False)
    return replace(case, features=features(files.H))


def qwen(layers: int = 1) -> Case:
    tensors = files.qwen_mtp(layers)
    return Case(
        tensors, files.qwen_mtp_config(layers), features(files.H), 1e7, mtp="qwen", rotary=0.25
    )


def mimo() -> Case:
    config = files.mimo_mtp_config(rope_theta=640000.0)
    return Case(files.mimo_mtp(), config, features(files.H), 640000.0, mtp="mimo")


CASES: dict[str, Callable[[], Case]] = {
    "eagle1": first,
    "eagle1-no-bias": lambda: first({"bias": False}, bias=False),
    "eagle1-target-embedding": lambda: first(embedding=False),
    "eagle1-qkv-bias": lambda: first({"qkv_bias": True}, qkv_bias=True),
    "eagle1-two-layers": lambda: first(layers=2),
    "eagle1-rope": lambda: replace(
        first({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        base=5e5,
        factor=4.0,
    ),
    "eagle3": third,
    "eagle3-layers-0": lambda: third(first="layers.0."),
    "eagle3-model-prefix": lambda: third(first="layers.0.", prefix="model."),
    "eagle3-whole-vocabulary": lambda: third(draft_vocabulary=None),
    "eagle3-target-head": lambda: third(draft_vocabulary=None, head=False),
    "eagle3-own-embedding": lambda: third(embedding=True),
    "eagle3-residual-normed": lambda: replace(
        third({"norm_before_residual": True}), norm_before_residual=True
    ),
    "eagle3-norm-before-fc": lambda: third(
        {"eagle_config": {"norm_before_fc": True}}, norm_before_fc=True
    ),
    "eagle3-fc-norm": lambda: third({"fc_norm": True}, fc_norm=True),
    "eagle3-norm-output": lambda: replace(third({"norm_output": True}), norm_output=True),
    "eagle3-two-layers": lambda: third(layers=2, first="layers.0."),
    "eagle3-last-hidden": last_hidden,
    "eagle3-rope-parameters": lambda: replace(
        third({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}), base=1e6
    ),
    "mtp-qwen": qwen,
    "mtp-qwen-two-layers": lambda: qwen(2),
    "mtp-mimo": mimo,
}


def drive(request: Request, case: Case, chunks: list[int], windows: list[int], tree: Tree) -> float:
    """Largest difference between network and equations, over prompt chunks, windows and drafted nodes."""
    worst = 0.0
    assert request.seen is not None
    before = torch.cat((torch.full_like(case.features[:1], 50.0), case.features))
    for count in chunks:
        start = len(request.tokens)
        request.observe(TOKENS[start : start + count], before[start : start + count])
        mine, first_row = request.seen.ingested[-1], max(start, 1)
        theirs = case.text(start + count)[first_row - 1 :]
        worst = max(worst, _gap(mine[first_row - start :], theirs))
    for count in windows:
        start = len(request.tokens)
        request.seen.extended.clear()
        draft = request.propose(TOKENS[start : start + count], before[start : start + count], tree)
        mine = request.seen.ingested[-1][0, :count]
        worst = max(worst, _gap(mine, case.text(start + count)[start - 1 :]))
        worst = max(worst, _nodes_gap(request, case, draft.tokens[0].tolist(), tree))
    return worst


def _nodes_gap(request: Request, case: Case, drafted: list[int], tree: Tree) -> float:
    assert request.seen is not None
    outs = case.nodes(len(request.tokens), drafted, list(tree.parents))
    expanded = [n for level in tree.levels[1:] for n in level if n in tree.parents]
    mine = (
        torch.cat([block[0] for block in request.seen.extended])
        if expanded
        else outs[0].new_zeros(0, files.H)
    )
    ranked = {n: case.logits(outs[n]).topk(8).indices for n in (0, *expanded)}
    for node in range(1, tree.nodes):
        assert drafted[node] == int(ranked[tree.parents[node]][tree.ranks[node]]), f"node {node}"
    return _gap(mine, torch.stack([outs[n] for n in expanded]) if expanded else mine)


def _gap(mine: Tensor, theirs: Tensor) -> float:
    assert mine.shape == theirs.shape
    return float((mine - theirs).abs().max()) if mine.numel() else 0.0


def drafter_of(
    reading: EagleReading, acceptance: str = "match", growth: Growth | None = None
) -> EagleDrafter:
    return EagleDrafter(
        reading.net, reading.taps, reading.vocabulary, Acceptance(acceptance), growth
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunks", [[12], [5, 4, 3], [1, 11]])
def test_rows_equal_the_equations(tmp_path: Path, name: str, chunks: list[int]) -> None:
    case = CASES[name]()
    reading = case.read(tmp_path / "draft")
    for tree in TREES.values():
        request = Request(drafter_of(reading), TARGET, width=tree.depth + 1)
        assert drive(request, case, chunks, [1, 3, 1, 4, 2, 1], tree) < 1e-9


@pytest.mark.parametrize("change", ["theta", "shift", "residual", "fc order"])
def test_a_wrong_reading_would_be_seen(tmp_path: Path, change: str) -> None:
    """The comparison above is sharp: each mistake moves outputs by far more than its tolerance."""
    case = third()
    request = Request(drafter_of(case.read(tmp_path / "draft")), TARGET, width=5)
    match change:
        case "theta":
            wrong = replace(case, base=500000.0)
        case "shift":
            wrong = replace(case, features=torch.roll(case.features, 1, 0))
        case "residual":
            wrong = replace(case, norm_before_residual=True)
        case _:
            wrong = replace(case, features=case.features.roll(files.H, 1))
    before = torch.cat((case.features[:1], case.features))
    request.observe(TOKENS[:12], before[:12])
    assert request.seen is not None
    assert _gap(request.seen.ingested[-1][1:], case.text(12)) < 1e-9
    assert _gap(request.seen.ingested[-1][1:], wrong.text(12)) > 1e-4
