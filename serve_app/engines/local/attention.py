"""Attention of new rows over a slot cache: committed tokens of the request's own slot plus the visible new rows.

Prefill, decode, tree verify and drafting are one case: W new rows per request are written behind its committed tokens,
and a [W, W] mask says which of them each row sees. Shapes are static given W and the extent, so that the same code
can be captured in a CUDA graph.

What this module does not do: write the cache, rotate, or project.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """What one forward may see; shared by all layers.

    Attributes:
        slots: which cache rows hold the batch: a slice when they are neighbours (no copy), else int64 [B].
        extent: positions of a slot that are read, E.
        bias: [B, 1, G·W, E] additive mask in the model's dtype, one copy of the rows per query head of a KV group.
    """

    slots: slice | Tensor
    extent: int
    bias: Tensor


def visibility(seq_lens: Tensor, tree_mask: Tensor, extent: int) -> Tensor:
    """bool [B, W, E]: row w sees position e when e is committed, or new row e − seq_len is visible to it.

    Args:
        seq_lens: int64 [B], committed tokens. tree_mask: bool [B, W, W]. extent: E, at least max(seq_lens) + W.
    """
    batch, width, _ = tree_mask.shape
    offset = torch.arange(extent, device=seq_lens.device) - seq_lens[:, None]
    if width == 1:
        return ((offset < 0) | ((offset == 0) & tree_mask[:, 0]))[:, None]
    column = offset.clamp(0, width - 1)[:, None].expand(batch, width, extent)
    fresh = (offset >= 0) & (offset < width)
    return (offset < 0)[:, None] | (tree_mask.gather(2, column) & fresh[:, None])


def open_window(
    slots: slice | Tensor, seq_lens: Tensor, tree_mask: Tensor, extent: int, groups: int, dtype: torch.dtype
) -> Window:
    """Build the additive mask once per forward. `groups` is query heads per KV head."""
    seen = visibility(seq_lens, tree_mask, extent)
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return Window(slots, extent, bias.repeat(1, groups, 1)[:, None])


def attend(query: Tensor, keys: Tensor, values: Tensor, window: Window) -> Tensor:
    """Grouped-query attention.

    Args:
        query: [B, W, H, D]. keys, values: [slots, capacity, KVH, D], of one layer.
    Returns:
        [B, W, H·D]
    """
    batch, width, heads, dim = query.shape
    kv_heads = keys.shape[2]
    groups = heads // kv_heads
    # Query heads that share a KV head become rows of it: no key is repeated.
    if width == 1:
        rows = query.view(batch, kv_heads, groups, dim)
    else:
        rows = query.view(batch, width, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
        rows = rows.reshape(batch, kv_heads, groups * width, dim)
    key = keys[window.slots, : window.extent].transpose(1, 2)
    value = values[window.slots, : window.extent].transpose(1, 2)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=window.bias)
    if width > 1:
        out = out.view(batch, kv_heads, groups, width, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, width, heads * dim)


def attend_reference(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """`attend` for one request, head by head: query [W, H, D], keys and values [E, KVH, D], seen bool [W, E]."""
    width, heads, dim = query.shape
    groups = heads // keys.shape[1]
    out = []
    for head in range(heads):
        scores = query[:, head] @ keys[:, head // groups].T / dim**0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.append(weights @ values[:, head // groups])
    return torch.stack(out, 1).reshape(width, heads * dim)
