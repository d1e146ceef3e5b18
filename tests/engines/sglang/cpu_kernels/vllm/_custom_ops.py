"""The one kernel that released SGLang lacks on a machine without accelerator: it looks for it in another package.

What this module does not do: anything else of that package.
"""

import torch
from torch import Tensor


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotate queries and keys [T, heads * head_size] in place; halves are rotated against each other."""
    assert is_neox
    cos, sin = cos_sin_cache[positions.flatten()][:, None].chunk(2, dim=-1)
    for rotated in (query, key):
        heads = rotated.view(positions.numel(), -1, head_size)
        first, second = heads.chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
