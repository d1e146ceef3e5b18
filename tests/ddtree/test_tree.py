import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ddtree.best_first import best_first
from serve_app.ddtree.candidates import candidate_table
from serve_app.ddtree.tree import DraftTree, build_tree, build_tree_reference, chain_tree, max_nodes, root_tree
from tests.ddtree.trees import Drafts, all_paths, assert_same, drafts, random_drafts, rank_paths, row, weight


def build(d: Drafts) -> DraftTree:
    return build_tree(d.roots, d.tokens, d.logps, d.budget, spine_first=d.spine_first)


def reference(d: Drafts, index: int) -> DraftTree:
    return build_tree_reference(
        int(d.roots[index]), d.tokens[index], d.logps[index], d.budget, spine_first=d.spine_first
    )


@given(drafts())
def test_equals_the_heap(d: Drafts) -> None:
    tree = build(d)
    for index in range(len(d.roots)):
        assert_same(row(tree, index), reference(d, index))


@given(drafts().filter(lambda d: d.budget > 0))
def test_beam_equals_table(d: Drafts) -> None:
    table = best_first(d.logps, d.budget, d.spine_first)
    beam = best_first(d.logps, d.budget, d.spine_first, table_limit=0)
    for name in ("columns", "parents", "depths", "ranks", "log_weights"):
        assert torch.equal(getattr(table, name), getattr(beam, name)), name


@pytest.mark.parametrize("spine_first", [True, False])
@pytest.mark.parametrize("quantum", [0.0, 0.25])
@pytest.mark.parametrize("budget", [8, 15, 16, 32, 64, 200, 512])
def test_equals_the_heap_at_serving_sizes(budget: int, quantum: float, spine_first: bool) -> None:
    made = random_drafts(budget, 2, 15, 8, quantum=quantum)
    d = Drafts(made.roots, made.tokens, made.logps, budget, spine_first)
    tree = build(d)
    for index in range(2):
        assert_same(row(tree, index), reference(d, index))


@given(drafts(max_depth=4))
def test_is_the_heaviest_paths_of_a_full_enumeration(d: Drafts) -> None:
    tree = build(d)
    for index, logps in enumerate(d.logps):
        order = sorted(all_paths(d.depth, d.logps.shape[2]), key=lambda path: (-weight(logps, path), path))
        spine = [(0,) * level for level in range(1, d.depth + 1)] if d.spine_first else []
        wanted = (spine + [path for path in order if path not in spine])[: d.budget]
        assert rank_paths(tree, index) == [(), *wanted]


@given(drafts())
def test_parents_come_before_children_one_level_up(d: Drafts) -> None:
    tree = build(d)
    parents, nodes = tree.parents[:, 1:], torch.arange(1, tree.width)
    assert (parents >= 0).all() and (parents < nodes).all()
    assert torch.equal(tree.depths.gather(1, parents) + 1, tree.depths[:, 1:])


@given(drafts())
def test_has_exactly_budget_distinct_nodes(d: Drafts) -> None:
    tree = build(d)
    assert tree.width == d.budget + 1
    assert all(len(set(rank_paths(tree, index))) == tree.width for index in range(len(d.roots)))


@given(drafts())
def test_siblings_carry_distinct_tokens(d: Drafts) -> None:
    tree = build(d)
    for parents, tokens in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        edges = list(zip(parents, tokens, strict=True))
        assert len(set(edges)) == len(edges)


@given(drafts())
def test_spine_first_contains_the_chain(d: Drafts) -> None:
    tree = build_tree(d.roots, d.tokens, d.logps, d.budget, spine_first=True)
    length = min(d.budget, d.depth)
    chain = chain_tree(d.roots, d.tokens[:, :length, 0])
    for name in ("tokens", "parents", "depths", "ranks"):
        assert torch.equal(getattr(tree, name)[:, : length + 1], getattr(chain, name)), name


@given(drafts(), st.data())
def test_a_smaller_budget_is_a_prefix(d: Drafts, data: st.DataObject) -> None:
    smaller = data.draw(st.integers(0, d.budget))
    large = build(d)
    small = build(Drafts(d.roots, d.tokens, d.logps, smaller, d.spine_first))
    assert_same(small, DraftTree(*(values[:, : smaller + 1] for values in vars(large).values())))


