"""Scoring drafts against a finished text: chains, best-first trees, the walk and its tally."""

from __future__ import annotations

import pytest
import torch

from serve_app.ddtree.tree import build_tree
from serve_app.models.acceptance import Tally, chain_lengths, tree_lengths, walk

BUDGETS = (1, 3, 8, 20)


def drafts(seed: int, rows: int = 60, depth: int = 5, k: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random marginals over a vocabulary of 9, and truths that often follow the likely tokens."""
    gen = torch.Generator().manual_seed(seed)
    top = (torch.randn(rows, depth, 9, generator=gen) * 2).log_softmax(-1).topk(k, -1)
    rank = torch.randint(0, 4, (rows, depth, 1), generator=gen).clamp(max=1)
    return top.indices, top.values, top.indices.gather(2, rank)[..., 0]


def longest_true_path(tokens: list[int], parents: list[int], truth: list[int]) -> int:
    """Reference: walk the tree from the root along the truth."""
    node, length = 0, 1
    for token in truth:
        child = next((i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token), None)
        if child is None:
            break
        node, length = child, length + 1
    return length


@pytest.mark.parametrize("spine_first", [False, True])
@pytest.mark.parametrize("budget", BUDGETS)
def test_tree_lengths_equal_a_walk_through_the_built_tree(budget: int, spine_first: bool) -> None:
    tokens, logps, truth = drafts(budget)
    got = tree_lengths(tokens, logps, truth, BUDGETS, spine_first=spine_first)[BUDGETS.index(budget)]
    tree = build_tree(torch.zeros(len(truth), dtype=torch.int64), tokens, logps, budget, spine_first=spine_first)
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), truth.tolist(), strict=True)
    assert got.tolist() == [longest_true_path(*row) for row in rows]


def test_a_larger_best_first_tree_never_accepts_less() -> None:
    lengths = tree_lengths(*drafts(5), BUDGETS)
    assert (lengths[1:] >= lengths[:-1]).all()


def test_chain_stops_at_the_first_miss_and_at_the_end_of_the_text() -> None:
    top = torch.tensor([[1, 2, 3], [1, 9, 3], [1, 2, -1]])
    truth = torch.tensor([[1, 2, 3], [1, 2, 3], [1, -1, -1]])
    assert chain_lengths(top, truth).tolist() == [4, 2, 2]


def test_nothing_is_accepted_past_the_end() -> None:
    tokens, logps, truth = drafts(2)
    truth[:, 2:] = -1
    assert tree_lengths(tokens, logps, truth, (20,)).max() <= 3


def test_walk_visits_what_serving_would() -> None:
    assert walk([2, 9, 1, 3, 1, 1]) == [0, 2, 3]


def test_tally_cuts_the_last_step_at_the_end() -> None:
    tally = Tally(3)
    tally.add([2, 1, 4, 1])  # steps of 2, then 4 of which 2 are left
    assert (tally.tokens, tally.steps, tally.mean) == (4, 2, 2.0)


def test_tally_counts_each_depth_among_those_reached() -> None:
    tally = Tally(2)
    tally.add([1, 2, 1, 3, 1, 1, 1])  # steps at 0 (1), 1 (2), 3 (3), 6 (1)
    assert tally.reached == [4, 2]
    assert tally.per_depth() == [0.5, 0.5]


def test_an_empty_text_counts_nothing() -> None:
    tally = Tally(2)
    tally.add([])
    assert (tally.steps, tally.mean) == (0, 0.0)
