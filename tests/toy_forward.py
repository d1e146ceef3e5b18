"""A small real forward that reads every field of a `ForwardBatch` and writes a KV cache; graph runner tests use it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from serve_app.graphs import FieldSpec, ForwardBatch

HIDDEN, CELLS, SLOTS = 8, 256, 16
# The last cell and slot are scratch: what padding rows use.
FIELDS = {
    "input_ids": FieldSpec(("W",)),
    "positions": FieldSpec(("W",)),
    "slots": FieldSpec((), fill=SLOTS - 1),
    "out_cache_loc": FieldSpec(("W",), fill=CELLS - 1),
    "seq_lens": FieldSpec(()),
    "tree_mask": FieldSpec(("W", "W"), torch.bool, True),
    "window_cache_loc": FieldSpec(("W",), fill=CELLS - 1),
    "features": FieldSpec(("W", HIDDEN), torch.float32),
}
VOCAB = MAX_POSITION = 64


class ToyForward:
    """One attention layer over the step's own rows. Index errors on any id, position, slot or cell out of range."""

    def __init__(self, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self.embed, self.rotary, self.per_slot = (
            weights(VOCAB, HIDDEN),
            weights(MAX_POSITION, HIDDEN),
            weights(SLOTS, HIDDEN),
        )
        self.head = weights(HIDDEN, VOCAB)
        self.cache = torch.zeros(2, CELLS, HIDDEN, device=device)

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """A `ForwardBatch` with no field missing → (logits [B, W, VOCAB], {"pooled": [B, HIDDEN]})."""
        x = (
            self.embed[batch.input_ids]
            + self.rotary[batch.positions]
            + self.per_slot[batch.slots][:, None]
            + batch.features
        )
        self.cache[0, batch.out_cache_loc] = x
        self.cache[1, batch.window_cache_loc] = 2 * x
        keys = self.cache[0, batch.out_cache_loc] + self.cache[1, batch.window_cache_loc]
        scores = (x @ keys.transpose(1, 2)).masked_fill(~batch.tree_mask, -torch.inf)
        x = scores.softmax(2) @ keys * (1 + batch.seq_lens[:, None, None])
        return x @ self.head, {"pooled": x.mean(1)}


def toy_batch(batch_size: int, width: int, seed: int = 0, device: str = "cpu", mode: Any = None) -> ForwardBatch:
    """Random but valid: distinct cells, a causal mask."""
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device)

    cells = torch.randperm(CELLS - 1, generator=generator)[: batch_size * width].view(batch_size, width).to(device)
    lengths = ints(MAX_POSITION - width, batch_size)
    return ForwardBatch(
        mode=mode or ("decode" if width == 1 else "verify"),
        batch_size=batch_size,
        width=width,
        input_ids=ints(VOCAB, batch_size, width),
        positions=lengths[:, None] + torch.arange(width, device=device),
        slots=torch.randperm(SLOTS - 1, generator=generator)[:batch_size].to(device),
        out_cache_loc=cells,
        seq_lens=lengths,
        tree_mask=torch.ones(width, width, device=device).tril().bool().expand(batch_size, -1, -1),
        window_cache_loc=cells.flip(0),
        features=torch.randn(batch_size, width, HIDDEN, generator=generator).to(device),
        longest=int(lengths.max()),
    )


def changed(batch: ForwardBatch, **fields: Any) -> ForwardBatch:
    """A copy with other fields, of any type."""
    return dataclasses.replace(batch, **fields)
