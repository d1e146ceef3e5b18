"""Which tree one step verifies: the method, and how much drafting pays at a batch size.

What this module does not do: draft, or measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from serve_app.config import SpeculationConfig
from serve_app.ddtree.tree import DraftTree, build_tree, chain_tree, max_nodes


class Rule(NamedTuple):
    """For batches of at most `batch` requests: `budget` nodes without the root, from a block of `block` rows (root and
    masks; the drafter's own block size cuts it)."""

    batch: int
    budget: int
    block: int


_ANY = 1 << 30

# Measured on two cores with the laptop model (benchmarks/local_engine.py --sweep). A step computes budget + 1 rows per
# request, and a CPU's tile unit works on 16 rows at a time: 15 nodes cost what 11 do. From three requests on the
# arithmetic counts, no longer the reading of weights; half a block then accepts 2 % less and costs half the draft.
CPU_RULES = (Rule(2, 15, _ANY), Rule(_ANY, 7, 8))
# Not measured yet: a small batch leaves a GPU idle, a large one does not.
CUDA_RULES = (Rule(4, 32, _ANY), Rule(8, 16, _ANY), Rule(_ANY, 8, _ANY))


class TreePlan:
    """How drafts become trees.

    Attributes:
        method: "ddtree" or "chain". depth: the longest path of any tree. top_k: candidates per depth.

    Args:
        config: a budget of "auto" takes the device's rules.
    """

    def __init__(self, config: SpeculationConfig, block_size: int, device: torch.device) -> None:
        self.method: Literal["ddtree", "chain"] = "chain" if config.method == "chain" else "ddtree"
        self.depth = block_size - 1
        self.top_k = 1 if self.method == "chain" else config.top_k
        self._spine_first = config.spine_first
        rules: tuple[Rule, ...] = CUDA_RULES if device.type == "cuda" else CPU_RULES
        if self.method == "chain":
            rules = (Rule(_ANY, self.depth, block_size),)
        elif config.budget != "auto":
            rules = (Rule(_ANY, config.budget, block_size),)
        self._rules = [self._possible(rule, block_size) for rule in rules]

    def _possible(self, rule: Rule, block_size: int) -> Rule:
        block = min(rule.block, block_size)
        return rule._replace(budget=min(rule.budget, max_nodes(block - 1, self.top_k)), block=block)

    def _rule(self, batch: int) -> Rule:
        return next(rule for rule in self._rules if batch <= rule.batch)

    def budget(self, batch: int) -> int:
        """Nodes without the root for a step of `batch` requests."""
        return self._rule(batch).budget

    def block(self, batch: int) -> int:
        """Rows per request, root included, that a draft for `batch` requests computes."""
        return self._rule(batch).block

    def widths(self) -> list[int]:
        """Every row count per request that a verify step can have."""
        return sorted({rule.budget + 1 for rule in self._rules})

    def blocks(self) -> list[int]:
        """Every row count per request that a draft can have."""
        return sorted({rule.block for rule in self._rules})

    def tree(self, roots: Sequence[int], tokens: Tensor, logps: Tensor) -> DraftTree:
        """Trees from a draft: tokens and logps [B, D, K]."""
        root = torch.tensor(roots, dtype=torch.int64, device=tokens.device)
        if self.method == "chain":
            return chain_tree(root, tokens[:, :, 0])
        return build_tree(root, tokens, logps, self.budget(len(roots)), spine_first=self._spine_first)
