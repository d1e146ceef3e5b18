"""How many tokens a verify step would accept: chains and best-first trees scored against the text that the target
wrote.

Given the drafter's marginals at every position of a finished continuation, the acceptance length of every position
follows without running the target again: the longest prefix (chain) or the longest true path inside the tree. For
greedy text this is exactly what serving commits; for sampled text it is the law of sample-and-match (arXiv
2604.12989). No models here, only their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chain_lengths(top: Tensor, truth: Tensor) -> Tensor:
    """Accepted drafts + 1 for argmax chains. top, truth int [P, D]; truth -1 past the end of the text. -> int64 [P]."""
    return 1 + ((top == truth) & (truth >= 0)).long().cumprod(1).sum(1)


def tree_lengths(
    tokens: Tensor, logps: Tensor, truth: Tensor, budgets: Sequence[int], *, spine_first: bool = False
) -> Tensor:
    """Accepted drafts + 1 for best-first trees of each budget (nodes without the root). -> int64 [len(budgets), P].

    tokens, logps [P, D, K]: the drafter's top K per depth, best first. `spine_first` lays the top-1 chain before
    anything else. The tree is grown node by node for all P at once; a node counts when it continues the true path,
    so their number is its depth.
    """
    p, depth, k = tokens.shape
    steps, device = max(budgets), tokens.device
    weight = torch.full((p, 2 * steps + 1), float("-inf"), device=device)
    at_depth = torch.zeros(p, 2 * steps + 1, dtype=torch.int64, device=device)
    at_rank, parent_true = torch.zeros_like(at_depth), torch.zeros_like(at_depth, dtype=torch.bool)
    weight[:, 0], parent_true[:, 0] = logps[:, 0, 0], True
    flat_tokens, flat_logps = tokens.reshape(p, -1), logps.reshape(p, -1).float()
    accepted = torch.zeros(p, dtype=torch.int64, device=device)
    out = []
    for t in range(steps):
        pick = torch.full((p, 1), 2 * t, device=device) if spine_first and t < depth else weight.argmax(1, keepdim=True)
        w, d, r, above = (x.gather(1, pick) for x in (weight, at_depth, at_rank, parent_true))
        alive = w > float("-inf")
        true = above & alive & (flat_tokens.gather(1, d * k + r) == truth.gather(1, d))
        accepted += true[:, 0]
        weight.scatter_(1, pick, float("-inf"))
        here = flat_logps.gather(1, d * k + r)
        next_rank, next_depth = (r + 1).clamp(max=k - 1), (d + 1).clamp(max=depth - 1)
        sibling = torch.where(alive & (r + 1 < k), w - here + flat_logps.gather(1, d * k + next_rank), float("-inf"))
        child = torch.where(alive & (d + 1 < depth), w + flat_logps.gather(1, next_depth * k), float("-inf"))
        for column, new, nd, nr, on in (
            (2 * t + 1, sibling, d, next_rank, above),
            (2 * t + 2, child, next_depth, torch.zeros_like(r), true),
        ):
            weight[:, column], at_depth[:, column], at_rank[:, column], parent_true[:, column] = (
                new[:, 0],
                nd[:, 0],
                nr[:, 0],
                on[:, 0],
            )
        if t + 1 in budgets:
            out.append(1 + accepted)
    return torch.stack(out)


def walk(lengths: Sequence[int]) -> list[int]:
    """Positions at which a verify step starts when each commits `lengths[i]` tokens: the anchors that serving
    would visit."""
    visited, at = [], 0
    while at < len(lengths):
        visited.append(at)
        at += lengths[at]
    return visited


class Tally:
    """Acceptance over many texts: mean length per verify step, and how often each depth is accepted once it is
    reached."""

    def __init__(self, depth: int) -> None:
        self.tokens = self.steps = 0
        self.reached, self.accepted = [0] * depth, [0] * depth

    def add(self, lengths: Sequence[int]) -> None:
        """One text; `lengths[i]` is what a step at its i-th token would commit. The last step is cut at the end
        of the text."""
        for at in walk(lengths):
            left = len(lengths) - at
            self.steps += 1
            self.tokens += min(lengths[at], left)
            for d in range(min(lengths[at], left, len(self.reached))):
                self.reached[d] += 1
                self.accepted[d] += lengths[at] > d + 1

    @property
    def mean(self) -> float:
        """Tokens per verify step, bonus token included."""
        return self.tokens / max(1, self.steps)

    def per_depth(self) -> list[float]:
        """P(depth d accepted | depth d-1 accepted), for d = 1, 2, …."""
        return [a / max(1, r) for a, r in zip(self.accepted, self.reached, strict=True)]
