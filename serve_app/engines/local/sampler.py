"""From a row of target logits to one token, the same one wherever and however often it is asked.

Randomness is a function of (seed, output position) alone, and the draw is an inverse CDF over the filtered
distribution in vocabulary order. A seed therefore gives the same text with a tree, a chain or no drafter, and in any
batch; only floating-point noise in the logits, of the order of a batch's rounding, can move a boundary.

What this module does not do: penalties and bias (`penalties`), log-probabilities, or batching.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from serve_app.engines.base import SamplingParams

_MASK = (1 << 64) - 1
# First guess at how many tokens top_p keeps; a flatter distribution costs a full sort.
_GUESS = 512


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based hash (two rounds of splitmix64), one per output position."""
    return _mix(_mix(seed & _MASK) + (position & _MASK)) / (1 << 64) * (1 - 2**-53)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Support(NamedTuple):
    """What may be sampled: ids int64 [M] ascending (None: every id), weights float64 [M], not normalised."""

    ids: Tensor | None
    weights: Tensor


def support(row: Tensor, params: SamplingParams) -> Support:
    """Apply temperature → top_k → top_p → min_p to a row of logits, [V].

    Tokens of equal probability are kept in order of id, so that `top_k=1` is greedy even in a tie.
    """
    scaled = row.double()
    scaled = (scaled - scaled.max()) / params.temperature
    if not params.top_k and params.top_p >= 1 and params.min_p <= 0:
        return Support(None, scaled.exp())
    ids = _nucleus(scaled, params)
    if params.min_p > 0:
        # The largest weight is exp(0) = 1, so weights compare with min_p directly.
        ids = ids[scaled[ids].exp() >= params.min_p]
    ids = ids.sort().values
    return Support(ids, scaled[ids].exp())


def _nucleus(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Ids that top_k and top_p keep, the likeliest first."""
    vocab = scaled.shape[0]
    limit = min(params.top_k or vocab, vocab)
    total = None if params.top_k else scaled.exp().sum()
    for size in (min(limit, _GUESS), limit):
        ids = _largest(scaled, size)
        weights = scaled[ids].exp()
        mass = weights.sum() if total is None and size == limit else total
        if mass is None:
            continue
        reached = weights.cumsum(0) >= params.top_p * mass
        if params.top_p < 1 and bool(reached[-1]):
            return ids[: int(reached.int().argmax()) + 1]
        if size == limit:
            return ids
    raise AssertionError("the last size is the limit")


def _largest(scaled: Tensor, size: int) -> Tensor:
    """Ids of the `size` largest entries, ordered by (value descending, id ascending)."""
    if size < scaled.shape[0]:
        threshold = scaled.topk(size).values[-1]
        candidates = (scaled >= threshold).nonzero()[:, 0]
    else:
        candidates = torch.arange(size, device=scaled.device)
    order = scaled[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:size]]


def sample(row: Tensor, params: SamplingParams, u: float) -> int:
    """One token id from logits [V] (processed, not yet scaled by temperature) and a uniform number."""
    if params.temperature == 0:
        return int(argmax_rows(row[None])[0])
    ids, weights = support(row, params)
    cdf = weights.cumsum(0)
    target = torch.tensor([u * float(cdf[-1])], dtype=cdf.dtype, device=cdf.device)
    index = int(torch.searchsorted(cdf, target, right=True)[0])
    if index >= cdf.shape[0]:  # u · total rounded up to the total
        index = int(weights.nonzero()[-1, 0])
    return index if ids is None else int(ids[index])


def sample_reference(row: Tensor, params: SamplingParams, u: float) -> int:
    """`sample` with plain lists and one sort of the whole vocabulary."""
    logits = row.double().tolist()
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return order[0]
    top = logits[order[0]]
    weights = [math.exp((logits[token] - top) / params.temperature) for token in order]
    kept = len(order) if not params.top_k else min(params.top_k, len(order))
    if params.top_p < 1:
        bound, reached = params.top_p * math.fsum(weights[:kept]), 0.0
        for count in range(kept):
            reached += weights[count]
            if reached >= bound:
                kept = count + 1
                break
    chosen = [(order[i], weights[i]) for i in range(kept) if weights[i] >= params.min_p]
    chosen.sort()
    goal, reached = u * math.fsum(weight for _, weight in chosen), 0.0
    for token, weight in chosen:
        reached += weight
        if reached > goal:
            return token
    return next(token for token, weight in reversed(chosen) if weight > 0)


def argmax_rows(logits: Tensor, chunk: int = 64) -> Tensor:
    """argmax over the last dimension, the lowest id winning ties: [..., V] → int64 [...].

    torch's CPU argmax is scalar for bfloat16 and costs more than the head that made the logits; a vectorised maximum
    per chunk and a look into the winning chunk gives the same.
    """
    vocab = logits.shape[-1]
    if logits.device.type != "cpu" or vocab % chunk:
        return logits.argmax(-1)
    chunks = logits.reshape(-1, vocab // chunk, chunk)
    best = chunks.amax(-1).float().argmax(-1)
    inside = chunks[torch.arange(chunks.shape[0]), best].float().argmax(-1)
    return (best * chunk + inside).view(logits.shape[:-1])


def topk_rows(logits: Tensor, k: int, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """The k largest of each row, [..., V] → values and ids [..., k], largest first; ties in any order.

    On a CPU only the k chunks with the largest maxima are searched: they hold the k largest entries.
    """
    vocab = logits.shape[-1]
    if logits.device.type != "cpu" or vocab % chunk or vocab // chunk < k:
        values, ids = logits.topk(k, -1)
        return values, ids
    chunks = logits.reshape(-1, vocab // chunk, chunk)
    best = chunks.amax(-1).topk(k, -1).indices
    inside = chunks.gather(1, best[..., None].expand(-1, -1, chunk)).flatten(1)
    values, columns = inside.topk(k, -1)
    ids = best.gather(1, columns // chunk) * chunk + columns % chunk
    shape = (*logits.shape[:-1], k)
    return values.view(shape), ids.view(shape)