@given(drafts())
def test_log_weights_are_the_sums_along_the_paths(d: Drafts) -> None:
    tree = build(d)
    for index, logps in enumerate(d.logps):
        wanted = [weight(logps, path) for path in rank_paths(tree, index)]
        assert tree.log_weights[index].tolist() == [float(value) for value in wanted]


@pytest.mark.parametrize("table_limit", [0, 1 << 20])
def test_is_well_formed_whatever_the_drafter_emits(table_limit: int) -> None:
    logps = torch.randn(4, 4, 5, generator=torch.Generator().manual_seed(1))
    logps[0, 1, 0], logps[1], logps[2, 0] = torch.nan, torch.nan, torch.inf
    clean = torch.nan_to_num(logps, nan=-torch.inf, posinf=0.0).clamp_max(0)
    chosen = best_first(clean, 20, True, table_limit=table_limit)
    assert (chosen.parents[:, 1:] >= 0).all() and (chosen.parents < torch.arange(21)).all()


def test_nan_counts_as_impossible() -> None:
    made = random_drafts(5, 1, 3, 3)
    logps = made.logps.clone()
    logps[0, 1, 2] = torch.nan
    impossible = logps.nan_to_num(nan=-torch.inf)
    assert_same(build_tree(made.roots, made.tokens, logps, 10), build_tree(made.roots, made.tokens, impossible, 10))


def test_half_precision_log_probs_are_summed_in_float32() -> None:
    made = random_drafts(6, 1, 4, 3)
    half = made.logps.bfloat16()
    assert_same(build_tree(made.roots, made.tokens, half, 9), build_tree(made.roots, made.tokens, half.float(), 9))


def test_no_requests_no_trees() -> None:
    tree = build_tree(
        torch.empty(0, dtype=torch.int64), torch.empty(0, 3, 2, dtype=torch.int64), torch.empty(0, 3, 2), 5
    )
    assert tree.tokens.shape == (0, 6)


def test_budget_zero_is_the_root_alone() -> None:
    made = random_drafts(7, 2, 3, 2)
    assert_same(build_tree(made.roots, made.tokens, made.logps, 0), root_tree(made.roots))


@pytest.mark.parametrize("budget", [-1, 7])
def test_impossible_budget_is_named(budget: int) -> None:
    made = random_drafts(8, 1, 2, 2)
    with pytest.raises(ValueError, match=f"budget {budget}"):
        build_tree(made.roots, made.tokens, made.logps, budget)


def test_every_node_fits_the_largest_budget() -> None:
    made = random_drafts(9, 1, 3, 3)
    tree = build_tree(made.roots, made.tokens, made.logps, max_nodes(3, 3))
    assert set(rank_paths(tree)) == {(), *all_paths(3, 3)}


def test_disagreeing_shapes_are_refused() -> None:
    made = random_drafts(10, 2, 3, 3)
    with pytest.raises(ValueError, match="disagree"):
        build_tree(made.roots[:1], made.tokens, made.logps, 3)


@pytest.mark.parametrize(
    ("depth", "k", "budget", "spine_first"), [(4, 3, 9, True), (4, 3, 9, False), (3, 5, 30, False)]
)
def test_candidates_are_those_with_room_for_what_precedes_them(
    depth: int, k: int, budget: int, spine_first: bool
) -> None:
    table = candidate_table(depth, k, budget, spine_first, 1 << 20, torch.device("cpu"))
    assert table is not None
    found, rank, parent = [()], table.rank.tolist(), table.parent.tolist()
    for node in range(1, len(rank)):
        found.append((*found[parent[node]], rank[node]))

    def before(path: tuple[int, ...]) -> int:
        smaller = [
            other
            for other in all_paths(depth, k)
            if len(other) <= len(path) and all(a <= b for a, b in zip(other, path, strict=False))
        ]
        return len([other for other in smaller if any(other) or not spine_first])

    spine = depth if spine_first else 0
    wanted = {p for p in all_paths(depth, k) if before(p) <= budget - spine}
    assert found == [(), *sorted(wanted)]
