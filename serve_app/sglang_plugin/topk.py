"""The k most likely tokens of each row with their log-probabilities over the full vocabulary, in two launches.

The rows are few and the vocabulary wide: every program takes one slice of one row, a second launch merges the slices.
Equal logits resolve to the smaller token id, as argmax does, so that k = 1 is exactly DFLASH's draft.

What this module does not do: compute logits, or know about trees.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def topk_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk_logprobs` in plain torch: (tokens int64 [R, k], log-probs float32 [R, k]) of logits float [R, V]."""
    logps = logits.float().log_softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    return order, logps.gather(1, order).clamp_max(0.0)


def topk_logprobs(logits: Tensor, k: int, *, first_id: int = 0, tp_group: Any = None) -> tuple[Tensor, Tensor]:
    """The k best tokens per row. No host synchronisation; safe to capture.

    Args:
        logits: float [R, V], contiguous rows; a rank's shard of the vocabulary when `tp_group` is given.
        first_id: token id of column 0.
        tp_group: SGLang's tensor-parallel group; every rank gets the result over all shards.
    Returns:
        (tokens int64 [R, k], log-probs float32 [R, k] descending, at most 0).
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    values, ids, peaks, sums = _empty(logits.device, rows, chunks, k)
    _slice_topk[(rows, chunks)](
        logits, values, ids, peaks, sums, logits.stride(0), vocab, first_id, k, chunks, CHUNK=CHUNK, num_warps=4
    )
    if tp_group is None:
        return _merge(values, ids, peaks, sums, k, True)[:2]
    local = _merge(values, ids, peaks, sums, k, False)
    gathered = [_gather(tp_group, part) for part in local]
    return _merge(gathered[1], gathered[0], gathered[2], gathered[3], k, True)[:2]


def _empty(device: torch.device, rows: int, parts: int, k: int) -> Parts:
    return (
        torch.empty((rows, parts * k), dtype=torch.float32, device=device),
        torch.empty((rows, parts * k), dtype=torch.int64, device=device),
        torch.empty((rows, parts), dtype=torch.float32, device=device),
        torch.empty((rows, parts), dtype=torch.float32, device=device),
    )


def _merge(values: Tensor, ids: Tensor, peaks: Tensor, sums: Tensor, k: int, normalise: bool) -> Parts:
    """(ids, values, peak, sum) of the union of parts; the values as log-probs if `normalise`."""
    rows, parts = peaks.shape
    best, best_ids, peak, total = _empty(values.device, rows, 1, k)
    _merge_topk[(rows,)](
        values, ids, peaks, sums, best, best_ids, peak, total, k, parts,
        CANDIDATES=triton.next_power_of_2(parts * k), PARTS=triton.next_power_of_2(parts),
        NORMALISE=normalise, num_warps=4,
    )  # fmt: skip
    return best_ids, best, peak, total


def _gather(tp_group: Any, part: Tensor) -> Tensor:
    """[R, n] of every rank as [R, ranks · n], in rank order."""
    ranks = int(tp_group.world_size)
    out = part.new_empty((ranks * part.shape[0], part.shape[1]))
    tp_group.all_gather_into_tensor(out, part)
    return out.view(ranks, *part.shape).transpose(0, 1).reshape(part.shape[0], -1).contiguous()


@triton.jit
def _slice_topk(  # type: ignore[no-untyped-def]
    logits, values, ids, peaks, sums, stride, vocab, first_id, k, chunks, CHUNK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    peak = tl.max(x, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.exp(x - shift), 0))
    # A token drawn once must not be drawn again, also where all that is left is -inf.
    live = column < vocab
    for rank in range(k):
        best = tl.max(tl.where(live, x, float("-inf")), 0)
        at = tl.min(tl.where(live & (x == best), column, vocab + CHUNK), 0)
        live = live & (column != at)
        tl.store(values + (row * chunks + chunk) * k + rank, best)
        tl.store(ids + (row * chunks + chunk) * k + rank, at.to(tl.int64) + first_id)


@triton.jit
def _merge_topk(  # type: ignore[no-untyped-def]
    values, ids, peaks, sums, best_values, best_ids, best_peak, best_sum, k, parts,
    CANDIDATES: tl.constexpr, PARTS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    peak = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    total = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(peak, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.where(peak == float("-inf"), 0.0, total * tl.exp(peak - shift)), 0)
    tl.store(best_peak + row, top)
    tl.store(best_sum + row, total)
    norm = shift + tl.log(total)
    lane = tl.arange(0, CANDIDATES)
    live = lane < parts * k
    x = tl.load(values + row * parts * k + lane, mask=live, other=float("-inf"))
    token = tl.load(ids + row * parts * k + lane, mask=live, other=0)
    last = tl.full((), 1 << 62, tl.int64)
    for rank in range(k):
        best = tl.max(tl.where(live, x, float("-inf")), 0)
        chosen = tl.min(tl.where(live & (x == best), token, last), 0)
        live = live & (token != chosen)
        out = tl.minimum(best - norm, 0.0) if NORMALISE else best
        tl.store(best_values + row * k + rank, out)
        tl.store(best_ids + row * k + rank, chosen)
