"""What one forward reads, and the static memory that a captured forward reads it from.

A batch is never half-copied: `StaticBuffers.refresh` either fills every buffer or touches none and says why.

What this module does not do: capture, replay or count (`graphs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["decode", "verify", "prefill", "draft"]


class FallbackReason(StrEnum):
    """Why a forward ran eagerly. The values are a metric's label: bounded, and stable."""

    NO_CUDA = "no_cuda"  # the device has no CUDA graphs
    DISABLED = "graphs_disabled"  # switched off by configuration
    MALFORMED = "malformed_batch"  # not a ForwardBatch, or its sizes are not positive integers
    MODE = "mode_not_graphable"  # this kind of forward is never captured (prefill)
    WIDTH = "width_mismatch"  # no graph was laid out for this many rows per request
    BATCH_TOO_LARGE = "bs_exceeds_max"  # more requests than the largest captured batch
    CONTEXT = "context_exceeds_max"  # longest context plus the tree's rows exceeds what the graphs were made for
    MISSING_FIELD = "missing_field"  # a field that the graph reads is None
    FIELD_TYPE = "field_type"  # a field is not a dense tensor
    FIELD_DTYPE = "field_dtype"  # a field's dtype is not its buffer's
    FIELD_DEVICE = "field_device"  # a field lies on another device than its buffer
    FIELD_SHAPE = "field_shape"  # a field's shape is not (batch_size, *its buffer's row)
    NOT_CAPTURED = "shape_not_captured"  # capture was not run (or was released) for this shape
    CAPTURE_FAILED = "capture_failed"  # capture was tried for this shape and failed


@dataclass
class ForwardBatch:
    """Inputs of one forward over `batch_size` requests of `width` rows each; None is "not provided".

    Attributes:
        mode: what the forward is for. A verify step has one row per tree node, root included.
        input_ids: int64 [B, W]. positions: int64 [B, W].
        slots: int64 [B], KV slot of each request. out_cache_loc: int64 [B, W], flat KV index that each row writes.
        seq_lens: int64 [B], committed tokens of each request.
        tree_mask: bool [B, W, W], which rows of its request a row sees.
        window_cache_loc: int64 [B, W], `out_cache_loc` in the sliding-window layers' cache.
        features: float [B, W, F], target features for the drafter.
        longest: the largest of `seq_lens`, known on the host (reading it from a GPU would synchronise).
    """

    mode: Mode
    batch_size: int
    width: int
    input_ids: Tensor | None = None
    positions: Tensor | None = None
    slots: Tensor | None = None
    out_cache_loc: Tensor | None = None
    seq_lens: Tensor | None = None
    tree_mask: Tensor | None = None
    window_cache_loc: Tensor | None = None
    features: Tensor | None = None
    longest: int | None = None


TENSOR_FIELDS = (
    "input_ids", "positions", "slots", "out_cache_loc", "seq_lens", "tree_mask", "window_cache_loc", "features"
)  # fmt: skip


@dataclass(frozen=True)
class FieldSpec:
    """One static buffer. `row`: shape per request, "W" stands for the width. `fill`: what padding rows hold; it must be
    harmless to compute with (a scratch slot to write to, a mask row that sees something)."""

    row: tuple[int | Literal["W"], ...]
    dtype: torch.dtype = torch.int64
    fill: int | float | bool = 0


class RefusedBatch(ValueError):
    """The batch cannot fill every buffer. Nothing was written. `field`: the first one at fault."""

    def __init__(self, reason: FallbackReason, field: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.reason = reason
        self.field = field


@dataclass
class StaticBuffers:
    """Fixed memory for up to `max_bs` requests of `width` rows; owned by the graphs captured over it."""

    max_bs: int
    width: int
    specs: Mapping[str, FieldSpec]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls, max_bs: int, width: int, device: torch.device | str, specs: Mapping[str, FieldSpec]
    ) -> StaticBuffers:
        """Buffers for exactly the fields in `specs` (names of `ForwardBatch`), holding their fill values.

        Raises:
            ValueError: an unknown field name.
        """
        unknown = sorted(set(specs) - set(TENSOR_FIELDS))
        if unknown:
            raise ValueError(f"ForwardBatch has no tensor field {unknown[0]}")
        buffers = cls(max_bs, width, dict(specs))
        # Tensors made in inference mode could not be refreshed outside of it.
        with torch.inference_mode(False):
            for name, spec in specs.items():
                shape = (max_bs, *buffers.row(name))
                buffers.tensors[name] = torch.full(shape, spec.fill, dtype=spec.dtype, device=device)
        return buffers

    def row(self, name: str) -> tuple[int, ...]:
        """Shape of one request's part of a buffer."""
        return tuple(self.width if size == "W" else size for size in self.specs[name].row)

    def refusal(self, batch: ForwardBatch) -> tuple[FallbackReason, str] | None:
        """The first field that keeps the batch from filling every buffer, and why; None if it can. Pure."""
        for name, buffer in self.tensors.items():
            reason = _field_fault(getattr(batch, name), buffer, (batch.batch_size, *buffer.shape[1:]))
            if reason is not None:
                return reason, name
        return None

    @torch.no_grad()
    def refresh(self, batch: ForwardBatch, rows: int | None = None) -> None:
        """Copy the batch into rows 0..batch_size and reset the rest up to `rows` (default: all) to the fill values.

        Raises:
            RefusedBatch: before anything is written.
        """
        rows = self.max_bs if rows is None else rows
        if batch.width != self.width:
            raise RefusedBatch(FallbackReason.WIDTH, "width")
        if not batch.batch_size <= rows <= self.max_bs:
            raise RefusedBatch(FallbackReason.BATCH_TOO_LARGE, "batch_size")
        refusal = self.refusal(batch)
        if refusal is not None:
            raise RefusedBatch(*refusal)
        for name, buffer in self.tensors.items():
            buffer[: batch.batch_size].copy_(getattr(batch, name), non_blocking=True)
            buffer[batch.batch_size : rows].fill_(self.specs[name].fill)

    @torch.no_grad()
    def reset(self) -> None:
        """Fill values everywhere: valid input for warm-up and capture."""
        for name, buffer in self.tensors.items():
            buffer.fill_(self.specs[name].fill)

    def as_batch(self, rows: int, mode: Mode) -> ForwardBatch:
        """Views of the first `rows` requests, so that one model forward serves eager and captured runs."""
        batch = ForwardBatch(mode, rows, self.width)
        for name, buffer in self.tensors.items():
            setattr(batch, name, buffer[:rows])
        return batch


def _field_fault(value: object, buffer: Tensor, shape: tuple[int, ...]) -> FallbackReason | None:
    if value is None:
        return FallbackReason.MISSING_FIELD
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
        return FallbackReason.FIELD_TYPE
    if value.dtype != buffer.dtype:
        return FallbackReason.FIELD_DTYPE
    if value.device != buffer.device:
        return FallbackReason.FIELD_DEVICE
    if tuple(value.shape) != shape:
        return FallbackReason.FIELD_SHAPE
    return None
