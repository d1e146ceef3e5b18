"""Percentiles, rates, steps and the knee."""

import random

import numpy as np
import pytest

from load_tests.summary import knee, levels, percentile, spread, summarise
from load_tests.timeline import Outcome


def done(started: float = 0.0, end: float = 1.0, tokens: int = 11, frames: int = 6, users: int = 1) -> Outcome:
    return Outcome(
        "chat", started, users=users, ttft_s=0.5, last_s=end, end_s=end, frames=frames, completion_tokens=tokens
    )


@pytest.mark.parametrize("q", [0, 1, 50, 90, 99, 100])
def test_percentiles_are_numpys(q: float) -> None:
    values = sorted(random.Random(1).random() for _ in range(37))
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)))


def test_nothing_has_no_spread() -> None:
    assert spread([None, None]) is None


def test_rates_and_acceptance_are_sums_over_sums() -> None:
    summary = summarise([done(), done(tokens=31, frames=6)], 2.0, 2, {})
    assert summary["output_tok_per_s"] == 21
    assert summary["acceptance"] == pytest.approx((10 + 30) / (5 + 5))
    assert summary["output_tok_per_s_per_user"] == pytest.approx(10.5)


def test_failures_are_counted_by_kind_and_left_out_of_latencies() -> None:
    failed = Outcome("chat", 0.0, failure="cut", ttft_s=99.0)
    left = Outcome("chat", 0.0, abandoned=True, ttft_s=99.0)
    summary = summarise([done(), failed, left], 1.0, 1, {})
    assert summary["failures"] == {"cut": 1} and summary["failure_rate"] == 0.5
    assert summary["ttft_s"]["max"] == 0.5


def test_goodput_counts_what_met_every_limit() -> None:
    outcomes = [done(), done(end=2.0), Outcome("chat", 0.0, failure="cut")]
    summary = summarise(outcomes, 1.0, 1, {"ttft": 0.6, "e2e": 1.5})
    assert summary["goodput_per_s"] == 1
    assert summary["goodput_rate"] == pytest.approx(1 / 3)


def test_a_step_holds_what_began_and_ended_in_it() -> None:
    inside, across, before = done(10.5), done(19.5), done(8.0, users=2)
    (row,) = levels([inside, across, before], [(10.0, 20.0, 1)], {})
    assert row["completed"] == 1 and row["users"] == 1


def test_the_knee_is_where_throughput_over_latency_is_largest() -> None:
    rows = [
        {"users": users, "output_tok_per_s": rate, "e2e_s": {"mean": latency}}
        for users, rate, latency in ((1, 10.0, 1.0), (2, 19.0, 1.1), (4, 20.0, 2.0))
    ]
    assert knee([*rows, {"users": 8, "output_tok_per_s": 0.0, "e2e_s": None}]) == 2
    assert knee([]) is None
