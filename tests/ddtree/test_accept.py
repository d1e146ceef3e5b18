import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ddtree.accept import Accepted, accept_walk, committed_tokens, walk_lazy
from serve_app.ddtree.tree import chain_tree, root_tree
from tests.ddtree.trees import random_parents


def naive_walk(
    tokens: list[int], parents: list[int], posterior: list[int], node: int = 0, depth_left: int = 99
) -> list[int]:
    """The definition: a node, then the walk from the first child that carries the target's token."""
    for child, parent in enumerate(parents):
        if depth_left and parent == node and tokens[child] == posterior[node]:
            return [node, *naive_walk(tokens, parents, posterior, child, depth_left - 1)]
    return [node]


@st.composite
def verified(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens, parents and posterior of 1-3 trees over a tiny vocabulary, so that long matches and duplicates occur."""
    size, batch = draw(st.integers(1, 14)), draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 2), min_size=size, max_size=size)
    rows = st.lists(row, min_size=batch, max_size=batch)
    return draw(rows), [random_parents(draw(st.integers(0, 2**31)), size) for _ in range(batch)], draw(rows)


Verified = tuple[list[list[int]], list[list[int]], list[list[int]]]


def walk(batch: Verified, max_depth: int = 14) -> Accepted:
    tokens, parents, posterior = (torch.tensor(rows) for rows in batch)
    return accept_walk(tokens, parents, posterior, max_depth)


@given(verified(), st.integers(0, 15))
def test_equals_the_naive_walk(batch: Verified, max_depth: int) -> None:
    accepted = walk(batch, max_depth)
    for index, (tokens, parents, posterior) in enumerate(zip(*batch, strict=True)):
        path = naive_walk(tokens, parents, posterior, depth_left=max_depth)
        assert accepted.indices[index].tolist() == path + [-1] * (max_depth + 1 - len(path))
        assert accepted.lengths[index] == len(path)
        assert accepted.bonus[index] == posterior[path[-1]]


@given(verified(), st.one_of(st.none(), st.integers(0, 15)))
def test_lazy_walk_equals_the_batched_one(batch: Verified, max_depth: int | None) -> None:
    accepted = walk(batch, 14 if max_depth is None else max_depth)
    for index, (tokens, parents, posterior) in enumerate(zip(*batch, strict=True)):
        path, bonus = walk_lazy(tokens, parents, posterior.__getitem__, max_depth)
        assert path == accepted.indices[index, : accepted.lengths[index]].tolist()
        assert bonus == accepted.bonus[index]


@given(verified())
def test_lazy_walk_samples_each_accepted_node_once_in_order(batch: Verified) -> None:
    asked: list[int] = []
    tokens, parents, posterior = (rows[0] for rows in batch)

    def sample(node: int) -> int:
        asked.append(node)
        return posterior[node]

    path, _ = walk_lazy(tokens, parents, sample)
    assert asked == path


@given(verified())
def test_indices_ascend_and_never_lag_their_position(batch: Verified) -> None:
    for path, length in zip(walk(batch).indices.tolist(), walk(batch).lengths.tolist(), strict=True):
        kept = path[:length]
        assert kept == sorted(set(kept)) and all(index >= step for step, index in enumerate(kept))


@given(verified())
def test_emitted_tokens_are_the_targets_own(batch: Verified) -> None:
    accepted = walk(batch)
    emitted = committed_tokens(torch.tensor(batch[0]), accepted)
    for index, posterior in enumerate(batch[2]):
        path = accepted.indices[index, : accepted.lengths[index]].tolist()
        assert emitted[index] == [posterior[node] for node in path]


def test_unused_nodes_are_never_accepted() -> None:
    accepted = accept_walk(torch.tensor([[9, 5, 5]]), torch.tensor([[-1, -1, 0]]), torch.tensor([[5, 5, 7]]), 2)
    assert accepted.indices.tolist() == [[0, 2, -1]]


def test_a_fully_accepted_chain_still_gets_its_bonus() -> None:
    tree = chain_tree(torch.tensor([1]), torch.tensor([[2, 3]]))
    accepted = accept_walk(tree.tokens, tree.parents, torch.tensor([[2, 3, 4]]), 2)
    assert committed_tokens(tree.tokens, accepted) == [[2, 3, 4]]


def test_a_root_tree_is_plain_decoding() -> None:
    tree = root_tree(torch.tensor([7, 8]))
    accepted = accept_walk(tree.tokens, tree.parents, torch.tensor([[1], [2]]), 0)
    assert committed_tokens(tree.tokens, accepted) == [[1], [2]]


def test_no_requests() -> None:
    empty = torch.empty(0, 4, dtype=torch.int64)
    assert committed_tokens(empty, accept_walk(empty, empty, empty, 3)) == []
