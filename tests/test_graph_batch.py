"""Static buffers: all or nothing, and nothing stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serve_app.graphs import FallbackReason, FieldSpec, RefusedBatch, StaticBuffers
from tests.toy_forward import FIELDS, HIDDEN, changed, toy_batch

MAX, WIDTH = 4, 5
POISON = {torch.int64: 10**9, torch.bool: True, torch.float32: float("nan")}


def poisoned() -> StaticBuffers:
    """Buffers as a larger, hostile batch would have left them."""
    buffers = StaticBuffers.allocate(MAX, WIDTH, "cpu", FIELDS)
    for tensor in buffers.tensors.values():
        tensor.fill_(POISON[tensor.dtype])
    return buffers


def snapshot(buffers: StaticBuffers) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in buffers.tensors.items()}


def assert_unchanged(buffers: StaticBuffers, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in buffers.tensors.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True, msg=name)


FAULTS: dict[FallbackReason, Any] = {
    FallbackReason.MISSING_FIELD: lambda value: None,
    FallbackReason.FIELD_TYPE: lambda value: value.tolist(),
    FallbackReason.FIELD_DTYPE: lambda value: value.to(torch.float64),
    FallbackReason.FIELD_DEVICE: lambda value: value.to("meta"),
    FallbackReason.FIELD_SHAPE: lambda value: value[:-1],
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("reason", FAULTS)
def test_a_field_at_fault_is_named_and_nothing_is_written(name: str, reason: FallbackReason) -> None:
    buffers, batch = poisoned(), toy_batch(3, WIDTH)
    setattr(batch, name, FAULTS[reason](getattr(batch, name)))
    before = snapshot(buffers)
    with pytest.raises(RefusedBatch) as refused:
        buffers.refresh(batch)
    assert (refused.value.reason, refused.value.field) == (reason, name)
    assert_unchanged(buffers, before)


@pytest.mark.parametrize("batch_size", range(1, MAX + 1))
def test_a_refreshed_row_is_the_batch_or_the_fill(batch_size: int) -> None:
    buffers, batch = poisoned(), toy_batch(batch_size, WIDTH)
    buffers.refresh(batch)
    for name, tensor in buffers.tensors.items():
        assert torch.equal(tensor[:batch_size], getattr(batch, name)), name
        assert (tensor[batch_size:] == FIELDS[name].fill).all(), name


def test_a_smaller_batch_leaves_nothing_of_the_larger_one() -> None:
    buffers = StaticBuffers.allocate(MAX, WIDTH, "cpu", FIELDS)
    buffers.refresh(toy_batch(4, WIDTH, seed=1))
    buffers.refresh(toy_batch(2, WIDTH, seed=2), rows=3)
    assert all((tensor[2] == FIELDS[name].fill).all() for name, tensor in buffers.tensors.items())


def test_refreshing_never_moves_a_buffer() -> None:
    buffers = StaticBuffers.allocate(MAX, WIDTH, "cpu", FIELDS)
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    buffers.refresh(toy_batch(3, WIDTH))
    assert addresses == {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}


@pytest.mark.parametrize("grow", [-1, 1])
def test_a_mask_of_other_width_is_refused(grow: int) -> None:
    batch = toy_batch(2, WIDTH)
    batch.tree_mask = torch.ones(2, WIDTH, WIDTH + grow, dtype=torch.bool)
    assert poisoned().refusal(batch) == (FallbackReason.FIELD_SHAPE, "tree_mask")


def test_a_batch_of_another_width_is_refused() -> None:
    with pytest.raises(RefusedBatch, match="width_mismatch"):
        poisoned().refresh(toy_batch(2, WIDTH - 1))


@pytest.mark.parametrize("rows", [None, 2, 9])
def test_a_batch_that_does_not_fit_the_rows_is_refused(rows: int | None) -> None:
    with pytest.raises(RefusedBatch, match="bs_exceeds_max"):
        poisoned().refresh(toy_batch(5 if rows is None else 3, WIDTH), rows)


def test_a_field_without_a_buffer_is_not_asked_for() -> None:
    buffers = StaticBuffers.allocate(MAX, WIDTH, "cpu", {"input_ids": FIELDS["input_ids"]})
    batch = changed(toy_batch(2, WIDTH), window_cache_loc=None, features=None)
    buffers.refresh(batch)
    torch.testing.assert_close(buffers.as_batch(2, "verify").input_ids, batch.input_ids)


def test_views_alias_the_buffers() -> None:
    buffers = StaticBuffers.allocate(MAX, WIDTH, "cpu", FIELDS)
    view = buffers.as_batch(3, "verify")
    buffers.refresh(toy_batch(3, WIDTH))
    torch.testing.assert_close(view.positions, buffers.tensors["positions"][:3])


def test_buffers_made_in_inference_mode_can_be_refreshed_outside() -> None:
    with torch.inference_mode():
        buffers = StaticBuffers.allocate(MAX, WIDTH, "cpu", FIELDS)
    buffers.refresh(toy_batch(2, WIDTH))


def test_gradients_do_not_enter_the_buffers() -> None:
    batch = changed(toy_batch(2, WIDTH), features=torch.zeros(2, WIDTH, HIDDEN, requires_grad=True))
    buffers = poisoned()
    buffers.refresh(batch)
    assert not buffers.tensors["features"].requires_grad


def test_unknown_buffers_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_states"):
        StaticBuffers.allocate(1, 1, "cpu", {"hidden_states": FieldSpec(())})


def test_a_reason_prints_as_its_label() -> None:
    assert [str(reason) for reason in FallbackReason] == [reason.value for reason in FallbackReason]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    ragged = torch.nested.nested_tensor([torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)])
    assert poisoned().refusal(changed(toy_batch(2, WIDTH), slots=ragged)) == (FallbackReason.FIELD_TYPE, "slots")
