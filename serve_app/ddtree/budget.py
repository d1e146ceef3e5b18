"""How many tree nodes pay: expected tokens per step against the step's cost (after CaDDTree, arXiv 2606.01813).

Trees are built so that a smaller budget's tree is the first nodes of a larger one's; one tree therefore tells the
expectation of every budget up to its own.

For callers that have measured their costs per width. The embedded engine uses a measured table by batch size instead
(`engines/local/speculation.py`), which needs no cost model.

What this module does not do: measure costs or build trees.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def expected_accepted(log_weights: Tensor) -> Tensor:
    """float [B]: drafts the surrogate expects to be accepted, Σ over nodes (root excluded) of their path probability.

    Args:
        log_weights: float [B, N], natural logs, root first (`tree.DraftTree.log_weights`).
    """
    return log_weights[:, 1:].exp().sum(1)


def expected_by_budget(log_weights: Tensor) -> Tensor:
    """float [B, N]: entry n is `expected_accepted` of the tree cut to a budget of n nodes; entry 0 is 0."""
    gains = log_weights.exp()
    gains[:, 0] = 0
    return gains.cumsum(1)


def choose_budget(expected: Mapping[int, float], cost: Mapping[int, float]) -> int:
    """The budget with the most tokens per unit of cost, (1 + expected) / cost; the smallest of equals.

    Args:
        expected: budget → accepted drafts per step and request (the bonus token is the 1).
        cost: budget → cost of one step, drafting included, in any one unit; every budget of `expected` is in it.
    Raises:
        ValueError: no budgets, a budget without a cost, a negative or non-finite expectation, a cost not above 0.
    """
    if not expected:
        raise ValueError("no budgets to choose from")
    for budget, value in expected.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"expected[{budget}] is {value}, not a finite number of tokens")
        if not 0 < cost.get(budget, 0.0) < float("inf"):
            raise ValueError(f"cost[{budget}] is {cost.get(budget)}, not a positive finite number")
    return min(expected, key=lambda budget: (-(1 + expected[budget]) / cost[budget], budget))
