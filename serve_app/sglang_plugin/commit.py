"""Acceptance and what follows from it, in fixed shapes so that it can live inside the captured verify graph.

`accept` walks the trees (sample-and-match, as `serve_app.ddtree.accept`), `move_kv` brings the accepted path's keys and
values to the front of each request's slots. Slots come from the step's own `out_cache_loc`, never from the request
table, which the scheduler may already be rewriting for the next step.

What this module does not do: sample, or write the drafter's cache (the worker does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_app.sglang_plugin.tree import TreeBuffers


@dataclass(frozen=True)
class CommitBuffers:
    """One step's outcome in static memory; P is the longest path.

    Attributes:
        enabled: int32 [1]; 0 makes a captured commit move nothing (a sampled batch commits after its graph).
        posterior: int64 [B, N], the target's token after each node.
        rows: int64 [B, P], the path's rows of the flat batch, the root's beyond its length.
        source, target: int64 [B, P], KV slots to move from and to; equal beyond the path.
        lengths: int32 [B], rows to commit; 0 where disabled.
        result: int64, flat: tokens [B·P] | lengths [B] | bonus tokens [B] | new sequence lengths [B], B the capacity.
    """

    enabled: Tensor
    posterior: Tensor
    rows: Tensor
    source: Tensor
    target: Tensor
    lengths: Tensor
    result: Tensor

    @staticmethod
    def allocate(batch: int, width: int, path: int, device: torch.device | str) -> CommitBuffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return CommitBuffers(
            enabled=torch.ones(1, dtype=torch.int32, device=device),
            posterior=zeros(batch, width),
            rows=zeros(batch, path),
            source=zeros(batch, path),
            target=zeros(batch, path),
            lengths=zeros(batch, dtype=torch.int32),
            result=zeros(batch * (path + 3)),
        )

    def outcome(self, batch: int) -> Outcome:
        """A copy of the result's first `batch` requests: the next step overwrites the original while the scheduler may
        still be copying this one to the host. One launch."""
        capacity, path = self.rows.shape
        flat = self.result.clone()
        tail = flat[capacity * path :].view(3, capacity)[:, :batch]
        return Outcome(flat, flat[: batch * path], tail[0], tail[1], tail[2])


@dataclass(frozen=True)
class Outcome:
    """What the scheduler gets, views of `flat`: int64 tokens [B·P] (valid up to lengths), lengths [B], bonus [B],
    new_seq_lens [B]."""

    flat: Tensor
    tokens: Tensor
    lengths: Tensor
    bonus: Tensor
    new_seq_lens: Tensor


def accept(out: CommitBuffers, trees: TreeBuffers, starts: Tensor, out_cache_loc: Tensor, *, in_graph: bool) -> None:
    """Walk B trees by `out.posterior` and write the outcome.

    Args:
        trees: of the B requests. starts: int [B], committed tokens. out_cache_loc: int64 [B, N], contiguous.
        in_graph: whether `out.enabled` is heeded.
    """
    batch, width = trees.tokens.shape
    capacity, path = out.rows.shape
    _accept[(batch,)](
        trees.tokens, trees.parents, out.posterior, starts, out_cache_loc, out.enabled, out.rows, out.source,
        out.target, out.lengths, out.result, width, path, capacity,
        LANES=triton.next_power_of_2(width), PATH=triton.next_power_of_2(path), HEED=in_graph, num_warps=1,
    )  # fmt: skip


class KVMover:
    """Moves rows of every layer's cache at once, reading all of a request's rows before it writes any.

    Args:
        caches: the pool's tensors, [slots, ...] each, contiguous; a row's bytes must be a multiple of 4.
    Raises:
        ValueError: a cache that is not contiguous or whose rows are odd-sized.
    """

    TILE = 128  # 4-byte words per program and row

    def __init__(self, caches: list[Tensor]) -> None:
        words = []
        for cache in caches:
            size = cache[0].numel() * cache.element_size()
            if not cache.is_contiguous() or size % 4:
                raise ValueError(f"cannot move rows of a cache of shape {tuple(cache.shape)} and dtype {cache.dtype}")
            words.append(size // 4)
        device = caches[0].device
        self._caches = caches  # the pointers below are theirs
        self._pointers = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=device)
        self._words = torch.tensor(words, dtype=torch.int64, device=device)
        self._tiles = triton.cdiv(max(words), self.TILE)

    def move(self, out: CommitBuffers, batch: int) -> None:
        """cache[target] = cache[source] for the first `lengths` entries of each of the first `batch` requests."""
        path = out.rows.shape[1]
        _move[(len(self._caches), batch, self._tiles)](
            self._pointers, self._words, out.source, out.target, out.lengths, path,
            PATH=triton.next_power_of_2(path), TILE=self.TILE, num_warps=4,
        )  # fmt: skip


@triton.jit
def _accept(  # type: ignore[no-untyped-def]
    tokens, parents, posterior, starts, cache_loc, enabled, rows, source, target, lengths, result, width, path,
    capacity, LANES: tl.constexpr, PATH: tl.constexpr, HEED: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    base = request * width
    lane = tl.arange(0, LANES)
    live = lane < width
    token = tl.load(tokens + base + lane, mask=live, other=-1)
    parent = tl.load(parents + base + lane, mask=live, other=-1)
    wanted = tl.load(posterior + base + lane, mask=live, other=-1)
    step = tl.arange(0, PATH)
    nodes = tl.zeros((PATH,), tl.int32)
    node = tl.full((), 0, tl.int32)
    count = tl.full((), 1, tl.int32)
    going = tl.full((), 1, tl.int32)
    for level in range(1, path):
        want = tl.sum(tl.where(lane == node, wanted, 0), 0)
        found = tl.min(tl.where((parent == node) & (token == want) & live, lane, LANES), 0)
        going = going & (found < LANES).to(tl.int32)
        node = tl.where(going == 1, found, node)
        nodes = tl.where((step == level) & (going == 1), node, nodes)
        count += going
    bonus = tl.sum(tl.where(lane == node, wanted, 0), 0)
    inside = step < path
    taken = step < count
    to = request * path + step
    tl.store(rows + to, base + nodes, mask=inside)
    slot = tl.load(cache_loc + base + step, mask=inside, other=0)
    tl.store(target + to, slot, mask=inside)
    tl.store(source + to, tl.load(cache_loc + base + tl.where(taken, nodes, step), mask=inside, other=0), mask=inside)
    emitted = tl.load(posterior + base + nodes, mask=inside, other=0)
    tl.store(result + to, tl.where(taken, emitted, 0), mask=inside)
    tail = result + capacity * path + request
    tl.store(tail, count.to(tl.int64))
    tl.store(tail + capacity, bonus)
    tl.store(tail + 2 * capacity, tl.load(starts + request).to(tl.int64) + count)
    if HEED:
        count = count * tl.load(enabled)
    tl.store(lengths + request, count)


@triton.jit
def _move(pointers, words, source, target, lengths, path, PATH: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    cache = tl.program_id(0)
    request = tl.program_id(1)
    length = tl.load(lengths + request)
    size = tl.load(words + cache)
    step = tl.arange(0, PATH)
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    valid = step < length
    here = tl.load(source + request * path + step, mask=valid, other=0)
    there = tl.load(target + request * path + step, mask=valid, other=0)
    moves = (valid & (here != there))[:, None] & (word < size)[None, :]
    data = tl.load(pointers + cache).to(tl.pointer_type(tl.int32))
    values = tl.load(data + here[:, None] * size + word[None, :], mask=moves, other=0)
    # A slot may be one move's source and another's target, and the rows lie in different warps.
    tl.debug_barrier()
    tl.store(data + there[:, None] * size + word[None, :], values, mask=moves)
