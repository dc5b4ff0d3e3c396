"""The head's loss and the fused attention against plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foretell.training import losses
from foretell.training.losses import Teacher, head_loss


@pytest.mark.parametrize("hard", [1.0, 0.25, 0.0])
def test_loss_and_gradients_are_those_of_cross_entropy(
    hard: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK", 16)
    torch.manual_seed(0)
    x = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    best = torch.randint(-1, 30, (60,))
    law = torch.softmax(torch.randn(60, 30, dtype=torch.float64), -1)
    which = torch.randint(0, 60, (50,))
    loss, hits = head_loss(x, weight, which, Teacher(best, law, hard))
    found = torch.autograd.grad(3 * loss, [x, weight])
    said = torch.log_softmax(x @ weight.t(), -1)
    known = best[which] >= 0
    told = (1 - hard) * law[which] + hard * F.one_hot(best[which].clamp(min=0), 30).double()
    plain = -((told * said).sum(-1) * known).sum()
    expected = torch.autograd.grad(3 * plain, [x, weight])
    assert 0 < int((~known).sum()) < 50
    torch.testing.assert_close(loss, plain)
    assert int(hits) == int(((said.argmax(-1) == best[which]) & known).sum())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_frozen_head_gets_no_gradient() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(6, 8, requires_grad=True)
    loss, _ = head_loss(x, weight, torch.arange(4), Teacher(torch.arange(4)), learn=False)
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weight.grad is None
