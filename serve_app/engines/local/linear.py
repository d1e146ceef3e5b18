"""Matrix products with the weight laid out once for the device that will read it.

On a CPU in bfloat16 a plain `F.linear` re-reads its weight in an order the tile unit does not like; oneDNN's packed
layout streams it about 1.5 times as fast, and an addition is applied while the product is in registers. The private
operators used are those that torch's own compiler emits for constant weights.

What this module does not do: quantise, or hold an unpacked copy beside the packed one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows the packed layout is tuned for: a batch of small trees.
_PACK_ROWS = 32


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of this kind are packed: CPU, and a dtype that oneDNN computes natively here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """y = x·Wᵀ + b for weight [out, in], frozen at construction.

    Args:
        weight: [out, in], already on its device; not kept when it is packed.
        bias: [out] or None.
        packed: None decides by `can_pack`; tests force either.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = can_pack(weight.device, weight.dtype) if packed is None else packed
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """y + other, other [..., out]; other keeps its values."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias).add_(other)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
        return out
