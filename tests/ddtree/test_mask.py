import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ddtree.mask import ancestor_mask, ancestor_mask_reference, positions
from tests.ddtree.trees import random_parents


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_rows_see_their_ancestors_and_themselves(size: int, seed: int) -> None:
    parents = [random_parents(seed + index, size) for index in range(2)]
    assert ancestor_mask(torch.tensor(parents)).tolist() == [ancestor_mask_reference(row) for row in parents]


@given(st.integers(1, 70))
def test_a_chain_is_causal(size: int) -> None:
    mask = ancestor_mask(torch.arange(-1, size - 1)[None])
    assert torch.equal(mask[0], torch.ones(size, size).tril().bool())


def test_unused_nodes_see_only_themselves_and_nobody_sees_them() -> None:
    mask = ancestor_mask(torch.tensor([[-1, 0, -1, 1]]))[0]
    assert mask[2].tolist() == mask[:, 2].tolist() == [False, False, True, False]


def test_siblings_share_a_position() -> None:
    depths = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3]])
    assert positions(torch.tensor([10, 4]), depths).tolist() == [[10, 11, 11, 12], [4, 5, 6, 7]]
