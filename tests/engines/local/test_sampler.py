"""The fast sampler against the plain one, and what its randomness promises."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engines.base import SamplingParams
from serve_app.engines.local import sampler
from serve_app.engines.local.sampler import argmax_rows, sample, sample_reference, support, topk_rows, uniform


def logits(seed: int, vocab: int, ties: bool) -> torch.Tensor:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (row * 2).round() / 2 if ties else row


@settings(max_examples=300)
@given(
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([5, 64, 1500]),
    ties=st.booleans(),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01, 0.99999]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    u=st.floats(0, 1, exclude_max=True),
)
def test_equals_the_reference(
    seed: int, vocab: int, ties: bool, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    row = logits(seed, vocab, ties)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert sample(row, params, u) == sample_reference(row, params, u)


def test_a_flat_distribution_needs_more_than_the_guess() -> None:
    row = torch.zeros(4 * sampler._GUESS)
    kept = support(row, SamplingParams(top_p=0.75))
    assert kept.ids is not None and kept.ids.tolist() == list(range(3 * sampler._GUESS))


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_filters_at_their_end_are_greedy(params: dict[str, Any]) -> None:
    row = logits(7, 200, ties=False)
    assert {sample(row, SamplingParams(**params), u / 50) for u in range(50)} == {int(row.argmax())}


def test_top_k_1_is_greedy_in_a_tie() -> None:
    row = torch.tensor([1.0, 5, 5, 5, 0])
    assert {sample(row, SamplingParams(top_k=1), u / 50) for u in range(50)} == {1}


def test_masked_tokens_are_never_drawn() -> None:
    row = torch.full((10,), float("-inf"))
    row[[3, 8]] = 1.0
    drawn = Counter(sample(row, SamplingParams(), u) for u in (0.0, 0.49, 0.51, 1 - 2**-53))
    assert drawn == {3: 2, 8: 2}


def test_a_tiny_temperature_does_not_overflow() -> None:
    row = logits(3, 100, ties=False) * 100
    assert sample(row, SamplingParams(temperature=1e-6), 0.999) == int(row.argmax())


def test_uniform_depends_on_seed_and_position_only() -> None:
    assert uniform(5, 9) == uniform(5, 9)
    assert len({uniform(seed, position) for seed in range(30) for position in range(30)}) == 900


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= uniform(seed, 0) < 1


def test_uniforms_are_uniform_and_positions_independent() -> None:
    values = torch.tensor([[uniform(seed, position) for position in range(40)] for seed in range(500)])
    counts = torch.histc(values, bins=20, min=0, max=1)
    expected = values.numel() / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 45  # chi-square, 19 degrees: p < 0.001 beyond 43.8
    assert values.T.corrcoef().fill_diagonal_(0).abs().max() < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [320, 333])
def test_argmax_rows_equals_argmax_ties_included(dtype: torch.dtype, vocab: int) -> None:
    rows = logits(1, 6 * vocab, ties=True).view(2, 3, vocab).to(dtype)
    lowest = (rows == rows.amax(-1, keepdim=True)).float().argmax(-1)
    assert torch.equal(argmax_rows(rows), lowest)


@pytest.mark.parametrize("vocab", [640, 333, 128])
def test_topk_rows_equals_topk(vocab: int) -> None:
    rows = logits(2, 6 * vocab, ties=False).view(2, 3, vocab)
    values, ids = topk_rows(rows, 8)
    expected = rows.topk(8, -1)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)
