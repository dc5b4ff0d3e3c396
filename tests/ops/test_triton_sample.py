"""Sampling kernels: the same random bits as the reference, and the same law after the filters."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import DEVICE, HALF, noise

from foretell.ops.reference import sample as reference
from foretell.ops.triton import sample
from foretell.ops.triton.sample import Laws
from foretell.spec import noise as streams
from foretell.spec import processors
from foretell.spec.noise import Stream
from foretell.spec.processors import Law


def laws(temperature: list[float], **filters: list[float]) -> Laws:
    rows = len(temperature)
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,))
    return Laws(
        seed=seeds.to(DEVICE),
        temperature=torch.tensor(temperature, device=DEVICE),
        top_k=torch.tensor(filters.get("top_k", [0] * rows), dtype=torch.int64, device=DEVICE),
        top_p=torch.tensor(filters.get("top_p", [1.0] * rows), device=DEVICE),
        min_p=torch.tensor(filters.get("min_p", [0.0] * rows), device=DEVICE),
    )


def expected_sample(
    logits: torch.Tensor, law: Laws, positions: torch.Tensor, stream: Stream, filtered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(samples, scores they were chosen by) of the reference."""
    plain = Law(law.seed, law.temperature, law.top_k, law.top_p, law.min_p)
    mode = processors.Mode(sampled=True, filtered=filtered)
    scaled = processors.scale_and_filter(logits.float(), plain, mode)
    scores = processors.perturb(scaled, plain, positions, stream)
    return reference.argmax_checked(scores), scores


def assert_same_choice(out: torch.Tensor, expected: torch.Tensor, scores: torch.Tensor) -> None:
    """Equal, or so near a tie that the last place of a logarithm decides."""
    mine = scores.gather(-1, out.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    best = scores.gather(-1, expected.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    differs = out != expected
    assert not (differs & ((out < 0) | (expected < 0))).any(), (out, expected)
    assert ((best - mine)[differs] < 1e-4).all(), (out, expected)
    assert differs.float().mean() < 0.01


@pytest.mark.parametrize("stream", list(Stream))
def test_noise_has_the_references_bits(stream: Stream) -> None:
    seed = torch.tensor([0, 1, -1, 1 << 40, -(1 << 63)], device=DEVICE)
    positions = torch.tensor([[0, 1], [7, 8], [1 << 20, 5], [3, 3], [99, 100]], device=DEVICE)
    key = streams.key(seed, positions, stream)
    ids = torch.tensor([0, 1, 2, 1000, 128255, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    torch.testing.assert_close(
        sample.gumbel(key, ids), reference.gumbel(key, ids), rtol=2e-6, atol=2e-6
    )


def test_noise_is_exact_where_a_token_wins() -> None:
    """Great noise comes of tiny uniforms, where log1p must not be a plain logarithm."""
    ids = torch.arange(200_000, dtype=torch.int32, device=DEVICE)
    key = torch.tensor([[12345, -67890]], dtype=torch.int32, device=DEVICE)
    out, expected = sample.gumbel(key, ids)[0], reference.gumbel(key.cpu(), ids.cpu())[0]
    top = expected.topk(20).indices
    torch.testing.assert_close(out.cpu()[top], expected[top], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [1, 37, 2048, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_argmax_takes_the_lowest_of_equals(width: int, dtype: torch.dtype) -> None:
    scores = torch.randint(0, 5, (6, width)).to(DEVICE, dtype)
    expected = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(sample.argmax_checked(scores), expected)


def test_argmax_refuses_rows_that_are_not_finite() -> None:
    scores = noise(5, 3, 4100)
    scores[0, 0, 4099] = torch.nan
    scores[1, 1, 0] = torch.inf
    scores[2, 2] = -torch.inf
    scores[3, 0, 1:] = -torch.inf
    assert torch.equal(sample.argmax_checked(scores), reference.argmax_checked(scores))


def test_rows_may_stand_apart_in_memory() -> None:
    wide = noise(4, 300)
    assert torch.equal(sample.argmax_checked(wide[:, :100]), wide[:, :100].argmax(-1))


@pytest.mark.parametrize("width", [37, 2049, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_unfiltered_samples_are_the_references(width: int, dtype: torch.dtype) -> None:
    law = laws([0.0, 0.7, 1.0, 2.5])
    logits = (3 * noise(4, 6, width)).to(dtype)
    positions = torch.arange(24, device=DEVICE).view(4, 6)
    out = sample.sample(logits, law, positions, int(Stream.SAMPLE))
    expected, scores = expected_sample(logits, law, positions, Stream.SAMPLE, filtered=False)
    assert_same_choice(out, expected, scores)


def test_greedy_samples_need_no_law() -> None:
    logits = noise(2, 3, 50)
    positions = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    assert torch.equal(sample.sample(logits, None, positions), logits.argmax(-1))


def test_columns_may_stand_for_other_ids() -> None:
    law = laws([1.0])
    logits = torch.zeros(1, 4, 64, device=DEVICE)
    positions = torch.arange(4, device=DEVICE).view(1, 4)
    ids = (torch.randperm(1000)[:64]).to(DEVICE, torch.int32)
    out = sample.sample(logits, law, positions, ids=ids)
    key = streams.key(law.seed, positions, Stream.SAMPLE)
    assert torch.equal(out, reference.gumbel(key, ids).argmax(-1))


FILTERS = {
    "top_k": {"top_k": [1, 3, 40, 5000, 7]},
    "top_p": {"top_p": [0.1, 0.5, 0.9, 0.999, 1.0]},
    "min_p": {"min_p": [0.5, 0.1, 0.01, 1.0, 0.0]},
    "all": {
        "top_k": [5, 0, 20, 3, 50],
        "top_p": [0.9, 0.5, 1.0, 0.3, 0.95],
        "min_p": [0.0, 0.2, 0.02, 0.3, 0.001],
    },
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("width", [300, 2500])
def test_filtered_samples_are_the_references(filters: dict[str, list[float]], width: int) -> None:
    law = laws([0.7, 1.0, 0.0, 1.5, 1.0], **filters)
    logits = 3 * noise(5, 4, width)
    positions = torch.arange(20, device=DEVICE).view(5, 4)
    out = sample.sample(logits, law, positions, int(Stream.SAMPLE), filtered=True)
    expected, scores = expected_sample(logits, law, positions, Stream.SAMPLE, filtered=True)
    assert_same_choice(out, expected, scores)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_of_equal_logits_as_many_are_kept_as_the_reference_keeps(
    filters: dict[str, list[float]],
) -> None:
    """Coarse logits: every threshold falls into a tie, and ties are kept by their id."""
    law = laws([1.0, 1.0, 0.0, 2.0, 1.0], **filters)
    logits = torch.randint(-3, 3, (5, 4, 200)).to(DEVICE, torch.float32)
    positions = torch.arange(20, device=DEVICE).view(5, 4)
    out = sample.sample(logits, law, positions, int(Stream.SAMPLE), filtered=True)
    expected, scores = expected_sample(logits, law, positions, Stream.SAMPLE, filtered=True)
    assert_same_choice(out, expected, scores)


def test_filtered_rows_that_are_not_finite_are_refused() -> None:
    law = laws([1.0, 1.0, 1.0], top_k=[5, 5, 5], top_p=[0.9, 0.9, 0.9])
    logits = noise(3, 1, 100)
    logits[0, 0, 50] = torch.nan
    logits[1, 0] = -torch.inf
    logits[2, 0, 1:] = -torch.inf
    positions = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
    out = sample.sample(logits, law, positions, filtered=True)
    assert out.flatten().tolist() == [-1, -1, 0]
