"""Acceptance, commit and KV moves in one launch each, against the step's own operations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernel_cases import BUSHY, CHAIN, DEVICE, noise

from foretell.ops.meta import LayerKV, SlotArrays
from foretell.ops.reference import verify as reference
from foretell.ops.reference.verify import Decision, Drafted
from foretell.ops.triton import verify

WIDE = (-1, *[i // 3 for i in range(63)])
SLOTS, LENGTH, BLOCKS, BLOCK_SIZE = 6, 64, 24, 4


@dataclass
class FakeSlots:
    """The arrays that a commit touches."""

    tokens: Tensor
    length: Tensor
    limit: Tensor
    live: Tensor
    stop: Tensor
    blocks: Tensor

    @classmethod
    def random(cls) -> FakeSlots:
        def ints(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape).to(DEVICE)

        length = ints(1, 30, SLOTS)
        table = 1 + torch.randperm(SLOTS * BLOCKS).view(SLOTS, BLOCKS)
        return cls(
            tokens=ints(0, 9, SLOTS, LENGTH).int(),
            length=length,
            limit=length + ints(0, 9, SLOTS),
            live=ints(0, 4, SLOTS) > 0,
            stop=torch.where(ints(0, 2, SLOTS, 5) > 0, ints(0, 9, SLOTS, 5), -1),
            blocks=table.to(DEVICE, torch.int32),
        )

    def clone(self) -> FakeSlots:
        return FakeSlots(*(getattr(self, name).clone() for name in self.__dataclass_fields__))

    def arrays(self) -> SlotArrays:
        return SlotArrays(self.tokens, self.length, self.limit, self.live, self.stop, self.blocks)


def tree(parents: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, int]:
    """(parents, depths, bits) each [1, N], and the depth."""
    depths, bits = [], []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        bit = (0 if parent < 0 else bits[parent]) | 1 << node
        bits.append(bit)
    signed = [bit - (1 << 64) if bit >= 1 << 63 else bit for bit in bits]
    rows = [torch.tensor([values], device=DEVICE) for values in ((0, *parents[1:]), depths, signed)]
    return rows[0], rows[1], rows[2], max(depths)


def drafted(parents: tuple[int, ...], rows: int, words: int) -> Drafted:
    """Few words, so that paths are accepted; some drafts are missing, some samples not finite."""
    shape = tree(parents)
    size = (rows, len(parents))
    tokens = torch.randint(0, words, size)
    tokens = torch.where(torch.rand(size) < 0.05, -1, tokens).to(DEVICE)
    sample = torch.randint(0, words, size)
    sample = torch.where(torch.rand(size) < 0.04, -1, sample).to(DEVICE)
    return Drafted(tokens, sample, shape[0], shape[1], shape[2], shape[3])


def assert_equal(found: Decision, expected: Decision) -> None:
    assert found.moves is not None
    assert expected.moves is not None
    for ours, theirs in zip(found.moves, expected.moves, strict=True):
        assert torch.equal(ours, theirs)
    for name in Decision.__dataclass_fields__:
        if name != "moves":
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    "parents", [(-1,), CHAIN, BUSHY, WIDE], ids=["one", "chain", "bushy", "wide"]
)
@pytest.mark.parametrize("words", [1, 2, 5])
def test_accepted_node_is_the_references(parents: tuple[int, ...], words: int) -> None:
    nodes = drafted(parents, 20, words)
    arguments = (nodes.tokens, nodes.sample, nodes.parents, nodes.depths, nodes.bits)
    assert torch.equal(verify.accept_match(*arguments), reference.accept_match(*arguments))


@pytest.mark.parametrize(
    "parents", [(-1,), CHAIN, BUSHY, WIDE], ids=["one", "chain", "bushy", "wide"]
)
@pytest.mark.parametrize("words", [1, 3, 8])
def test_decision_and_what_it_writes_are_the_steps(parents: tuple[int, ...], words: int) -> None:
    for _ in range(4):
        slots = FakeSlots.random()
        mine = slots.clone()
        rows = torch.randperm(SLOTS)[:4].to(DEVICE)
        nodes = drafted(parents, 4, words)
        expected = reference.decide(nodes, slots.arrays(), rows, BLOCK_SIZE, True)
        found = verify.decide(nodes, mine.arrays(), rows, BLOCK_SIZE, True)
        assert_equal(found, expected)
        slots.tokens[:, -1] = mine.tokens[:, -1]  # the step throws what it must not write there
        for name in FakeSlots.__dataclass_fields__:
            assert torch.equal(getattr(mine, name), getattr(slots, name)), name


def test_a_tree_of_its_own_for_every_request() -> None:
    shapes = [tree(parents) for parents in (CHAIN, (-1, 0, 0, 1, 1), (-1, 0, 0, 0, 0))]
    parents, depths, bits = (torch.cat([shape[i] for shape in shapes]) for i in range(3))
    tokens = torch.ones(3, 5, dtype=torch.int64, device=DEVICE)
    nodes = Drafted(tokens, tokens.clone(), parents, depths, bits, 4)
    slots = FakeSlots.random()
    rows = torch.arange(3, device=DEVICE)
    expected = reference.decide(nodes, slots.clone().arrays(), rows, BLOCK_SIZE, True)
    assert_equal(verify.decide(nodes, slots.arrays(), rows, BLOCK_SIZE, True), expected)


def test_the_dummy_row_may_fill_a_batch_many_times() -> None:
    slots = FakeSlots.random()
    slots.live[5] = False
    before = slots.clone()
    rows = torch.tensor([5, 5, 5, 5], device=DEVICE)
    found = verify.decide(drafted(CHAIN, 4, 2), slots.arrays(), rows, BLOCK_SIZE, True)
    assert found.count.tolist() == [0, 0, 0, 0]
    for name in FakeSlots.__dataclass_fields__:
        assert torch.equal(getattr(slots, name), getattr(before, name)), name


def test_features_of_the_path_and_of_the_last_committed_token() -> None:
    features, feature = noise(4, 8, 37), torch.zeros(SLOTS, 37, device=DEVICE)
    slots = FakeSlots.random()
    rows = torch.tensor([3, 0, 5, 1], device=DEVICE)
    found = verify.decide(drafted(BUSHY, 4, 2), slots.arrays(), rows, BLOCK_SIZE, False)
    out = verify.keep_features(features, found.path, found.count, rows, feature)
    expected = torch.zeros_like(feature)
    assert torch.equal(
        out, reference.keep_features(features, found.path, found.count, rows, expected)
    )
    assert torch.equal(feature, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 3, 40])
def test_moves_read_everything_before_they_write(dtype: torch.dtype, width: int) -> None:
    """Rows may be one move's source and another's target; every layer moves alike."""
    layers = [
        LayerKV(noise(16, 4, 3, width).to(dtype), noise(16, 4, 3, width).to(dtype))
        for _ in range(3)
    ]
    plain = [LayerKV(layer.k.clone(), layer.v.clone()) for layer in layers]
    source = torch.tensor([[9, 13, 14, 0], [33, 0, 35, 39]], device=DEVICE)
    target = torch.tensor([[8, 9, 13, 0], [32, 0, 33, 35]], device=DEVICE)
    verify.move_kv(verify.kv_pages(layers), source, target)
    reference.move_kv(plain, source.flatten(), target.flatten())
    for mine, other in zip(layers, plain, strict=True):
        assert torch.equal(mine.k, other.k)
        assert torch.equal(mine.v, other.v)
