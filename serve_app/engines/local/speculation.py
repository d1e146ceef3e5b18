"""Which tree one step verifies: the method, and how many nodes pay at a batch size.

What this module does not do: draft, or measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from serve_app.config import SpeculationConfig
from serve_app.ddtree.tree import DraftTree, build_tree, chain_tree, max_nodes

# (largest batch, budget), measured on two CPU cores with the laptop model (benchmarks/local_engine.py --sweep).
CPU_BUDGETS = ((1, 24), (2, 16), (4, 12), (8, 8), (1 << 30, 8))
# Not measured yet: a small batch leaves a GPU idle, a large one does not.
CUDA_BUDGETS = ((4, 32), (8, 16), (1 << 30, 8))


class TreePlan:
    """How drafts become trees.

    Attributes:
        method: "ddtree" or "chain". depth: drafts per block.

    Args:
        budget: nodes without the root, "auto" for the device's table.
    """

    def __init__(self, config: SpeculationConfig, block_size: int, device: torch.device) -> None:
        self.method: Literal["ddtree", "chain"] = "chain" if config.method == "chain" else "ddtree"
        self.depth = block_size - 1
        self.top_k = 1 if self.method == "chain" else config.top_k
        self._spine_first = config.spine_first
        table: tuple[tuple[int, int], ...] = CUDA_BUDGETS if device.type == "cuda" else CPU_BUDGETS
        if config.budget != "auto":
            table = ((1 << 30, config.budget),)
        limit = max_nodes(self.depth, self.top_k)
        self._table = tuple((size, min(budget, limit)) for size, budget in table)

    def budget(self, batch: int) -> int:
        """Nodes without the root for a step of `batch` requests."""
        if self.method == "chain":
            return self.depth
        return next(budget for size, budget in self._table if batch <= size)

    def widths(self) -> list[int]:
        """Every row count per request that a verify step can have."""
        if self.method == "chain":
            return [self.depth + 1]
        return sorted({budget + 1 for _, budget in self._table})

    def tree(self, roots: Sequence[int], tokens: Tensor, logps: Tensor) -> DraftTree:
        """Trees from a draft: tokens and logps [B, D, K]."""
        root = torch.tensor(roots, dtype=torch.int64, device=tokens.device)
        if self.method == "chain":
            return chain_tree(root, tokens[:, :, 0])
        return build_tree(root, tokens, logps, self.budget(len(roots)), spine_first=self._spine_first)
