"""The head's loss and the fused attention against plain autograd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lab import tiny_decoder

from foretell.model.decoder import Decoder
from foretell.model.hub import Kind, ModelSource
from foretell.training import losses
from foretell.training.capture import Capture
from foretell.training.data import Example, pack
from foretell.training.dense import DENSE, packed_rows, run_target
from foretell.training.draft import DistilSettings, DraftRecipe
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


@pytest.mark.parametrize("reverse", [0.0, 0.25, 1.0])
def test_distillation_learns_the_laws_of_the_next_token_by_forward_and_reverse_kl(
    reverse: float,
) -> None:
    target, student = (
        Decoder.random(tiny_decoder(0, layers).config, layers, torch.float64, ops=DENSE)
        for layers in (3, 1)
    )
    source = ModelSource(Path("tiny"), Kind.DIRECTORY, "tiny")
    settings = DistilSettings(layers=1, reverse=reverse)
    recipe = DraftRecipe(student, target, Capture(target, ()), settings, source)
    batch = pack([Example("a", tuple(range(20, 32)), ((5, 9),))], 12)
    (roots,) = recipe.roots(batch)
    assert roots.tolist() == [4, 5, 6, 7]  # rows whose next token the assistant wrote
    found = recipe.loss(torch.tensor([0]), batch, (roots,))
    rows = packed_rows(batch.places, batch.documents)
    told, said = (
        torch.log_softmax(model.logits(run_target(model, batch.tokens, rows, ())[0][0, 4:8]), -1)
        for model in (target, student)
    )
    forward = F.kl_div(said, told, log_target=True, reduction="sum")
    backward = F.kl_div(told, said, log_target=True, reduction="sum")
    expected = (1 - reverse) * forward + reverse * backward
    assert abs(float(forward - backward)) > 0.1
    torch.testing.assert_close(found.total.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.steps[0].double(), forward, rtol=1e-5, atol=1e-5)
    assert int(found.hits) == int((said.argmax(-1) == told.argmax(-1)).sum())
