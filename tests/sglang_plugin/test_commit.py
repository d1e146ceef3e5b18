import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.ddtree.accept import accept_walk
from serve_app.sglang_plugin.args import Options
from tests.sglang_plugin.conftest import DEVICE

pytest.importorskip("triton", reason="the kernels need Triton")
from serve_app.sglang_plugin.commit import CommitBuffers, KVMover, accept
from serve_app.sglang_plugin.tree import TreeBuffers
from tests.sglang_plugin.test_tree import STARTS, built, candidates

CHOSEN = Options(12, 3, 6)


def step(seed: int, capacity: int = 4) -> tuple[CommitBuffers, TreeBuffers, torch.Tensor]:
    torch.manual_seed(seed)
    trees, _ = built(CHOSEN, *candidates(CHOSEN))
    out = CommitBuffers.allocate(capacity, CHOSEN.width, CHOSEN.path, DEVICE)
    # Half of the nodes predict one of their children, so that paths of every length occur.
    child = torch.where(torch.rand(3, CHOSEN.width, device=DEVICE) < 0.8, trees.next_token, -1)
    sibling = trees.next_sibling.gather(1, child.clamp_min(0))
    child = torch.where((torch.rand(3, CHOSEN.width, device=DEVICE) < 0.5) & (sibling >= 0), sibling, child)
    guess = torch.randint(0, 50, (3, CHOSEN.width), device=DEVICE)
    out.posterior[:3] = torch.where(child >= 0, trees.tokens.gather(1, child.clamp_min(0)), guess)
    slots = torch.randperm(200, device=DEVICE)[: 3 * CHOSEN.width].view(3, CHOSEN.width)
    return out, trees, slots


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_acceptance_is_accept_walks(seed: int) -> None:
    out, trees, slots = step(seed)
    accept(out, trees, STARTS, slots, in_graph=True)
    expected = accept_walk(trees.tokens, trees.parents, out.posterior[:3], CHOSEN.depth)
    outcome = out.outcome(3)
    assert torch.equal(outcome.lengths, expected.lengths)
    assert torch.equal(outcome.bonus, expected.bonus)
    assert torch.equal(outcome.new_seq_lens, STARTS + expected.lengths)
    for row, length in enumerate(expected.lengths.tolist()):
        path = expected.indices[row, :length]
        assert torch.equal(out.rows[row, :length], path + row * CHOSEN.width)
        emitted = outcome.tokens.view(3, -1)[row, :length]
        assert emitted.tolist() == [*trees.tokens[row, path[1:]].tolist(), int(expected.bonus[row])]


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_compaction_reads_every_row_before_it_writes_one(seed: int) -> None:
    out, trees, slots = step(seed)
    accept(out, trees, STARTS, slots, in_graph=True)
    lengths = out.outcome(3).lengths.tolist()
    caches = [torch.randint(-99, 99, (200, 3, size), dtype=torch.int16, device=DEVICE) for size in (64, 32)]
    expected = [cache.clone() for cache in caches]
    for row, length in enumerate(lengths):
        nodes = out.rows[row, :length] - row * CHOSEN.width
        for cache, moved in zip(caches, expected, strict=True):
            moved[slots[row, :length]] = cache[slots[row, nodes]]
    KVMover(caches).move(out, 3)
    assert all(torch.equal(cache, moved) for cache, moved in zip(caches, expected, strict=True))


def test_a_captured_commit_that_is_switched_off_moves_nothing() -> None:
    out, trees, slots = step(1)
    out.enabled.zero_()
    accept(out, trees, STARTS, slots, in_graph=True)
    assert out.lengths[:3].tolist() == [0, 0, 0]
    accept(out, trees, STARTS, slots, in_graph=False)
    assert torch.equal(out.lengths[:3].long(), out.outcome(3).lengths)


def test_the_outcome_outlives_the_next_step() -> None:
    out, trees, slots = step(2)
    accept(out, trees, STARTS, slots, in_graph=True)
    outcome = out.outcome(3)
    kept = outcome.tokens.clone()
    out.result.fill_(-5)
    assert torch.equal(outcome.tokens, kept) and (outcome.lengths > 0).all()


def test_rows_that_are_not_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot move rows"):
        KVMover([torch.zeros(4, 3, dtype=torch.uint8, device=DEVICE)])
