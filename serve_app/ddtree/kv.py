"""Where accepted nodes' keys and values go: index moves, so that a dense cache and a paged slot pool share them.

A verify step writes node n of a request at offset start + n. Afterwards the accepted path must lie at start, start+1, …
Apply moves as gather-then-scatter (`cache[dst] = cache[src]` with the right side read whole): a destination may be
another move's source. Whatever lies beyond the accepted length is dead and may be overwritten. Features of accepted
tokens are gathered with the same `Accepted.indices`, never "the first n rows".

What this module does not do: hold or move tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_app.ddtree.accept import Accepted


def compaction_moves(starts: Tensor, accepted: Accepted) -> tuple[Tensor, Tensor, Tensor]:
    """Only the moves that move something. The number of moves depends on the data: synchronises on a GPU.

    Args:
        starts: int [B], offset of the root in the request's slot (= its committed tokens before the step).
    Returns:
        (rows, src, dst), int64 [M]: request, and offsets within its slot.
    """
    src, dst = compaction_grid(starts, accepted)
    rows, columns = torch.nonzero(src != dst, as_tuple=True)
    return rows, src[rows, columns], dst[rows, columns]


def compaction_grid(starts: Tensor, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """The moves in a fixed shape, for graphs: (src, dst), int64 [B, D+1]; what need not move has src == dst.

    Entries past the accepted length name offsets up to start + D; they move nothing, but must be addressable.
    """
    steps = torch.arange(accepted.indices.shape[1], device=accepted.indices.device)
    base = starts.long()[:, None]
    return base + torch.where(accepted.indices < 0, steps, accepted.indices), base + steps
