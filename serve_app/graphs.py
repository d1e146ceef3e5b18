"""Replays captured forwards when a batch fits one, runs it eagerly otherwise, and counts which and why.

The decision is a pure function of the batch (`GraphRunner.fallback_reason`); its value is the metric's label.

What this module does not do: attention, sampling, or threads (one step loop owns a runner).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from serve_app.graph_batch import FallbackReason, FieldSpec, ForwardBatch, RefusedBatch, StaticBuffers
from serve_app.graph_capture import Capturer, CudaCapturer, Replay, RerunCapturer

__all__ = [
    "TARGET_FIELDS", "Capturer", "CudaCapturer", "FallbackReason", "FieldSpec", "ForwardBatch", "GraphRunner",
    "RefusedBatch", "RerunCapturer", "StaticBuffers",
]  # fmt: skip

logger = logging.getLogger(__name__)

Role = Literal["target", "draft"]

# What a verify or decode forward over a slotted KV cache reads. Padding rows write KV slot 0, index 0: an engine that
# keeps something there passes other fill values.
TARGET_FIELDS: Mapping[str, FieldSpec] = {
    "input_ids": FieldSpec(("W",)),
    "positions": FieldSpec(("W",)),
    "slots": FieldSpec(()),
    "out_cache_loc": FieldSpec(("W",)),
    "seq_lens": FieldSpec(()),
    "tree_mask": FieldSpec(("W", "W"), torch.bool, True),
}


class GraphRunner:
    """One captured graph per (width, batch size).

    Args:
        forward: computes rows 0..bs of the buffers; reads nothing else that changes between steps except the KV cache.
            Every tensor it returns (alone, or in tuples, lists, dicts) has bs as its first dimension.
        device: where the buffers live.
        batch_sizes, widths: what to capture; each width gets its own buffers.
        fields: the buffers, see `FieldSpec`.
        modes: batch modes that `forward` computes.
        role: label for the callbacks.
        max_context: longest context, the width's rows included, that `forward` can address; None for no limit. With a
            limit, batches must carry `longest`.
        enabled: False runs everything eagerly.
        capturer: None takes CUDA graphs on a CUDA device and nothing elsewhere.
        on_replay: called with (role, padding rows, captured batch size) once per replay.
        on_fallback: called with (role, reason) once per eager run.
        on_capture: called with (role, graphs, seconds, bytes that the device's allocator reserved) after each capture.
    Raises:
        ValueError: empty or non-positive batch sizes or widths.
    """

    def __init__(
        self,
        forward: Callable[[StaticBuffers, int], Any],
        *,
        device: torch.device | str,
        batch_sizes: Sequence[int],
        widths: Sequence[int],
        fields: Mapping[str, FieldSpec] = TARGET_FIELDS,
        modes: Collection[str] = ("decode", "verify", "draft"),
        role: Role = "target",
        max_context: int | None = None,
        enabled: bool = True,
        capturer: Capturer | None = None,
        on_replay: Callable[[str, int, int], None] = lambda role, padding, size: None,
        on_fallback: Callable[[str, FallbackReason], None] = lambda role, reason: None,
        on_capture: Callable[[str, int, float, int], None] = lambda role, graphs, seconds, reserved: None,
    ) -> None:
        for name, sizes in (("batch_sizes", batch_sizes), ("widths", widths)):
            if not sizes or min(sizes) < 1:
                raise ValueError(f"{name} must be positive integers, got {list(sizes)}")
        self._forward = forward
        self._device = torch.device(device)
        self._batch_sizes = sorted(set(batch_sizes))
        self._widths = sorted(set(widths))
        self._fields = fields
        self._modes = frozenset(modes)
        self._role = role
        self._max_context = max_context
        self._enabled = enabled
        if capturer is None and self._device.type == "cuda" and torch.cuda.is_available():
            capturer = CudaCapturer(self._device)
        self._capturer = capturer
        self._on_replay = on_replay
        self._on_fallback = on_fallback
        self._on_capture = on_capture
        self._buffers: dict[int, StaticBuffers] = {}
        self._graphs: dict[tuple[int, int], Replay] = {}
        self._failed: set[tuple[int, int]] = set()

    def capture(self) -> None:
        """Capture every (width, batch size), the largest first so that smaller ones fit into its memory.

        A shape that fails is logged and runs eagerly as `CAPTURE_FAILED`. Drops what was captured before; does nothing
        when graphs are off.
        """
        self.release()
        if self._capturer is None or not self._enabled:
            return
        started, reserved = time.perf_counter(), self._reserved()
        largest = self._batch_sizes[-1]
        self._buffers = {w: StaticBuffers.allocate(largest, w, self._device, self._fields) for w in self._widths}
        shapes = [(width, size) for width in self._widths for size in self._batch_sizes]
        for width, size in sorted(shapes, key=lambda shape: shape[0] * shape[1], reverse=True):
            try:
                self._graphs[width, size] = self._capture_one(self._capturer, self._buffers[width], size)
            except Exception:
                logger.exception("capturing %s graph of %d requests x %d rows failed", self._role, size, width)
                self._failed.add((width, size))
        grown = max(self._reserved() - reserved, 0)
        self._on_capture(self._role, len(self._graphs), time.perf_counter() - started, grown)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def _capture_one(self, capturer: Capturer, buffers: StaticBuffers, size: int) -> Replay:
        buffers.reset()
        return capturer.capture(lambda: self._forward(buffers, size))

    def release(self) -> None:
        """Drop graphs and buffers, for instance before the memory they read is freed. Until `capture`, all is eager."""
        self._graphs.clear()
        self._failed.clear()
        self._buffers.clear()
        if self._capturer is not None:
            self._capturer.reset()

    def fallback_reason(self, batch: object) -> FallbackReason | None:
        """Why `run` would run this batch eagerly, None for a replay. Pure, and never raises."""
        if self._capturer is None:
            return FallbackReason.NO_CUDA
        if not self._enabled:
            return FallbackReason.DISABLED
        if not isinstance(batch, ForwardBatch) or not (_positive(batch.batch_size) and _positive(batch.width)):
            return FallbackReason.MALFORMED
        if not isinstance(batch.mode, str) or batch.mode not in self._modes:
            return FallbackReason.MODE
        if batch.width not in self._widths:
            return FallbackReason.WIDTH
        if batch.batch_size > self._batch_sizes[-1]:
            return FallbackReason.BATCH_TOO_LARGE
        if self._max_context is not None:
            if type(batch.longest) is not int:
                return FallbackReason.MISSING_FIELD
            if batch.longest + batch.width > self._max_context:
                return FallbackReason.CONTEXT
        if not self._captured_size(batch):
            fitting = [(batch.width, size) for size in self._batch_sizes if size >= batch.batch_size]
            failed = any(shape in self._failed for shape in fitting)
            return FallbackReason.CAPTURE_FAILED if failed else FallbackReason.NOT_CAPTURED
        refusal = self._buffers[batch.width].refusal(batch)
        return refusal[0] if refusal is not None else None

    def run(self, batch: ForwardBatch, eager: Callable[[ForwardBatch], Any]) -> Any:
        """The forward's output for the batch, by replay or by `eager(batch)`; counted once as one of the two.

        A replay's output is static memory: use or copy it before the next `run`.
        """
        reason = self.fallback_reason(batch)
        if reason is not None:
            self._on_fallback(self._role, reason)
            return eager(batch)
        size = self._captured_size(batch)
        self._buffers[batch.width].refresh(batch, size)
        output = self._graphs[batch.width, size]()
        self._on_replay(self._role, size - batch.batch_size, size)
        return _first_rows(output, batch.batch_size)

    def _captured_size(self, batch: ForwardBatch) -> int:
        """The smallest captured batch size that holds the batch; 0 for none."""
        fitting = (size for size in self._batch_sizes if size >= batch.batch_size)
        return next((size for size in fitting if (batch.width, size) in self._graphs), 0)


def _positive(value: object) -> bool:
    return type(value) is int and value > 0


def _first_rows(output: Any, rows: int) -> Any:
    if isinstance(output, Tensor):
        return output[:rows]
    if isinstance(output, dict):
        return {key: _first_rows(value, rows) for key, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(_first_rows(value, rows) for value in output))
    if isinstance(output, (tuple, list)):
        return type(output)(_first_rows(value, rows) for value in output)
    return output
