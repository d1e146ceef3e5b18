"""The slot cache."""

from __future__ import annotations

import torch

from serve_app.engines.local.kv_cache import KVCache

CPU = torch.device("cpu")


def numbered() -> KVCache:
    cache = KVCache(2, 8, 3, 1, 2, CPU, torch.float32)
    for layer in range(3):
        rows = torch.arange(3 * 8, dtype=torch.float32)[:, None].expand(-1, 4) + 100 * layer
        cache.write(layer, torch.arange(3 * 8), rows.contiguous())
    return cache


def test_a_row_holds_keys_then_values() -> None:
    cache = KVCache(1, 4, 1, 1, 2, CPU, torch.float32)
    cache.write(0, torch.tensor([2]), torch.tensor([[1.0, 2, 3, 4]]))
    assert cache.keys(0)[0, 2].tolist() == [[1, 2]]
    assert cache.values(0)[0, 2].tolist() == [[3, 4]]


def test_moves_read_everything_before_they_write() -> None:
    cache = numbered()
    cache.move(torch.tensor([9, 10, 11]), torch.tensor([8, 9, 10]))
    for layer in range(3):
        assert cache.keys(layer)[1, :4, 0, 0].tolist() == [9 + 100 * layer, 10 + 100 * layer, 11 + 100 * layer] * 1 + [
            11 + 100 * layer
        ]


def test_moves_touch_nothing_else() -> None:
    cache, untouched = numbered(), numbered()
    cache.move(torch.tensor([5]), torch.tensor([3]))
    changed = (cache.keys(0) != untouched.keys(0)).nonzero()[:, :2].unique(dim=0).tolist()
    assert changed == [[0, 3]]


def test_no_moves_is_fine() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    numbered().move(nothing, nothing)


def test_an_unwritten_cache_is_zero() -> None:
    cache = KVCache(2, 8, 3, 1, 2, CPU, torch.bfloat16)
    assert not cache.keys(1).any()
    assert not cache.values(2).any()


def test_writing_all_layers_equals_writing_each() -> None:
    one, other = KVCache(1, 4, 3, 1, 2, CPU, torch.float32), KVCache(1, 4, 3, 1, 2, CPU, torch.float32)
    rows, places = torch.randn(3, 2, 4), torch.tensor([3, 0])
    one.write_all(places, rows)
    for layer in range(3):
        other.write(layer, places, rows[layer])
    for layer in range(3):
        assert torch.equal(one.keys(layer), other.keys(layer))
        assert torch.equal(one.values(layer), other.values(layer))
