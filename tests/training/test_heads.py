"""The drafters that come with the package: their names, files, sizes and cards."""

from __future__ import annotations

import pytest

from foretell.model.hub import DEFAULT_DRAFTER, DEFAULT_MODEL, HEADS, resolve
from foretell.options import EngineOptions
from foretell.spec.checkpoint.load import identify
from foretell.spec.checkpoint.recognise import Family, draft_tokens_of, verifier_of

NAMES = {"eagle3": Family.EAGLE3, "medusa": Family.MEDUSA}


@pytest.mark.parametrize("kind", NAMES)
def test_each_head_is_found_by_name_and_is_what_it_says(kind: str) -> None:
    source = resolve(f"{DEFAULT_MODEL}-{kind}")
    assert source.path.parent == HEADS
    found = identify(source.path)
    assert found.family is NAMES[kind]
    card = (source.path / "README.md").read_text("utf-8")
    assert all(word in card for word in ("licence", "data", "training", "steps"))
    size = sum(file.stat().st_size for file in source.path.iterdir())
    assert size < 21 << 20


def test_the_default_drafter_serves_the_default_model_and_says_how_much_to_draft() -> None:
    found = identify(resolve("default").path).checkpoint
    assert found is not None
    assert verifier_of(found.config) == DEFAULT_MODEL
    assert draft_tokens_of(found) == 5


def test_the_demonstration_drafts_with_the_head_for_the_default_model_alone() -> None:
    assert EngineOptions().with_drafts().speculate_model == DEFAULT_DRAFTER
    assert EngineOptions(model=DEFAULT_MODEL).with_drafts().speculate_model == DEFAULT_DRAFTER
    assert EngineOptions(model="other.gguf").with_drafts().spec_method == "ngram"
    assert EngineOptions(spec_method="ngram").with_drafts().speculate_model is None
