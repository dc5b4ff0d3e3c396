"""The rows of small passes, in one launch each, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernel_cases import DEVICE, error, noise

from foretell.ops.meta import SlotArrays
from foretell.ops.reference import layers as reference_layers
from foretell.ops.reference import rows as reference
from foretell.ops.reference import verify as reference_verify
from foretell.ops.triton import layers, rows

SLOTS, LENGTH, BLOCKS, BLOCK_SIZE = 6, 80, 24, 4


def ints(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape).to(DEVICE)


def arrays() -> SlotArrays:
    table = 1 + torch.randperm(SLOTS * BLOCKS).view(SLOTS, BLOCKS)
    length = ints(1, 60, SLOTS)
    return SlotArrays(
        tokens=ints(0, 99, SLOTS, LENGTH).int(),
        length=length,
        limit=length + 9,
        live=ints(0, 4, SLOTS) > 0,
        stop=ints(0, 9, SLOTS, 5),
        blocks=table.to(DEVICE, torch.int32),
    )


@pytest.mark.parametrize("nodes", [1, 6, 13])
@pytest.mark.parametrize("own", [False, True], ids=["static", "dynamic"])
def test_gathered_nodes_are_the_references(nodes: int, own: bool) -> None:
    slots, which = arrays(), torch.tensor([3, 0, 5, 2], device=DEVICE)
    draft, most = ints(-1, 99, SLOTS, 13), ints(0, 6, SLOTS)
    depths = ints(1, 6, 4 if own else 1, nodes)
    depths[:, 0] = 0
    case = (slots, draft, most, which, depths, 50, BLOCK_SIZE)
    ours, theirs = rows.gather(*case), reference.gather(*case)
    for name in ("tokens", "positions", "kv_slots", "blocks", "context"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4, 5], [4], [1, 5, 2]])
def test_placed_rows_are_the_references(counted: bool, places: list[int]) -> None:
    slots, which = arrays(), torch.tensor([3, 0, 5, 2], device=DEVICE)
    base = slots.length[which] - 1
    count = torch.tensor([0, 6, 2, 3], device=DEVICE) if counted else None
    depths = torch.tensor([[0, 1, 1, 2, 3, 3]], device=DEVICE)
    where = torch.tensor(places, device=DEVICE)
    case = (base, slots.live[which], count, slots.blocks[which], where, depths, 1, BLOCK_SIZE)
    ours, theirs = rows.place(*case), reference.place(*case)
    for name in ("positions", "tail_positions", "kv_slots"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_last_rows_are_the_references() -> None:
    x, count = noise(4, 6, 70), torch.tensor([0, 6, 2, 1], device=DEVICE)
    assert torch.equal(rows.last_rows(x, count), reference_verify.last_rows(x, count))


@pytest.mark.parametrize("half", [4, 24, 64])
def test_angles_are_the_references(half: int) -> None:
    positions = torch.tensor([0, 1, 77, 131071], device=DEVICE)
    frequencies = 10000.0 ** -(torch.arange(half, device=DEVICE) / half)
    ours = layers.angles(positions, frequencies, 1.25, torch.float32)
    theirs = reference_layers.angles(positions, frequencies, 1.25, torch.float32)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape == (4, 1, 2 * half)
        assert error(a, b.double()) < 1e-5
