"""A graph runner over the toy forward whose capturer replays Python, and what it counted."""

from __future__ import annotations

from typing import Any

import torch

from serve_app.graphs import ForwardBatch, GraphRunner, RerunCapturer, StaticBuffers
from tests.test_graph_batch import POISON
from tests.toy_forward import FIELDS, ToyForward

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


def assert_eager(output: Any, batch: ForwardBatch) -> None:
    """The output is a fresh model's eager forward, up to the rounding of sums over another number of rows: products
    of a padded batch may add in another order, and terms far larger than the result cancel in them."""
    logits, extra = ToyForward()(batch)
    for found, expected in ((output[0], logits), (output[1]["pooled"], extra["pooled"])):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
