"""Drafters learn a pattern to near the oracle, and an interrupted run gives the weights of an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cycle_training import CPU, TAPS, TARGET, dense_target, loop_of, recipe_of, texts
from oracles import V

from foretell.training.capture import Capture, DiskStore
from foretell.training.check import Checker, Question
from foretell.training.loop import Loop, LoopSettings


@pytest.mark.parametrize(("kind", "depth", "steps"), [("eagle3", 4, 240), ("medusa", 3, 200)])
def test_a_drafter_of_a_minute_accepts_nearly_all_of_a_learnable_pattern(
    kind: str, depth: int, steps: int, tmp_path: Path
) -> None:
    recipe = recipe_of(kind)
    loop_of(recipe, tmp_path / "run", steps).run()
    recipe.save(tmp_path / "head")
    questions = [Question("never seen", (7 * i % V, 31, (11 * i + 2) % V)) for i in range(6)]
    checker = Checker(TARGET, questions, max_tokens=1 + 7 * (depth + 1), tokens=depth)
    found = checker.acceptance(tmp_path / "head")["all"]
    assert found.mean > 0.9 * (depth + 1), found.record()


def test_a_run_that_was_cut_and_resumed_gives_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    whole, first, second = (recipe_of("eagle3") for _ in range(3))
    loop_of(whole, tmp_path / "whole", 12).run()
    loop_of(first, tmp_path / "cut", 12).run(stop_after=5)
    state = loop_of(second, tmp_path / "cut", 12).run()
    assert state.step == 12
    pairs = zip(whole.modules.parameters(), second.modules.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    cut = zip(whole.modules.parameters(), first.modules.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in cut)


def test_a_run_of_a_target_of_another_width_is_refused_and_left_alone(tmp_path: Path) -> None:
    loop_of(recipe_of("eagle3"), tmp_path, 4).run(stop_after=2)
    before = (tmp_path / "state.pt").read_bytes()
    with pytest.raises(ValueError, match="hidden_size=32, this one has 48"):
        loop_of(recipe_of("eagle3"), tmp_path, 4, hidden_size=48).run()
    assert (tmp_path / "state.pt").read_bytes() == before


def test_accumulated_batches_step_like_one_large_batch(tmp_path: Path) -> None:
    found = []
    for rows, accumulate in ((4, 1), (2, 2), (1, 4)):
        recipe = recipe_of("eagle3")
        settings = LoopSettings(steps=3, rows=rows, accumulate=accumulate, warmup=1)
        Loop(recipe, texts(), settings, tmp_path / f"{rows}", {}, CPU).run()
        found.append([p.detach().clone() for p in recipe.modules.parameters()])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_features_kept_on_disk_are_those_that_were_computed_and_survive_a_restart(
    tmp_path: Path,
) -> None:
    data, target = texts(), dense_target()
    rows = torch.arange(2)
    plain = Capture(target, TAPS)(rows, data.take(rows))
    width = 4 * TARGET.config.hidden_size

    def store(budget: int) -> DiskStore:
        shape = (data.tokens.shape[0], 64, width)
        return DiskStore(tmp_path, *shape, budget, torch.float64, CPU, "cycle")

    Capture(target, TAPS, store(1 << 30))(rows, data.take(rows))
    again = store(1 << 30)
    kept = again.get(rows)
    assert kept is not None
    assert torch.equal(kept[0], torch.cat((plain.features, plain.hidden), -1))
    assert torch.equal(kept[1], plain.best)
    assert again.get(torch.tensor([0, 2])) is None
    with pytest.raises(ValueError, match="features of"):
        DiskStore(tmp_path, 9, 64, width, 1 << 30, torch.float64, CPU, "another target")


def test_a_disk_that_is_full_costs_a_note_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, target = texts(), dense_target()
    shape = (data.tokens.shape[0], 64, 4 * TARGET.config.hidden_size)
    store = DiskStore(tmp_path, *shape, 1 << 30, torch.float64, CPU, "cycle")

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write_list", full)
    with caplog.at_level("WARNING", "foretell"):
        Capture(target, TAPS, store)(torch.arange(2), data.take(torch.arange(2)))
    assert "No space left on device" in caplog.text
    assert "computed again" in caplog.text


def test_a_prediction_of_speed_needs_no_drafter_for_its_plain_side(tmp_path: Path) -> None:
    recipe = recipe_of("medusa")
    recipe.save(tmp_path)
    tree = ((0,), (1,), (0, 0))
    checker = Checker(TARGET, [Question("x", (3, 9, 4))], max_tokens=40, tree=tree)
    plain, drafting = checker.step_costs(tmp_path)
    assert plain > 0
    assert drafting > 0
