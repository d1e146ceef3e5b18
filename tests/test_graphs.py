"""The graph runner, on a capturer that replays Python: replays, padding, counts. CUDA itself: tests/gpu."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from serve_app.graphs import FallbackReason, ForwardBatch, GraphRunner, RerunCapturer
from serve_app.metrics import EngineMetrics
from tests.graph_rig import SIZES, WIDTHS, Rig, assert_eager
from tests.test_graph_batch import assert_unchanged, snapshot
from tests.toy_forward import FIELDS, ToyForward, changed, toy_batch


@pytest.fixture
def rig() -> Rig:
    return Rig()


# The fault that started the project: a verify batch without a field that the buffers have.


@pytest.mark.parametrize("name", FIELDS)
def test_a_verify_batch_without_a_field_runs_eagerly(rig: Rig, name: str) -> None:
    rig.run(toy_batch(2, 1))
    rig.counted.clear()
    before = {width: snapshot(buffers) for width, buffers in rig.buffers.items()}
    full = toy_batch(2, 5)
    asked: list[ForwardBatch] = []

    def eager(batch: ForwardBatch) -> Any:
        asked.append(batch)
        return ToyForward()(full)

    output = rig.runner.run(changed(full, **{name: None}), eager)

    assert rig.counted == [("fallback", "target", FallbackReason.MISSING_FIELD)]
    assert len(asked) == 1 and getattr(asked[0], name) is None
    assert_eager(output, full)
    for width, buffers in rig.buffers.items():
        assert_unchanged(buffers, before[width])


@pytest.mark.parametrize("name", FIELDS)
def test_a_decode_graph_still_replays_after_the_refused_batch(rig: Rig, name: str) -> None:
    batch = toy_batch(2, 5)
    rig.runner.run(changed(batch, **{name: None}), lambda _: None)
    assert_eager(rig.run(toy_batch(2, 1)), toy_batch(2, 1))
    assert rig.counted[-1] == ("replay", "target", 0)


# Replay equals eager, whatever was in the buffers.


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("batch_size", range(1, 5))
def test_replay_over_poisoned_buffers_equals_eager(rig: Rig, batch_size: int, width: int) -> None:
    batch = toy_batch(batch_size, width, seed=batch_size)
    rig.poison()
    assert_eager(rig.run(batch), batch)


@pytest.mark.parametrize("batch_size", range(1, 5))
def test_padding_rows_write_scratch_only(rig: Rig, batch_size: int) -> None:
    batch = toy_batch(batch_size, 5)
    rig.toy.cache.zero_()
    rig.poison()
    rig.run(batch)
    alone = ToyForward()
    alone(batch)
    torch.testing.assert_close(rig.toy.cache[:, :-1], alone.cache[:, :-1])


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 3, 5]), st.integers(0, 99)), max_size=6))
def test_any_sequence_of_batches_equals_eager_and_counts_each_once(steps: list[tuple[int, int, int]]) -> None:
    rig = Rig()
    for batch_size, width, seed in steps:
        batch = toy_batch(batch_size, width, seed)
        rig.poison()
        assert_eager(rig.run(batch), batch)
    assert len(rig.counted) == len(steps)


def test_padding_rows_are_counted(rig: Rig) -> None:
    rig.run(toy_batch(3, 5))
    assert rig.counted == [("replay", "target", 1)]


# Construction, outputs, metrics.


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[Any]


def test_outputs_keep_their_structure_and_lose_the_padding() -> None:
    runner = GraphRunner(
        lambda buffers, rows: Pair(torch.zeros(rows, 2), [{"x": torch.zeros(rows)}, None]),
        device="cpu", batch_sizes=[4], widths=[1], capturer=RerunCapturer(),
    )  # fmt: skip
    runner.capture()
    output = runner.run(toy_batch(3, 1), lambda _: pytest.fail("eager"))
    assert isinstance(output, Pair)
    assert (output.left.shape, output.right[0]["x"].shape, output.right[1]) == ((3, 2), (3,), None)


@pytest.mark.parametrize("option", [{"batch_sizes": []}, {"batch_sizes": [0]}, {"widths": []}, {"widths": [-1]}])
def test_impossible_sizes_are_named(option: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        Rig(**option)


def test_counts_arrive_in_the_metrics() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m", 8, list(FallbackReason))
    rig = Rig(on_replay=metrics.graph_replay, on_fallback=metrics.graph_fallback, role="draft")
    rig.run(toy_batch(3, 5))
    rig.run(toy_batch(5, 5))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "m", "role": "draft", **labels})

    assert value("ddtree_graph_replays_total") == 1
    assert value("ddtree_graph_padding_rows_total") == 1
    assert value("ddtree_graph_fallbacks_total", reason="bs_exceeds_max") == 1


def test_a_capture_says_what_it_made() -> None:
    told: list[tuple[str, int, float, int]] = []
    rig = Rig(on_capture=lambda *capture: told.append(capture), role="draft")
    rig.runner.capture()
    assert [(role, graphs, reserved) for role, graphs, _, reserved in told] == [
        ("draft", len(SIZES) * len(WIDTHS), 0)
    ] * 2
    assert all(seconds > 0 for _, _, seconds, _ in told)
