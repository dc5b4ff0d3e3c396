"""The network that is trained computes what the network that is served computes, step by step, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafting import BLOCK, Request
from lab import tiny_decoder

from foretell.model.decoder import Decoder
from foretell.spec.autoregressive import Autoregressive, Spot
from foretell.spec.checkpoint.load import Wanted, identify, load_drafter
from foretell.spec.eagle import EagleDrafter
from foretell.spec.verify import Acceptance
from foretell.training.capture import Capture
from foretell.training.data import Example, Packed, pack
from foretell.training.dense import DENSE
from foretell.training.eagle import (
    EagleRecipe,
    EagleSettings,
    head_layer,
    new_eagle,
    new_eagle3,
)
from foretell.training.save import DraftCard

TARGET = tiny_decoder(3, layers=4)
TAPS = (1, 2, 4)
STEPS = 4
TEXT = [5, 9, 80, 33, 7, 41, 12, 77, 3, 60, 22, 18, 90, 4, 51, 6]


def dense(target: Decoder) -> Decoder:
    same = Decoder.random(target.config, seed=3, dtype=target.dtype, ops=DENSE)
    assert all(
        torch.equal(a, b) for a, b in zip(target.parameters(), same.parameters(), strict=True)
    )
    return same


def recipe_of(kind: str) -> EagleRecipe:
    target = dense(TARGET)
    layer = head_layer(target.config)
    card = DraftCard("tiny", taps=TAPS if kind == "eagle3" else (), dtype=torch.float64)
    settings = EagleSettings(steps=STEPS)
    if kind == "eagle3":
        ids = torch.arange(0, 96, 2)
        net3 = new_eagle3(target, ids, layer, 3, seed=1)
        return EagleRecipe(net3, target, Capture(target, TAPS), ids, settings, card)
    net = new_eagle(target, layer, seed=1)
    whole = torch.arange(96)
    return EagleRecipe(net, target, Capture(target, (-1,)), whole, settings, card)


def packed_text() -> Packed:
    """The text behind another document, so that a leak between documents shows."""
    other = Example("other", tuple(range(3, 14)), ((2, 11),))
    text = Example("text", tuple(TEXT), ((4, len(TEXT)),))
    packed = pack([other, text], 40)
    assert packed.tokens.shape == (1, 40)
    assert packed.places[0, : len(TEXT)].tolist() == list(range(len(TEXT)))
    return packed


def served(recipe: EagleRecipe, folder: Path) -> EagleDrafter:
    recipe.save(folder)
    loaded = load_drafter(identify(folder), TARGET, Acceptance.MATCH, Wanted(tokens=5)).drafter
    assert isinstance(loaded, EagleDrafter)
    assert loaded.features == recipe.capture.taps
    return loaded


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
@pytest.mark.parametrize("root", [4, 9])
def test_step_s_of_training_is_the_engines_draft_number_s_from_every_root(
    kind: str, root: int, tmp_path: Path
) -> None:
    recipe, packed = recipe_of(kind), packed_text()
    features = recipe.capture(torch.tensor([0]), packed).features
    with torch.no_grad():
        trained = recipe.outputs(packed, features)
    # The engine: the text up to the root is committed, then the rest of the text is what it drafts.
    before = torch.cat((torch.zeros_like(features[0, :1]), features[0]))[: len(TEXT)]
    request = Request(served(recipe, tmp_path), TARGET, width=3)
    procedure = request.drafter._procedure  # type: ignore[attr-defined]
    assert isinstance(procedure, Autoregressive)
    request.observe(TEXT[: root - 1], before[: root - 1])
    window = request.window(TEXT[root - 1 : root + 1], before[root - 1 : root + 1])
    hidden = procedure.run_window(window)
    assert_same(hidden[0, 0], trained[0][root])
    first_logits = procedure.net.logits(hidden)[0, 0]
    head = recipe.net.head.weight if recipe.net.head is not None else TARGET.head.weight
    assert_same(first_logits, recipe.net.out(trained[0][root : root + 1])[0] @ head.double().t())
    for step in range(1, STEPS):
        bits = torch.tensor([[(2 << step) - 1]])
        spot = Spot(torch.tensor([step]), bits, torch.arange(STEPS).unsqueeze(0))
        tokens = torch.tensor([[TEXT[root + step]]])
        hidden = procedure.run_nodes(tokens, hidden, window, spot)
        assert_same(hidden[0, 0], trained[step][root])


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right.to(left.dtype), rtol=1e-9, atol=1e-9)


def test_the_dense_target_gives_the_features_of_the_engine() -> None:
    from paged import Paged

    packed = packed_text()
    captured = Capture(dense(TARGET), TAPS)(torch.tensor([0]), packed)
    page = Paged(TARGET, block_size=BLOCK)
    logits = page.chunk(torch.tensor(TEXT), 0)
    best = captured.best[0, : len(TEXT)]
    assert torch.equal(best, logits.argmax(-1))
    again = TARGET.logits(captured.hidden[0, : len(TEXT)])
    assert_same(again, logits)
