"""Best-first draft trees of a fixed number of nodes (arXiv 2604.12989, section 4; spine first as in SGLang #29587).

The drafter gives, per depth, k tokens and their log-probs. The surrogate weight of a path is the sum of its log-probs;
the tree is the `budget` heaviest paths. Total order of nodes: weight descending, then the tuple of ranks along the
path ascending. Weights are float32 sums from the root down, so every implementation here gets identical bits.

What this module does not do: run the drafter, pick the budget, or touch a KV cache.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve_app.ddtree.best_first import best_first

_INF = float("inf")


@dataclass(frozen=True)
class DraftTree:
    """B trees of N = budget + 1 nodes. Node 0 is the root (the last committed token); parent index < child index.

    Attributes:
        tokens: int64 [B, N].
        parents: int64 [B, N], root: -1.
        depths: int64 [B, N], root: 0.
        ranks: int64 [B, N], which of its depth's k tokens a node carries; root: 0.
        log_weights: float32 [B, N], sum of log-probs along the path; root: 0.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    log_weights: Tensor

    @property
    def width(self) -> int:
        """N, the rows a verify step computes per request."""
        return self.tokens.shape[1]


def max_nodes(depth: int, k: int) -> int:
    """How many nodes, root excluded, exist over `depth` levels of `k` tokens: Σ k^d."""
    return sum(k**level for level in range(1, depth + 1))


def build_tree(roots: Tensor, tokens: Tensor, logps: Tensor, budget: int, *, spine_first: bool = True) -> DraftTree:
    """The `budget` heaviest nodes of each request's tree. No host synchronisation; any device.

    Args:
        roots: int [B], last committed token of each request.
        tokens: int [B, D, K], candidates per depth, distinct within a depth.
        logps: float [B, D, K], their log-probs normalised over the full vocabulary, descending along K (as
            `topk` returns them). -inf is allowed; values above 0 count as 0 and NaN as -inf.
        budget: nodes without the root.
        spine_first: take the whole top-1 chain (cut at `budget`) as nodes 1..D first, then the best of the rest; greedy
            acceptance is then never below the chain's.
    Raises:
        ValueError: shapes disagree, or `budget` is negative or exceeds `max_nodes(D, K)`.
    """
    _check(roots, tokens, logps, budget)
    roots, tokens = roots.long(), tokens.long()
    if budget == 0:
        return root_tree(roots)
    clean = torch.nan_to_num(logps.float(), nan=-_INF, posinf=0.0, neginf=-_INF).clamp_max(0.0)
    chosen = best_first(clean, budget, spine_first)
    flat_tokens = torch.cat((roots[:, None], tokens.flatten(1)), 1)
    return DraftTree(
        flat_tokens.gather(1, chosen.columns), chosen.parents, chosen.depths, chosen.ranks, chosen.log_weights
    )


def chain_tree(roots: Tensor, tokens: Tensor) -> DraftTree:
    """The degenerate tree of plain speculative decoding: one path, budget = D.

    Args:
        roots: int [B]. tokens: int [B, D], the drafter's argmax per depth. Weights are unknown here and set to 0.
    """
    batch, depth = tokens.shape
    steps = torch.arange(depth + 1, device=tokens.device).expand(batch, -1)
    return DraftTree(
        tokens=torch.cat((roots.long()[:, None], tokens.long()), 1),
        parents=steps - 1,
        depths=steps,
        ranks=torch.zeros_like(steps),
        log_weights=torch.zeros(batch, depth + 1, device=tokens.device),
    )


def root_tree(roots: Tensor) -> DraftTree:
    """A tree of one node per request: a verify step over it is plain autoregressive decoding."""
    return chain_tree(roots, roots.new_empty((roots.shape[0], 0)))


def build_tree_reference(
    root: int, tokens: Tensor, logps: Tensor, budget: int, *, spine_first: bool = True
) -> DraftTree:
    """`build_tree` for one request with the paper's heap; slow, and what the fast one is compared with.

    Args:
        root: last committed token. tokens: int [D, K]. logps: float [D, K]. Otherwise as in `build_tree`.
    Returns:
        A tree with B = 1, on the CPU.
    """
    _check(torch.tensor([root]), tokens[None], logps[None], budget)
    depth, k = logps.shape
    clean = np.nan_to_num(logps.float().cpu().numpy(), nan=-np.inf, posinf=0.0, neginf=-np.inf).clip(max=0.0)
    spine = min(depth, budget) if spine_first else 0
    # A node is (parent index, depth, rank, weight); the heap's key is (-weight, ranks of the path).
    nodes: list[tuple[int, int, int, np.float32]] = [(-1, 0, 0, np.float32(0))]
    heap: list[tuple[float, tuple[int, ...], int]] = []

    def push(parent: int, ranks: tuple[int, ...]) -> None:
        if len(ranks) <= depth and ranks[-1] < k:
            heapq.heappush(heap, (-float(nodes[parent][3] + clean[len(ranks) - 1, ranks[-1]]), ranks, parent))

    for level in range(spine):
        nodes.append((level, level + 1, 0, nodes[level][3] + clean[level, 0]))
        push(level, (*(0,) * level, 1))
    if not spine and budget:
        push(0, (0,))
    while len(nodes) <= budget:
        weight, ranks, parent = heapq.heappop(heap)
        nodes.append((parent, len(ranks), ranks[-1], np.float32(-weight)))
        push(parent, (*ranks[:-1], ranks[-1] + 1))
        push(len(nodes) - 1, (*ranks, 0))
    picked = [root] + [int(tokens[level - 1, rank]) for _, level, rank, _ in nodes[1:]]
    parents, depths, rank, weights = zip(*nodes, strict=True)
    return DraftTree(
        tokens=torch.tensor([picked]),
        parents=torch.tensor([parents]),
        depths=torch.tensor([depths]),
        ranks=torch.tensor([rank]),
        log_weights=torch.from_numpy(np.array([weights], dtype=np.float32)),
    )


def _check(roots: Tensor, tokens: Tensor, logps: Tensor, budget: int) -> None:
    if logps.dim() != 3 or tokens.shape != logps.shape or roots.shape != logps.shape[:1]:
        shapes = f"roots {tuple(roots.shape)}, tokens {tuple(tokens.shape)}, logps {tuple(logps.shape)}"
        raise ValueError(f"roots [B], tokens [B, D, K] and logps [B, D, K] disagree: {shapes}")
    limit = max_nodes(logps.shape[1], logps.shape[2])
    if not 0 <= budget <= limit:
        depth, k = logps.shape[1:]
        raise ValueError(f"budget {budget} is outside 0..{limit}, the nodes that depth {depth} and k {k} allow")
