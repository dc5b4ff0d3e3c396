"""A feature drafter's KV is a function of the committed text alone: whatever chunks, hits, rejections or preemptions.

Compared are the KV entries of the committed text and the drafts that were made from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import checkpoints as files
import pytest
import torch
from lab import Lab, Run, make_lab, prompts, tiny_decoder
from torch import Tensor

from foretell.ops.meta import flat_slots
from foretell.sampling_params import SamplingParams
from foretell.spec.checkpoint.load import Loaded, Wanted, identify, load_drafter
from foretell.spec.drafter import Draft, KVView, PromptRows, Window
from foretell.spec.nodes import Shape
from foretell.spec.tree import Tree
from foretell.spec.verify import Acceptance

TARGET = tiny_decoder(0, layers=7, vocabulary=files.V)
TREE = Tree((-1, 0, 0, 1, 1, 3))
FORMATS: dict[str, Callable[[], tuple[dict[str, Tensor], dict[str, object]]]] = {
    "eagle": lambda: (files.eagle1(), files.llama_config()),
    "eagle3": lambda: (files.eagle3(), files.eagle3_config()),
    "mimo": lambda: (files.mimo_mtp(), files.mimo_mtp_config()),
}
PROMPT = prompts(1, low=53, high=54)[0]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@dataclass
class Noted:
    """A drafter that remembers its drafts by (text length, last token)."""

    inner: object
    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv, self.features = self.inner.kv, self.inner.features  # type: ignore[attr-defined]

    def bind(self, target: object, kv: KVView | None) -> None:
        self.inner.bind(target, kv)  # type: ignore[attr-defined]

    def observe(self, rows: PromptRows) -> None:
        self.inner.observe(rows)  # type: ignore[attr-defined]

    def propose(self, window: Window, shape: Shape) -> Draft:
        draft: Draft = self.inner.propose(window, shape)  # type: ignore[attr-defined]
        if shape.tree.nodes > 1:
            for row in range(len(window.slots)):
                text = window.text[window.slots[row], : window.length[row]].tolist()
                self.drafts[tuple(text)] = draft.tokens[row].tolist()
        return draft


def lab_of(folder: Path, name: str, **config: object) -> tuple[Lab, Noted]:
    tensors, settings = FORMATS[name]()
    files.write(folder, tensors, settings, "model.safetensors")
    loaded: Loaded = load_drafter(identify(folder), TARGET, Acceptance.MATCH, Wanted(tree=TREE))
    noted = Noted(loaded.drafter)
    return make_lab(noted, TREE, TARGET, **config), noted  # type: ignore[arg-type]


def entries(lab: Lab, count: int) -> Tensor:
    """Keys and values of entries 1 .. count - 1 of the request in its slot."""
    device = lab.engine.runner.device  # type: ignore[attr-defined]
    slot = int(device.slots.live.nonzero()[0])
    place = torch.arange(1, count).unsqueeze(0)
    rows = flat_slots(device.slots.blocks[slot : slot + 1], place, device.kv.block_size, place > 0)[
        0
    ]
    pages = [page.flatten(0, 1)[rows] for layer in device.kv.drafter for page in (layer.k, layer.v)]
    return torch.stack(pages)


def run_to(lab: Lab, length: int, prompt: list[int] = PROMPT) -> Run:
    """Run a request until so many tokens came out."""
    lab.add("r", prompt, PARAMS)
    runs: dict[str, Run] = {}
    while "r" not in runs or len(runs["r"].tokens) < length:
        lab.step(runs)
    return runs["r"]


@pytest.mark.parametrize("name", FORMATS)
def test_chunked_prompts_leave_the_kv_of_one_chunk(tmp_path: Path, name: str) -> None:
    pair = [
        lab_of(tmp_path / str(b), name, max_num_batched_tokens=b, max_num_seqs=2) for b in (256, 19)
    ]
    for lab, _ in pair:
        run_to(lab, 6)
    first, second = (entries(lab, len(PROMPT) + 2) for lab, _ in pair)
    assert (first - second).abs().max() < 1e-5
    common = set(pair[0][1].drafts) & set(pair[1][1].drafts)
    assert len(common) >= 3
    assert all(pair[0][1].drafts[text] == pair[1][1].drafts[text] for text in common)


@pytest.mark.parametrize("name", FORMATS)
def test_a_prefix_hit_drafts_what_a_cold_run_drafts(tmp_path: Path, name: str) -> None:
    lab, noted = lab_of(tmp_path / "d", name)
    cold = lab.solo(PROMPT, PARAMS)
    drafts = dict(noted.drafts)
    noted.drafts.clear()
    warm = lab.solo(PROMPT, PARAMS)
    assert warm.deltas[0].num_cached_tokens == 48
    assert warm.tokens == cold.tokens
    assert noted.drafts == drafts
    assert warm.accepted == cold.accepted


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_that_share_two_blocks_draft_as_if_alone(tmp_path: Path, name: str) -> None:
    """Eight at once, each going its own way behind a shared beginning that another one computed."""
    texts = [PROMPT[:32] + one[:9] for one in prompts(8, seed=5, low=10)]
    lab, noted = lab_of(tmp_path / "d", name, max_num_batched_tokens=512)
    lab.solo(PROMPT, PARAMS)
    noted.drafts.clear()
    for i, text in enumerate(texts):
        lab.add(str(i), text, PARAMS)
    runs = lab.drain()
    assert all(runs[str(i)].deltas[0].num_cached_tokens == 32 for i in range(8))
    alone, cold = lab_of(tmp_path / "e", name, enable_prefix_caching=False)
    for i, text in enumerate(texts):
        assert alone.solo(text, PARAMS).tokens == runs[str(i)].tokens
    assert set(noted.drafts) == set(cold.drafts)
    assert noted.drafts == cold.drafts


@pytest.mark.parametrize("name", FORMATS)
def test_kept_entries_come_from_the_targets_own_features(tmp_path: Path, name: str) -> None:
    """After rejections and acceptances the KV is that of a fresh run over the committed text."""
    lab, _ = lab_of(tmp_path / "d", name)
    run = run_to(lab, 18)
    count = len(PROMPT) + len(run.tokens) - 1
    fresh, _ = lab_of(tmp_path / "e", name, enable_prefix_caching=False)
    run_to(fresh, 1, PROMPT + run.tokens[:-1])
    assert (entries(lab, count) - entries(fresh, count)).abs().max() < 1e-5


@pytest.mark.parametrize("name", FORMATS)
def test_preempted_requests_draft_as_if_they_were_not(tmp_path: Path, name: str) -> None:
    """Their text comes back as a prompt, in chunks and with hits, generated tokens included."""
    texts = prompts(6, seed=9, low=3, high=16)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    per_token = 8 * (2 * 7 * 2 * 8 + 2 * 2 * 8)
    pool = {"kv_cache_memory_bytes": 15 * 16 * per_token, "max_model_len": 96}
    tight, noted = lab_of(tmp_path / "d", name, max_num_seqs=6, **pool)
    for i, text in enumerate(texts):
        tight.add(str(i), text, params)
    runs = tight.drain()
    assert tight.engine.scheduler.preemptions > 0
    roomy, plain = lab_of(tmp_path / "e", name, enable_prefix_caching=False)
    for i, text in enumerate(texts):
        assert roomy.solo(text, params).tokens == runs[str(i)].tokens
    common = set(noted.drafts) & set(plain.drafts)
    assert len(common) > 40
    assert all(noted.drafts[text] == plain.drafts[text] for text in common)
