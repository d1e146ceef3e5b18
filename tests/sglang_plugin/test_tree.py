import pytest
import torch
from torch import Tensor

from serve_app.ddtree.accept import accept_walk
from serve_app.ddtree.mask import ancestor_mask
from serve_app.ddtree.tree import DraftTree, build_tree
from serve_app.sglang_plugin.args import Options
from tests.sglang_plugin.conftest import DEVICE

pytest.importorskip("triton", reason="the kernels need Triton")
from serve_app.sglang_plugin.tree import TreeBuffers, build_trees, write_mask

SHAPES = [
    Options(*widths, spine_first=spine)
    for widths in ((33, 8, 16), (65, 8, 16), (16, 1, 16), (8, 2, 4), (3, 4, 8))
    for spine in (False, True)
]
ROOTS, STARTS = torch.tensor([7, 8, 9], device=DEVICE), torch.tensor([5, 0, 11], device=DEVICE)


def candidates(chosen: Options, *, ties: bool = False) -> tuple[Tensor, Tensor]:
    shape = (3, chosen.depth, chosen.topk)
    tokens = torch.stack([torch.randperm(50)[: chosen.topk] for _ in range(3 * chosen.depth)]).view(shape)
    logps = -torch.randint(0, 3, shape).float() if ties else (2 * torch.randn(3, chosen.depth, 60)).log_softmax(-1)
    return tokens.to(DEVICE), logps.sort(-1, descending=True).values[..., : chosen.topk].contiguous().to(DEVICE)


def built(chosen: Options, tokens: Tensor, logps: Tensor) -> tuple[TreeBuffers, DraftTree]:
    trees = TreeBuffers.allocate(3, chosen.width, DEVICE)
    build_trees(trees, ROOTS, STARTS, tokens, logps, chosen)
    return trees, build_tree(ROOTS, tokens, logps, chosen.budget, spine_first=chosen.spine_first)


@pytest.mark.parametrize("chosen", SHAPES, ids=str)
def test_the_kernel_builds_the_heaps_tree(chosen: Options) -> None:
    trees, expected = built(chosen, *candidates(chosen))
    assert torch.equal(trees.tokens, expected.tokens)
    assert torch.equal(trees.parents, expected.parents)
    assert torch.equal(trees.positions, STARTS[:, None] + expected.depths)


@pytest.mark.parametrize("chosen", SHAPES, ids=str)
def test_equal_weights_change_which_nodes_not_how_heavy(chosen: Options) -> None:
    tokens, logps = candidates(chosen, ties=True)
    trees, expected = built(chosen, tokens, logps)
    depths = trees.positions - STARTS[:, None]
    weights = torch.zeros(3, chosen.width, device=DEVICE)
    for node in range(1, chosen.width):
        for row in range(3):
            level, parent = int(depths[row, node]) - 1, int(trees.parents[row, node])
            rank = int((tokens[row, level] == trees.tokens[row, node]).nonzero()[0])
            weights[row, node] = weights[row, parent] + logps[row, level, rank]
    assert torch.equal(weights.sort(1).values, expected.log_weights.sort(1).values)


@pytest.mark.parametrize("chosen", SHAPES, ids=str)
def test_links_name_every_node_once_under_its_parent(chosen: Options) -> None:
    trees, _ = built(chosen, *candidates(chosen))
    for row in range(3):
        seen = []
        for node in range(chosen.width):
            child = int(trees.next_token[row, node])
            while child >= 0:
                assert trees.parents[row, child] == node and child > node
                seen.append(child)
                child = int(trees.next_sibling[row, child])
        assert sorted(seen) == list(range(1, chosen.width))
    assert torch.equal(trees.index.view(-1).cpu(), torch.arange(3 * chosen.width))


def verify_tree_greedy(trees: TreeBuffers, predicted: Tensor, path: int) -> tuple[list[list[int]], list[int]]:
    """What SGLang's kernel of that name does with the links: (accepted rows of the flat batch, bonus tokens)."""
    rows, bonus = [], []
    for row in range(trees.tokens.shape[0]):
        node, accepted = 0, [int(trees.index[row, 0])]
        for _ in range(1, path):
            child = int(trees.next_token[row, node])
            while child != -1 and trees.tokens[row, child] != predicted[row, node]:
                child = int(trees.next_sibling[row, child])
            if child == -1:
                break
            node = child
            accepted.append(int(trees.index[row, node]))
        rows.append(accepted)
        bonus.append(int(predicted[row, node]))
    return rows, bonus


@pytest.mark.parametrize("chosen", SHAPES, ids=str)
def test_sglangs_walk_over_our_links_is_accept_walk(chosen: Options) -> None:
    trees, _ = built(chosen, *candidates(chosen))
    for _ in range(20):
        predicted = torch.randint(0, 50, (3, chosen.width), device=DEVICE)
        children = torch.randint(0, 4, (3, chosen.width), device=DEVICE) > 0
        hint = trees.tokens.gather(1, trees.next_token.clamp_min(0))
        predicted = torch.where(children & (trees.next_token >= 0), hint, predicted)
        rows, bonus = verify_tree_greedy(trees, predicted, chosen.path)
        accepted = accept_walk(trees.tokens, trees.parents, predicted, chosen.depth)
        assert [len(row) for row in rows] == accepted.lengths.tolist()
        assert bonus == accepted.bonus.tolist()
        for row, path in enumerate(rows):
            assert [r - row * chosen.width for r in path] == accepted.indices[row, : len(path)].tolist()


@pytest.mark.parametrize("chosen", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_the_mask_shows_ancestors_and_leaves_the_prefix_alone(chosen: Options, dtype: torch.dtype) -> None:
    trees, expected = built(chosen, *candidates(chosen))
    width = chosen.width
    mask = torch.ones(int((width * (STARTS + width)).sum()), dtype=dtype, device=DEVICE)
    write_mask(mask, trees.parents, STARTS)
    visible = ancestor_mask(expected.parents)
    begin = 0
    for row, start in enumerate(STARTS.tolist()):
        cells = mask[begin : begin + width * (start + width)].view(width, start + width)
        begin += cells.numel()
        assert cells[:, :start].all()
        assert torch.equal(cells[:, start:].bool(), visible[row])


def test_a_whole_mask_shows_the_prefix_where_other_trees_have_been() -> None:
    """Triton's kernel for deterministic inference reads those cells; they held earlier trees, laid out otherwise."""
    chosen = Options(33, 8, 16)
    trees, expected = built(chosen, *candidates(chosen))
    width = chosen.width
    mask = torch.zeros(int((width * (STARTS + width)).sum()), dtype=torch.bool, device=DEVICE)
    write_mask(mask, trees.parents, STARTS, whole=True)
    visible = ancestor_mask(expected.parents)
    begin = 0
    for row, start in enumerate(STARTS.tolist()):
        cells = mask[begin : begin + width * (start + width)].view(width, start + width)
        begin += cells.numel()
        assert cells[:, :start].all()
        assert torch.equal(cells[:, start:], visible[row])


@pytest.mark.parametrize("spine", [False, True])
def test_unusable_log_probs_still_give_a_full_tree(spine: bool) -> None:
    chosen = Options(33, 8, 16, spine)
    tokens, logps = candidates(chosen)
    logps[:, 1:, 1:] = float("-inf")
    trees, _ = built(chosen, tokens, logps)
    assert (trees.parents[:, 1:] >= 0).all() and (trees.positions > 0).any()
    pairs = torch.stack((trees.parents[:, 1:], trees.tokens[:, 1:]), -1).tolist()
    assert all(len({tuple(p) for p in row}) == chosen.budget for row in pairs)
