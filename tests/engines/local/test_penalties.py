"""Logit rules against the token-by-token reference."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engines.base import SamplingParams
from serve_app.engines.local.penalties import LogitRules, apply_reference

VOCAB = 12
CPU = torch.device("cpu")
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@settings(max_examples=200)
@given(
    prompt=tokens, output=tokens, path=tokens,
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    presence=st.sampled_from([0.0, 0.7, -0.5]),
    frequency=st.sampled_from([0.0, 0.4]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    minimum=st.integers(0, 10),
)  # fmt: skip
def test_equals_the_reference(
    prompt: list[int], output: list[int], path: list[int], repetition: float, presence: float, frequency: float,
    bias: dict[int, float], minimum: int,
) -> None:  # fmt: skip
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias,
        min_tokens=minimum,
    )  # fmt: skip
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    rules = LogitRules(params, prompt, VOCAB, {2, 5}, CPU)
    for token in output:
        rules.commit([token])
    position = len(output) + len(path)
    got = rules.apply(row, path, position) if rules.active(position) else row
    expected = apply_reference(row.tolist(), params, prompt, [*output, *path], {2, 5})
    torch.testing.assert_close(got, torch.tensor(expected))


def test_a_path_that_is_not_taken_leaves_nothing_behind() -> None:
    rules = LogitRules(SamplingParams(frequency_penalty=1.0), [], VOCAB, (), CPU)
    row = torch.zeros(VOCAB)
    rules.apply(row, [3, 3, 4], 3)
    assert not rules.apply(row, [], 0).any()


def test_the_given_row_is_not_changed() -> None:
    rules = LogitRules(SamplingParams(logit_bias={1: 5.0}), [], VOCAB, (), CPU)
    row = torch.zeros(VOCAB)
    rules.apply(row, [], 0)
    assert not row.any()


def test_defaults_change_nothing_and_say_so() -> None:
    assert not LogitRules(SamplingParams(), [1, 2], VOCAB, {2}, CPU).active(0)
