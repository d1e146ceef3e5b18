"""Static key/value storage: one slot per running request, each as long as the context plus one tree.

Because of the tree's margin a verify step near the end of the context never writes past its slot; the engine trims what
it accepted there. One more slot than asked for takes the writes of padding rows.

What this module does not do: decide who gets a slot, share prefixes, or page.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class KVCache:
    """Keys and values, [layers, slots + 1, capacity, 2, kv_heads, head_dim].

    A token's K and V lie side by side for each layer, so that a layer writes both with one scatter; `flat(layer)` is
    the scatter's target, `keys`/`values` are what attention reads.

    Attributes:
        slots: usable slots. capacity: positions per slot. scratch: index of the slot that padding writes to.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.slots, self.capacity, self.scratch = slots, capacity, slots
        self._data = zeros((layers, slots + 1, capacity, 2, kv_heads, head_dim), device, dtype)
        self._flat = self._data.view(layers, (slots + 1) * capacity, 2 * kv_heads * head_dim)
        # Views are made once: on a CPU, making them costs a step as much as some products.
        self._layers = [(layer, *pair.unbind(2)) for layer, pair in zip(self._flat, self._data, strict=True)]

    def keys(self, layer: int) -> Tensor:
        """[slots + 1, capacity, kv_heads, head_dim], a view."""
        return self._layers[layer][1]

    def values(self, layer: int) -> Tensor:
        """[slots + 1, capacity, kv_heads, head_dim], a view."""
        return self._layers[layer][2]

    def write(self, layer: int, locations: Tensor, rows: Tensor) -> None:
        """rows [M, 2·kv_heads·head_dim] (K then V) to flat `locations` int64 [M] = slot · capacity + position."""
        self._layers[layer][0].index_copy_(0, locations, rows)

    def write_all(self, locations: Tensor, rows: Tensor) -> None:
        """`write` for every layer at once: rows [layers, M, 2·kv_heads·head_dim]."""
        self._flat.index_copy_(1, locations, rows)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy flat locations int64 [M] in every layer; all sources are read before any target is written."""
        if source.numel():
            self._flat.index_copy_(1, target, self._flat.index_select(1, source))


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros whose pages a CPU commits on first touch: a laptop pays for the context it uses, not for the longest."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    size = torch.empty((), dtype=dtype).element_size()
    raw = np.zeros(shape, dtype={2: np.int16, 4: np.int32}[size])
    return torch.from_numpy(raw).view(dtype)
