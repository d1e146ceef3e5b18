"""Sample-and-match: which drafts the target agrees with.

The target gives one token per node: its argmax, or a sample of its distribution after that node. From the root, follow
the child that carries the node's token; where none does, that token is the bonus. Every emitted token is the target's
own sample given its own prefix, so the output law is the target's at any temperature (and for a tree that does not
depend on samples no other rule accepts more in expectation).

What this module does not do: sample, apply penalties, or trim at stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Accepted:
    """Outcome of one verify step.

    Attributes:
        indices: int64 [B, D+1], node indices of the accepted path, root first, padded with -1. They ascend, and
            `indices[b, j] >= j`.
        lengths: int64 [B], accepted nodes with the root, which is the number of tokens emitted: drafts + bonus.
        bonus: int64 [B], the target's token after the last accepted node; the next root.
    """

    indices: Tensor
    lengths: Tensor
    bonus: Tensor


def accept_walk(tokens: Tensor, parents: Tensor, posterior: Tensor, max_depth: int) -> Accepted:
    """Walk B trees at once, without host synchronisation.

    Args:
        tokens, parents: int64 [B, N], as in `tree.DraftTree`; unused nodes have parent -1.
        posterior: int64 [B, N], the target's token after each node.
        max_depth: D, where the walk stops; at least the tree's depth to accept all that matches.
    """
    size = tokens.shape[1]
    if size == 1:
        indices = torch.full((tokens.shape[0], max_depth + 1), -1, dtype=torch.int64, device=tokens.device)
        indices[:, 0] = 0
        return Accepted(indices, torch.ones_like(posterior[:, 0]), posterior[:, 0])
    nodes = torch.arange(size, device=tokens.device)
    # hit[b, n, c]: c is a child of n and carries n's token. The first such child, or N for none; N leads to N.
    hit = (parents[:, None] == nodes[:, None]) & (tokens[:, None] == posterior[:, :, None])
    following = torch.where(hit, nodes, size).amin(2)
    following = torch.cat((following, following.new_full((tokens.shape[0], 1), size)), 1)
    step = torch.zeros_like(tokens[:, :1])
    path = [step]
    for _ in range(max_depth):
        step = following.gather(1, step)
        path.append(step)
    indices = torch.cat(path, 1)
    missing = indices == size
    lengths = max_depth + 1 - missing.sum(1)
    last = indices.gather(1, lengths[:, None] - 1)
    return Accepted(indices.masked_fill(missing, -1), lengths, posterior.gather(1, last)[:, 0])


def walk_lazy(
    tokens: Sequence[int], parents: Sequence[int], sample: Callable[[int], int], max_depth: int | None = None
) -> tuple[list[int], int]:
    """`accept_walk` of one request that asks for the target's token of visited nodes only.

    Args:
        tokens, parents: of the N nodes, parent index < child index.
        sample: the target's token after a node; called once per accepted node, in path order.
        max_depth: where to stop; None for the whole tree.
    Returns:
        (path, bonus): node indices from the root on, and the next root.
    """
    limit = len(tokens) if max_depth is None else max_depth
    path = [0]
    while True:
        token = sample(path[-1])
        child = _matching_child(tokens, parents, path[-1], token) if len(path) <= limit else None
        if child is None:
            return path, token
        path.append(child)


def _matching_child(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None


def committed_tokens(tokens: Tensor, accepted: Accepted) -> list[list[int]]:
    """Tokens each request emits: its accepted drafts, then the bonus. Copies to the host once.

    Args:
        tokens: int64 [B, N], the verified trees' tokens.
    """
    drafts = tokens.gather(1, accepted.indices.clamp_min(0))[:, 1:]
    # [drafts | bonus | length] so that one transfer carries all.
    rows = torch.cat((drafts, accepted.bonus[:, None], accepted.lengths[:, None]), 1).tolist()
    return [[*row[: row[-1] - 1], row[-2]] for row in rows]
