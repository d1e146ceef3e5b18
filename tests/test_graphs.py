"""The graph runner, on a capturer that replays Python: decisions, counting, padding. CUDA itself: tests/gpu."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from serve_app.graphs import FallbackReason, ForwardBatch, GraphRunner, RerunCapturer, StaticBuffers
from serve_app.metrics import EngineMetrics
from tests.test_graph_batch import POISON, assert_unchanged, snapshot
from tests.toy_forward import FIELDS, ToyForward, changed, toy_batch

SIZES, WIDTHS, MAX_CONTEXT = (1, 2, 4), (1, 5), 64


class Rig:
    """A runner over the toy forward, its buffers, and everything it counted."""

    def __init__(self, **overrides: Any) -> None:
        self.toy = ToyForward()
        self.counted: list[tuple[str, str, Any]] = []
        self.buffers: dict[int, StaticBuffers] = {}
        self.shapes: list[tuple[int, int]] = []
        options: dict[str, Any] = {
            "device": "cpu",
            "batch_sizes": SIZES,
            "widths": WIDTHS,
            "fields": FIELDS,
            "max_context": MAX_CONTEXT,
            "capturer": RerunCapturer(),
            "on_replay": lambda role, padding, size: self.counted.append(("replay", role, padding)),
            "on_fallback": lambda role, reason: self.counted.append(("fallback", role, reason)),
        }
        self.runner = GraphRunner(self.forward, **{**options, **overrides})
        self.runner.capture()

    def forward(self, buffers: StaticBuffers, rows: int) -> Any:
        self.buffers[buffers.width] = buffers
        self.shapes.append((buffers.width, rows))
        return self.toy(buffers.as_batch(rows, "verify"))

    def run(self, batch: ForwardBatch) -> Any:
        return self.runner.run(batch, self.toy)

    def poison(self) -> None:
        for buffers in self.buffers.values():
            for tensor in buffers.tensors.values():
                tensor.fill_(POISON[tensor.dtype])


@pytest.fixture
def rig() -> Rig:
    return Rig()


def assert_eager(output: Any, batch: ForwardBatch) -> None:
    """The output is bit-equal to a fresh model's eager forward (on this capturer both run the same kernels)."""
    logits, extra = ToyForward()(batch)
    torch.testing.assert_close(output[0], logits)
    torch.testing.assert_close(output[1]["pooled"], extra["pooled"])


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
@settings(deadline=None)
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


# One test per way out.

REFUSED: dict[FallbackReason, Callable[[], ForwardBatch]] = {
    FallbackReason.MALFORMED: lambda: changed(toy_batch(1, 5), batch_size=0),
    FallbackReason.MODE: lambda: toy_batch(1, 5, mode="prefill"),
    FallbackReason.WIDTH: lambda: toy_batch(1, 4),
    FallbackReason.BATCH_TOO_LARGE: lambda: toy_batch(5, 5),
    FallbackReason.CONTEXT: lambda: changed(toy_batch(1, 5), longest=MAX_CONTEXT - 4),
    FallbackReason.MISSING_FIELD: lambda: changed(toy_batch(1, 5), longest=None),
    FallbackReason.FIELD_TYPE: lambda: changed(toy_batch(1, 5), slots=[0]),
    FallbackReason.FIELD_DTYPE: lambda: changed(toy_batch(1, 5), slots=torch.zeros(1)),
    FallbackReason.FIELD_DEVICE: lambda: changed(toy_batch(1, 5), slots=torch.zeros(1, device="meta").long()),
    FallbackReason.FIELD_SHAPE: lambda: changed(toy_batch(1, 5), tree_mask=torch.ones(1, 5, 4).bool()),
}


class Refusing(RerunCapturer):
    """Fails for chosen calls, counted from the largest shape."""

    def __init__(self, *failing: int) -> None:
        self.failing, self.calls = failing, 0

    def capture(self, forward: Callable[[], Any]) -> Callable[[], Any]:
        self.calls += 1
        if self.calls in self.failing:
            raise RuntimeError("out of memory")
        return super().capture(forward)


@pytest.mark.parametrize("reason", REFUSED)
def test_a_batch_no_graph_serves_is_counted_by_its_reason(rig: Rig, reason: FallbackReason) -> None:
    rig.runner.run(REFUSED[reason](), lambda _: None)
    assert rig.counted == [("fallback", "target", reason)]


@pytest.mark.parametrize("mode", ["decode", "verify", "prefill", "draft"])
def test_without_cuda_every_forward_is_a_counted_fallback(mode: str) -> None:
    rig = Rig(capturer=None)
    batch = toy_batch(2, 5, mode=mode)
    assert_eager(rig.run(batch), batch)
    assert rig.counted == [("fallback", "target", FallbackReason.NO_CUDA)]


