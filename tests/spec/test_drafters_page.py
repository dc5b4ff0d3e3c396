"""The drafter on docs/drafters.md works as it stands there, and in as few lines as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lab import make_lab, prompts

from foretell.sampling_params import SamplingParams
from foretell.spec.drafter import Drafter
from foretell.spec.tree import Tree, chain

PAGE = Path(__file__).resolve().parents[2] / "docs" / "drafters.md"


def code() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    return str(block)


def page_drafter() -> Drafter:
    names: dict[str, type] = {}
    exec(compile(code(), str(PAGE), "exec"), names)
    return names["Successors"]()


def test_the_page_keeps_to_sixty_lines() -> None:
    assert len(code().splitlines()) <= 60


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("tree", [chain(3), Tree((-1, 0, 0, 1, 1, 2))], ids=["chain", "tree"])
def test_the_page_s_drafter_gives_the_text_of_plain_decoding(
    tree: Tree, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    plain, drafting = make_lab(), make_lab(page_drafter(), tree)
    for place, prompt in enumerate(prompts(4)):
        for lab in (plain, drafting):
            lab.add(str(place), prompt, params, seed=place)
    expected, got = plain.drain(), drafting.drain()
    assert {k: r.tokens for k, r in got.items()} == {k: r.tokens for k, r in expected.items()}
    assert sum(r.drafted for r in got.values()) > 0


def test_the_page_s_drafter_learns_a_text_that_comes_again() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    lab = make_lab(page_drafter(), chain(3))
    first = lab.solo(prompts(1)[0], params)
    again = lab.solo(prompts(1)[0], params)
    assert again.tokens == first.tokens
    assert again.accepted > first.accepted > 0
