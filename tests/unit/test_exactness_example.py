"""The worked example of docs/exactness.md, in exact fractions: the page's numbers are computed, not typed."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
P = [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]
Q = [Fraction(2, 10), Fraction(3, 10), Fraction(5, 10)]

Law = list[Fraction]


def normalised(weights: Law) -> Law:
    return [w / sum(weights) for w in weights]


def residual(p: Law, q: Law) -> Law:
    return normalised([max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)])


def tried(p: Law, q: Law, siblings: int) -> tuple[Law, Fraction]:
    """(law of the emitted token, chance that a draft is accepted), siblings drawn without replacement."""
    if siblings == 0:
        return p, Fraction(0)
    law, accepted = [Fraction(0)] * len(p), Fraction(0)
    for x in range(len(p)):
        if q[x] == 0:
            continue
        share = min(q[x], p[x])
        law[x] += share
        accepted += share
        refused = q[x] - share
        if refused:
            without = normalised([b if y != x else Fraction(0) for y, b in enumerate(q)])
            rest, more = tried(residual(p, q), without, siblings - 1)
            law = [a + refused * b for a, b in zip(law, rest, strict=True)]
            accepted += refused * more
    return law, accepted


def test_drawing_from_the_target_after_a_refusal_is_not_lossless() -> None:
    shares = [min(a, b) for a, b in zip(P, Q, strict=True)]
    refused = 1 - sum(shares)
    mistaken = [s + refused * a for s, a in zip(shares, P, strict=True)]
    assert [float(x) for x in mistaken] == [0.35, 0.39, 0.26]
    assert sum(abs(a - b) for a, b in zip(mistaken, P, strict=True)) / 2 == Fraction(15, 100)
    assert "**.35** | **.39** | **.26**" in PAGE.read_text("utf-8")


@pytest.mark.parametrize(("siblings", "accepted"), [(1, "0.7"), (2, "0.82"), (3, "1")])
def test_the_residual_keeps_the_law_for_any_number_of_siblings(
    siblings: int, accepted: str
) -> None:
    assert tried(P, Q, siblings) == (P, Fraction(accepted))


def test_a_point_mass_is_accepted_with_its_probability_and_then_taken_out() -> None:
    first = P[0]
    second = (1 - first) * normalised([Fraction(0), *P[1:]])[1]
    assert [first, second, 1 - first - second] == P
    assert normalised([Fraction(0), *P[1:]])[1] == Fraction(6, 10)


def test_shared_noise_agrees_as_often_as_the_page_says() -> None:
    theory = sum(
        1 / sum(max(P[k] / P[j], Q[k] / Q[j]) for k in range(len(P))) for j in range(len(P))
    )
    distance = sum(abs(a - b) for a, b in zip(P, Q, strict=True)) / 2
    assert round(float(theory), 3) == 0.631
    assert theory >= (1 - distance) / (1 + distance)
    noise = np.random.default_rng(0).gumbel(size=(200_000, 3))
    target = (np.log(np.array(P, dtype=float)) + noise).argmax(1)
    draft = (np.log(np.array(Q, dtype=float)) + noise).argmax(1)
    assert abs((target == draft).mean() - float(theory)) < 0.005


def test_typical_acceptance_emits_the_drafts_law_on_the_page_s_example() -> None:
    p = np.array(P, dtype=float)
    entropy = -(p * np.log(p)).sum()
    assert (p > min(0.09, 0.3 * np.exp(-entropy))).all()
