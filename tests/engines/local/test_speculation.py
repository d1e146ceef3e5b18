"""Which tree a step verifies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serve_app.config import SpeculationConfig
from serve_app.engines.local.speculation import TreePlan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def plan(device: torch.device = CPU, block: int = 16, **config: Any) -> TreePlan:
    return TreePlan(SpeculationConfig(**config), block, device)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_an_automatic_budget_shrinks_as_the_batch_grows(device: torch.device) -> None:
    made = plan(device)
    budgets = [made.budget(batch) for batch in range(1, 65)]
    assert budgets == sorted(budgets, reverse=True)
    assert {budget + 1 for budget in budgets} == set(made.widths())


def test_a_draft_is_never_wider_than_the_drafters_block() -> None:
    assert plan(block=6).blocks() == [6]
    assert plan(block=16).block(1) == 16 > plan(block=16).block(8)


def test_a_given_budget_holds_for_every_batch() -> None:
    made = plan(budget=20)
    assert (made.budget(1), made.budget(64), made.widths()) == (20, 20, [21])


def test_a_budget_beyond_every_possible_node_is_cut() -> None:
    assert plan(block=3, budget=100, top_k=2).budget(1) == 2 + 4


def test_a_chain_is_the_top_candidates() -> None:
    tokens = torch.tensor([[[5, 6], [7, 8]]])
    tree = plan(block=3, method="chain").tree([1], tokens, torch.zeros(1, 2, 2))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([[1, 5, 7]], [[-1, 0, 1]])


def test_a_tree_has_its_budget_whatever_the_batch() -> None:
    made = plan(block=4, top_k=3)
    for batch in (1, 6):
        logps = torch.rand(batch, 3, 3).sort(-1, descending=True).values.log()
        tokens = torch.arange(9).view(1, 3, 3).expand(batch, -1, -1)
        assert made.tree([0] * batch, tokens, logps).width == made.budget(batch) + 1
