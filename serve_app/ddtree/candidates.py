"""Which rank tuples can be in a best-first tree at all, as a static table.

A node is named by its rank tuple (r1..rd): at depth j it takes the r_j-th best token. Log-probs are sorted and at
most 0, so every tuple that is componentwise no larger on a prefix weighs at least as much and comes first. Up to and
including itself a node therefore has Σ_j Π_{i≤j}(r_i+1) nodes in front of it, whatever the numbers are; beyond the
budget it is never chosen. For small budgets a few thousand survive, and one gather plus one top-k over them
replaces the heap.

What this module does not do: look at tokens or probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class CandidateTable:
    """C candidates in lexicographic order of their rank tuples, the root (empty tuple) first.

    Attributes:
        paths: per depth int64 [C], the column of the flat [1 + D·K] log-probs that each candidate adds there; column 0
            holds 0 and stands for "not that deep".
        column, depth, rank: int64 [C], of the candidate's own token (root: 0).
        parent: int64 [C], index of the parent candidate (root: C).
        order: int64 [C], 0..C-1, the tie-break.
        spine: the chain (0), (0,0), … are candidates 1..spine; 0 unless it is to be chosen first.
    """

    paths: tuple[Tensor, ...]
    column: Tensor
    depth: Tensor
    rank: Tensor
    parent: Tensor
    order: Tensor
    spine: int


@lru_cache(maxsize=64)
def candidate_table(
    depth: int, k: int, budget: int, spine_first: bool, limit: int, device: torch.device
) -> CandidateTable | None:
    """The table for trees of `budget` nodes over `depth` × `k` log-probs; None when it exceeds `limit` candidates.

    Made once per argument tuple, on the host, in up to a second: run once before capturing a CUDA graph that uses it.
    """
    depth = min(depth, budget)
    spine = depth if spine_first else 0
    paths: list[tuple[int, ...]] = [()]
    nodes: list[tuple[int, int, int]] = [(0, 0, -1)]  # depth, rank, parent

    def grow(parent: int, level: int, product: int, ahead: int, on_spine: bool) -> None:
        for rank in range(k):
            spine_node = on_spine and rank == 0
            # Chain nodes are in the tree anyway: they are neither counted nor do they compete.
            count = ahead + product * (rank + 1) - (1 if spine else 0)
            if len(nodes) > limit or (not spine_node and count > budget - spine):
                return
            index = len(nodes)
            paths.append((*paths[parent], 1 + (level - 1) * k + rank))
            nodes.append((level, rank, parent))
            if level < depth:
                grow(index, level + 1, product * (rank + 1), count, spine_node)

    if budget:
        grow(0, 1, 1, 0, spine > 0)
    size = len(nodes)
    if size > limit:
        return None
    depths, ranks, parents = torch.tensor(nodes, device=device).T.contiguous()
    parents[0] = size
    padded = torch.tensor([path + (0,) * (depth - len(path)) for path in paths], dtype=torch.int64, device=device)
    return CandidateTable(
        paths=padded.T.contiguous().unbind(0),
        column=torch.tensor([path[-1] if path else 0 for path in paths], device=device),
        depth=depths,
        rank=ranks,
        parent=parents,
        order=torch.arange(size, device=device),
        spine=spine,
    )
