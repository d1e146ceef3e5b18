import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ddtree.accept import Accepted
from serve_app.ddtree.kv import compaction_grid, compaction_moves

DEPTH, WIDTH, SLOT = 5, 12, 40


@st.composite
def accepted_steps(draw: st.DrawFn) -> tuple[torch.Tensor, Accepted]:
    """Starts, and ascending accepted paths of 1-3 requests."""
    rows, lengths = [], []
    for _ in range(draw(st.integers(1, 3))):
        drafts = sorted(draw(st.sets(st.integers(1, WIDTH - 1), max_size=DEPTH)))
        rows.append([0, *drafts] + [-1] * (DEPTH - len(drafts)))
        lengths.append(len(drafts) + 1)
    starts = draw(st.lists(st.integers(0, SLOT - WIDTH), min_size=len(rows), max_size=len(rows)))
    bonus = torch.zeros(len(rows), dtype=torch.int64)
    return torch.tensor(starts), Accepted(torch.tensor(rows), torch.tensor(lengths), bonus)


Step = tuple[torch.Tensor, Accepted]


def dense_cache(starts: torch.Tensor) -> torch.Tensor:
    """[B, SLOT] after a verify step: committed cells are negative, the tree's cells hold their node's index."""
    cache = torch.full((len(starts), SLOT), 1000)
    for row, start in enumerate(starts.tolist()):
        cache[row, :start] = -torch.arange(1, start + 1)
        cache[row, start : start + WIDTH] = torch.arange(WIDTH)
    return cache


def assert_compacted(cache: torch.Tensor, starts: torch.Tensor, accepted: Accepted) -> None:
    """Committed cells as they were, then exactly the accepted nodes: what a cache filled with only them holds."""
    for row, (start, length) in enumerate(zip(starts.tolist(), accepted.lengths.tolist(), strict=True)):
        fresh = torch.cat((-torch.arange(1, start + 1), accepted.indices[row, :length]))
        assert torch.equal(cache[row, : start + length], fresh)


@given(accepted_steps())
def test_moves_leave_a_fresh_cache(step: Step) -> None:
    starts, accepted = step
    cache = dense_cache(starts)
    rows, src, dst = compaction_moves(starts, accepted)
    cache[rows, dst] = cache[rows, src]
    assert_compacted(cache, starts, accepted)


@given(accepted_steps())
def test_moves_may_also_be_applied_one_by_one_in_order(step: Step) -> None:
    starts, accepted = step
    cache = dense_cache(starts)
    for row, src, dst in zip(*(part.tolist() for part in compaction_moves(starts, accepted)), strict=True):
        cache[row, dst] = cache[row, src]
    assert_compacted(cache, starts, accepted)


@given(accepted_steps())
def test_only_what_moves_is_moved(step: Step) -> None:
    _, src, dst = compaction_moves(*step)
    assert (src > dst).all()


@given(accepted_steps())
def test_grid_moves_the_same(step: Step) -> None:
    starts, accepted = step
    cache = dense_cache(starts)
    src, dst = compaction_grid(starts, accepted)
    cache.scatter_(1, dst, cache.gather(1, src))
    assert_compacted(cache, starts, accepted)


@given(accepted_steps())
def test_features_of_the_accepted_path_match_the_compacted_cache(step: Step) -> None:
    starts, accepted = step
    features = torch.arange(WIDTH).expand(len(starts), -1)
    gathered = features.gather(1, accepted.indices.clamp_min(0))
    for row, length in enumerate(accepted.lengths.tolist()):
        assert torch.equal(gathered[row, :length], accepted.indices[row, :length])


def test_an_accepted_spine_moves_nothing() -> None:
    spine = Accepted(torch.tensor([[0, 1, 2, -1]]), torch.tensor([3]), torch.tensor([0]))
    assert [part.numel() for part in compaction_moves(torch.tensor([6]), spine)] == [0, 0, 0]