def test_switched_off() -> None:
    rig = Rig(enabled=False)
    rig.run(toy_batch(2, 5))
    assert rig.counted == [("fallback", "target", FallbackReason.DISABLED)] and not rig.shapes


def test_not_captured_after_release(rig: Rig) -> None:
    rig.runner.release()
    rig.run(toy_batch(2, 5))
    assert rig.counted == [("fallback", "target", FallbackReason.NOT_CAPTURED)]


def test_capturing_again_binds_new_buffers(rig: Rig) -> None:
    old = rig.buffers[5]
    rig.runner.capture()
    batch = toy_batch(2, 5)
    assert_eager(rig.run(batch), batch)
    assert rig.buffers[5] is not old


def test_a_failed_capture_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(capturer=Refusing(1))
    rig.run(toy_batch(4, 5))
    assert rig.counted == [("fallback", "target", FallbackReason.CAPTURE_FAILED)]
    assert "4 requests x 5 rows" in caplog.text


def test_a_failed_capture_leaves_the_other_shapes(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(capturer=Refusing(1))
    rig.run(toy_batch(2, 5))
    assert rig.counted == [("replay", "target", 0)]


def test_a_failed_capture_is_served_by_the_next_larger_one(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(capturer=Refusing(2))
    rig.run(toy_batch(2, 5))
    assert rig.counted == [("replay", "target", 2)]


def test_largest_shape_is_captured_first(rig: Rig) -> None:
    rows = [width * size for width, size in rig.shapes]
    assert rows == sorted(rows, reverse=True) and set(rig.shapes) == {(w, s) for w in WIDTHS for s in SIZES}


def test_context_counts_the_trees_own_rows(rig: Rig) -> None:
    assert rig.runner.fallback_reason(changed(toy_batch(1, 5), longest=MAX_CONTEXT - 5)) is None
    assert rig.runner.fallback_reason(changed(toy_batch(1, 5), longest=MAX_CONTEXT - 4)) is FallbackReason.CONTEXT


def test_without_a_context_limit_the_longest_is_not_asked_for() -> None:
    rig = Rig(max_context=None)
    assert rig.runner.fallback_reason(changed(toy_batch(1, 5), longest=None)) is None


def test_an_eager_failure_is_the_callers_and_was_counted(rig: Rig) -> None:
    def broken(_: ForwardBatch) -> Any:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        rig.runner.run(toy_batch(9, 5), broken)
    assert rig.counted == [("fallback", "target", FallbackReason.BATCH_TOO_LARGE)]


# fallback_reason is pure and total.

garbage = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=3)
)
tensors = st.builds(
    lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
    st.lists(st.sampled_from([0, 1, 2, 5]), max_size=3),
    st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16]),
    st.sampled_from(["cpu", "meta"]),
)
odd_tensors = st.sampled_from(
    [torch.zeros(2, 5).to_sparse(), torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)]
)
names = [f.name for f in dataclasses.fields(ForwardBatch)]
FUZZED = Rig()


@given(st.dictionaries(st.sampled_from(names), st.one_of(garbage, tensors, odd_tensors)), st.sampled_from([1, 5]))
@settings(deadline=None, max_examples=400)
def test_any_batch_gets_a_reason_or_a_correct_replay(changes: dict[str, Any], width: int) -> None:
    batch = toy_batch(2, width)
    for name, value in changes.items():
        setattr(batch, name, value)
    reason = FUZZED.runner.fallback_reason(batch)
    assert reason is None or isinstance(reason, FallbackReason)
    if reason is None:
        FUZZED.buffers[batch.width].refresh(batch)


@given(st.one_of(garbage, tensors))
@settings(deadline=None)
def test_anything_that_is_no_batch_is_malformed(thing: Any) -> None:
    assert FUZZED.runner.fallback_reason(thing) is FallbackReason.MALFORMED


@pytest.mark.parametrize("batch", [toy_batch(2, 5), toy_batch(9, 5), changed(toy_batch(2, 5), slots=None)])
def test_asking_for_the_reason_changes_nothing(rig: Rig, batch: ForwardBatch) -> None:
    before = snapshot(rig.buffers[5])
    assert rig.runner.fallback_reason(batch) is rig.runner.fallback_reason(batch)
    assert_unchanged(rig.buffers[5], before)
    assert not rig.counted


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


def test_every_reason_has_a_test() -> None:
    elsewhere = {"no_cuda", "graphs_disabled", "shape_not_captured", "capture_failed"}
    assert {*REFUSED, *elsewhere} == set(FallbackReason)
