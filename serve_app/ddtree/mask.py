"""What each tree node may attend to, and at which position it sits.

What this module does not do: cover committed tokens (every node sees all of them) or build backend-specific masks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ancestor_mask(parents: Tensor) -> Tensor:
    """bool [B, N, N] from parents int64 [B, N] (root and unused nodes: -1): row n may see column m when m is n or one
    of its ancestors. Parent index < child index is not needed, acyclicity is."""
    batch, size = parents.shape
    if size == 1:
        return torch.ones((batch, 1, 1), dtype=torch.bool, device=parents.device)
    seen = torch.eye(size, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    # A sentinel row N ends every path; each round doubles the distance looked up, so log2(N) rounds reach the root.
    up = torch.where(parents < 0, size, parents)
    end = up.new_full((batch, 1), size)
    nothing = seen.new_zeros((batch, 1, size))
    reach = 1
    while reach < size:
        rows = torch.cat((seen, nothing), 1)
        seen = seen | rows.gather(1, up[:, :, None].expand(-1, -1, size))
        up = torch.cat((up, end), 1).gather(1, up)
        reach *= 2
    return seen.contiguous()


def ancestor_mask_reference(parents: list[int]) -> list[list[bool]]:
    """`ancestor_mask` of one request: a row is its parent's row and itself (parent index < child index)."""
    rows: list[list[bool]] = []
    for node, parent in enumerate(parents):
        row = list(rows[parent]) if parent >= 0 else [False] * len(parents)
        row[node] = True
        rows.append(row)
    return rows


def positions(starts: Tensor, depths: Tensor) -> Tensor:
    """int64 [B, N]: the position of each node. starts int [B]: the root's position, which is the number of tokens whose
    KV is committed; depths int64 [B, N]. Siblings share a position."""
    return starts.long()[:, None] + depths
