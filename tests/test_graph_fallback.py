"""Why the graph runner runs a batch eagerly: each reason, and that asking is pure and total."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.graphs import FallbackReason, ForwardBatch, RerunCapturer
from tests.graph_rig import MAX_CONTEXT, SIZES, WIDTHS, Rig, assert_eager
from tests.test_graph_batch import assert_unchanged, snapshot
from tests.toy_forward import changed, toy_batch


@pytest.fixture
def rig() -> Rig:
    return Rig()


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
@settings(max_examples=400)
def test_any_batch_gets_a_reason_or_a_correct_replay(changes: dict[str, Any], width: int) -> None:
    batch = toy_batch(2, width)
    for name, value in changes.items():
        setattr(batch, name, value)
    reason = FUZZED.runner.fallback_reason(batch)
    assert reason is None or isinstance(reason, FallbackReason)
    if reason is None:
        FUZZED.buffers[batch.width].refresh(batch)


@given(st.one_of(garbage, tensors))
def test_anything_that_is_no_batch_is_malformed(thing: Any) -> None:
    assert FUZZED.runner.fallback_reason(thing) is FallbackReason.MALFORMED


@pytest.mark.parametrize("batch", [toy_batch(2, 5), toy_batch(9, 5), changed(toy_batch(2, 5), slots=None)])
def test_asking_for_the_reason_changes_nothing(rig: Rig, batch: ForwardBatch) -> None:
    before = snapshot(rig.buffers[5])
    assert rig.runner.fallback_reason(batch) is rig.runner.fallback_reason(batch)
    assert_unchanged(rig.buffers[5], before)
    assert not rig.counted


def test_every_reason_has_a_test() -> None:
    elsewhere = {"no_cuda", "graphs_disabled", "shape_not_captured", "capture_failed"}
    assert {*REFUSED, *elsewhere} == set(FallbackReason)
