import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ddtree.budget import choose_budget, expected_accepted, expected_by_budget
from serve_app.ddtree.tree import build_tree
from tests.ddtree.trees import Drafts, drafts


@given(drafts())
def test_expectation_of_every_budget_comes_from_one_tree(d: Drafts) -> None:
    by_budget = expected_by_budget(
        build_tree(d.roots, d.tokens, d.logps, d.budget, spine_first=d.spine_first).log_weights
    )
    for budget in range(d.budget + 1):
        tree = build_tree(d.roots, d.tokens, d.logps, budget, spine_first=d.spine_first)
        torch.testing.assert_close(by_budget[:, budget], expected_accepted(tree.log_weights))


def test_expected_by_budget_leaves_its_input_alone() -> None:
    weights = torch.tensor([[0.0, -1.0]])
    expected_by_budget(weights)
    assert weights.tolist() == [[0.0, -1.0]]


def test_a_certain_chain_is_accepted_whole() -> None:
    assert expected_accepted(torch.zeros(2, 6)).tolist() == [5.0, 5.0]


def test_impossible_drafts_expect_nothing() -> None:
    assert expected_accepted(torch.tensor([[0.0, -torch.inf]])).tolist() == [0.0]


def test_picks_most_tokens_per_cost() -> None:
    assert choose_budget({0: 0.0, 16: 3.0, 64: 4.0}, {0: 1.0, 16: 1.5, 64: 3.0}) == 16


def test_falls_back_to_plain_decoding_when_verification_costs_too_much() -> None:
    assert choose_budget({0: 0.0, 16: 3.0}, {0: 1.0, 16: 5.0}) == 0


def test_equal_budgets_go_to_the_smallest() -> None:
    assert choose_budget({32: 1.0, 8: 1.0}, {8: 2.0, 32: 2.0}) == 8


@given(st.dictionaries(st.integers(0, 512), st.tuples(st.floats(0, 20), st.floats(0.1, 50)), min_size=1))
def test_no_budget_beats_the_chosen_one(options: dict[int, tuple[float, float]]) -> None:
    chosen = choose_budget({b: e for b, (e, _) in options.items()}, {b: c for b, (_, c) in options.items()})
    rates = {b: (1 + e) / c for b, (e, c) in options.items()}
    assert rates[chosen] == max(rates.values())


@pytest.mark.parametrize(
    ("expected", "cost", "named"),
    [
        ({}, {}, "no budgets"),
        ({4: 1.0}, {}, r"cost\[4\]"),
        ({4: 1.0}, {4: 0.0}, r"cost\[4\]"),
        ({4: 1.0}, {4: float("nan")}, r"cost\[4\]"),
        ({4: float("nan")}, {4: 1.0}, r"expected\[4\]"),
        ({4: -1.0}, {4: 1.0}, r"expected\[4\]"),
    ],
)
def test_unusable_numbers_are_named(expected: dict[int, float], cost: dict[int, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        choose_budget(expected, cost)
