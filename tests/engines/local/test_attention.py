"""Grouped attention over slots against one head at a time."""

from __future__ import annotations

import pytest
import torch

from serve_app.engines.local.attention import attend, attend_reference, open_window, visibility

SLOTS, CAPACITY, HEADS, KV, DIM, WIDTH = 5, 40, 6, 2, 8, 7


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(3, WIDTH, HEADS, DIM, generator=generator)
    keys, values = torch.randn(2, SLOTS, CAPACITY, KV, DIM, generator=generator)
    lens = torch.tensor([0, 11, 30])
    mask = torch.rand(3, WIDTH, WIDTH, generator=generator) < 0.4
    return query, keys, values, lens, mask | torch.eye(WIDTH, dtype=torch.bool)


@pytest.mark.parametrize("slots", [slice(1, 4), torch.tensor([4, 0, 2])])
@pytest.mark.parametrize("extent", [37, CAPACITY])
def test_equals_the_reference(slots: slice | torch.Tensor, extent: int) -> None:
    query, keys, values, lens, mask = random_case(0)
    out = attend(query, keys, values, open_window(slots, lens, mask, extent, HEADS // KV, torch.float32))
    seen = visibility(lens, mask, extent)
    chosen = range(1, 4) if isinstance(slots, slice) else slots.tolist()
    for row, slot in enumerate(chosen):
        expected = attend_reference(query[row], keys[slot, :extent], values[slot, :extent], seen[row])
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-5)


def test_a_row_sees_committed_tokens_and_its_own_visible_rows_only() -> None:
    _, _, _, lens, mask = random_case(1)
    seen = visibility(lens, mask, CAPACITY)
    for request in range(3):
        start = int(lens[request])
        for row in range(WIDTH):
            expected = [True] * start + mask[request, row].tolist() + [False] * (CAPACITY - start - WIDTH)
            assert seen[request, row].tolist() == expected


def test_what_is_not_seen_does_not_matter() -> None:
    query, keys, values, lens, mask = random_case(2)
    window = open_window(slice(0, 3), lens, mask, CAPACITY, HEADS // KV, torch.float32)
    before = attend(query, keys, values, window)
    for request in range(3):
        end = int(lens[request]) + WIDTH
        keys[request, end:] = 1e4
        values[request, end:] = -1e4
    assert torch.equal(attend(query, keys, values, window), before)
