"""The suffix match on the device against the one in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import DEVICE

from foretell.ops.reference import ngram as reference
from foretell.ops.triton import ngram


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 5)])
@pytest.mark.parametrize("words", [2, 4, 30])
def test_match_is_the_references(shortest: int, longest: int, words: int) -> None:
    text = torch.randint(0, words, (8, 1500), dtype=torch.int32).to(DEVICE)
    length = torch.tensor([1, 2, 3, 5, 40, 1025, 1499, 1500], device=DEVICE)
    expected = reference.suffix_match(text, length, shortest, longest)
    assert torch.equal(ngram.suffix_match(text, length, shortest, longest), expected)


def test_tokens_beyond_the_length_are_not_text() -> None:
    text = torch.tensor([[5, 6, 7, 5, 6, 9, 5, 6]], dtype=torch.int32, device=DEVICE)
    length = torch.tensor([5], device=DEVICE)
    assert ngram.suffix_match(text, length, 1, 3).tolist() == [2]


def test_draft_fills_the_spine_and_stops_at_the_end_of_the_text() -> None:
    text = torch.zeros(3, 12, dtype=torch.int32, device=DEVICE)
    text[1, :7] = torch.tensor([4, 1, 2, 3, 8, 1, 2])
    text[2, :4] = torch.tensor([6, 7, 8, 9])
    depths = torch.tensor([[0, 1, 1, 2, 3, 4, 5]], device=DEVICE)
    spine = torch.tensor([1, 1, 0, 1, 1, 1, 1], device=DEVICE) > 0
    rows, length = torch.tensor([1, 2], device=DEVICE), torch.tensor([7, 4], device=DEVICE)
    out = ngram.draft(text, rows, length, 12, depths, spine, 2, 3)
    assert out.tolist() == [[-1, 3, -1, 8, 1, 2, -1], [-1] * 7]
    assert torch.equal(out, reference.draft(text, rows, length, 12, depths, spine, 2, 3))
