"""Batched best-first selection without a heap: the same nodes in the same order as `tree.build_tree_reference`.

Two ways, both one top-k at the end. Small budgets use a static candidate table (few operations, so little launch
overhead on any device). Larger ones keep, per depth, the nodes that can still matter: a beam.

What this module does not do: tokens, argument checks, or cleaning of log-probs (`tree.build_tree` does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.ddtree.candidates import CandidateTable, candidate_table

# Above this many candidates a table's gathers cost more than the beam's extra operations. Measured at depth 15: the
# table's cost grows with its size, the beam's is some 200 launches on a GPU and about 1 ms on a CPU.
TABLE_LIMIT_GPU, TABLE_LIMIT_CPU = 1 << 18, 1 << 15


@dataclass(frozen=True)
class Chosen:
    """Nodes of B trees, root first, all [B, N]. `columns` index the flat [1 + D·K] token row whose column 0 is the
    root; the other fields are those of `tree.DraftTree`."""

    columns: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    log_weights: Tensor


def best_first(logps: Tensor, budget: int, spine_first: bool, *, table_limit: int | None = None) -> Chosen:
    """Select `budget` ≥ 1 nodes per request from logps float32 [B, D, K], descending along K, ≤ 0, no NaN.

    `table_limit`: use a table of at most so many candidates; None is what is fast on the device.
    """
    if table_limit is None:
        table_limit = TABLE_LIMIT_GPU if logps.is_cuda else TABLE_LIMIT_CPU
    _, depth, k = logps.shape
    table = candidate_table(depth, k, budget, spine_first, table_limit, logps.device)
    return from_table(logps, budget, table) if table is not None else from_beam(logps, budget, spine_first)


def from_table(logps: Tensor, budget: int, table: CandidateTable) -> Chosen:
    batch = logps.shape[0]
    flat = torch.cat((logps.new_zeros((batch, 1)), logps.flatten(1)), 1)
    # Added depth by depth: the order of float additions is part of the contract.
    weights = flat.index_select(1, table.paths[0])
    for columns in table.paths[1:]:
        weights = weights + flat.index_select(1, columns)
    return _finish(weights, table.column, table.depth, table.rank, table.parent, table.order, budget, table.spine)


def from_beam(logps: Tensor, budget: int, spine_first: bool) -> Chosen:
    k = logps.shape[2]
    depth = min(logps.shape[1], budget)
    levels = [_Level.root(logps)]
    for level in range(1, depth + 1):
        levels.append(levels[-1].children(logps[:, level - 1], budget - level + 1, spine_first))
    order = _preorder(levels)
    offsets = [0]
    for entry in levels:
        offsets.append(offsets[-1] + entry.weights.shape[1])
    size = offsets[-1]
    parents = [torch.full_like(levels[0].parent, size)]
    parents += [entry.parent + offsets[level] for level, entry in enumerate(levels[1:])]
    ranks = torch.cat([entry.rank for entry in levels], 1)
    depths = torch.cat([torch.full_like(entry.rank, level) for level, entry in enumerate(levels)], 1)
    columns = torch.where(depths > 0, 1 + (depths - 1) * k + ranks, 0)
    weights = torch.cat([entry.weights for entry in levels], 1)
    return _finish(weights, columns, depths, ranks, torch.cat(parents, 1), order, budget, depth if spine_first else 0)


@dataclass(frozen=True)
class _Level:
    """Nodes of one depth that can still be chosen, [B, W] in lexicographic order of their rank tuples."""

    weights: Tensor
    rank: Tensor
    parent: Tensor  # index within the level above

    @staticmethod
    def root(logps: Tensor) -> _Level:
        zeros = torch.zeros((logps.shape[0], 1), dtype=torch.int64, device=logps.device)
        return _Level(logps.new_zeros((logps.shape[0], 1)), zeros, zeros)

    def children(self, logps: Tensor, width: int, spine_first: bool) -> _Level:
        """At most `width` nodes of one depth fit beside their ancestors: the first ones of that depth."""
        k = logps.shape[1]
        weights = (self.weights[:, :, None] + logps[:, None]).flatten(1)
        key = weights
        if spine_first:
            key = weights.clone()
            key[:, 0] = float("inf")
        # Parents and ranks ascend, so candidates are in lexicographic order and a stable sort breaks ties by it.
        kept = key.sort(stable=True, dim=1, descending=True).indices[:, :width].sort(1).values
        return _Level(weights.gather(1, kept), kept % k, kept.div(k, rounding_mode="floor"))


def _preorder(levels: list[_Level]) -> Tensor:
    """Depth-first positions [B, ΣW] of all levels' nodes: the lexicographic order of tuples of any length."""
    sizes = [torch.ones_like(entry.rank) for entry in levels]
    for level in range(len(levels) - 1, 0, -1):
        sizes[level - 1].scatter_add_(1, levels[level].parent, sizes[level])
    positions = [torch.zeros_like(sizes[0])]
    for level in range(1, len(levels)):
        parent, above = levels[level].parent, sizes[level - 1] - 1
        # Siblings' subtrees in front of a node: all subtrees in front of it less those under earlier parents.
        before = sizes[level].cumsum(1) - sizes[level]
        earlier = above.cumsum(1) - above
        positions.append((positions[-1] - earlier).gather(1, parent) + 1 + before)
    return torch.cat(positions, 1)


def _finish(
    weights: Tensor,
    columns: Tensor,
    depths: Tensor,
    ranks: Tensor,
    parents: Tensor,
    order: Tensor,
    budget: int,
    spine: int,
) -> Chosen:
    """Take the root, the spine, then the first nodes by (weight descending, order ascending), `budget` in all.

    weights: [B, C]; the others [C] or [B, C]. Node 0 is the root; parents index nodes (root: C); order 0..spine are the
    root and the spine.
    """
    batch, size = weights.shape
    # Non-positive floats order by their magnitude bits, which leaves the low half of an int64 for the tie-break.
    cost = (weights.view(torch.int32) & 0x7FFFFFFF).long()
    key = torch.where(order <= spine, order, (cost << 32) | order)
    chosen = key.topk(budget + 1, 1, largest=False).indices
    position = torch.full((batch, size + 1), -1, device=weights.device)
    position.scatter_(1, chosen, torch.arange(budget + 1, device=weights.device).expand(batch, -1))

    def pick(values: Tensor) -> Tensor:
        return values[chosen] if values.dim() == 1 else values.gather(1, chosen)

    return Chosen(
        pick(columns), position.gather(1, pick(parents)), pick(depths), pick(ranks), weights.gather(1, chosen)
    )
