"""The target's token after each tree node: argmax, or one sample of that node's own distribution.

Acceptance then only compares tokens (sample-and-match), so whatever law is sampled here is the law of the output. It
has to be the law of SGLang's own sampler, per request: temperature, top-k, top-p and min-p, in the order of the
configured backend, and with a seed the same random numbers (a node samples at its position, as decoding would).

What this module does not do: adjust logits (grammar, bias), or walk trees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sample_nodes(logits: Tensor, info: Any, width: int, positions: Tensor, *, backend: str) -> Tensor:
    """int64 [B·N]: the target's token after every node. No host synchronisation.

    Args:
        logits: float32 [B·N, V], adjusted; not modified.
        info: SGLang's SamplingBatchInfo of the B requests.
        width: N. positions: int64 [B·N], the nodes' positions.
        backend: SGLang's sampling backend, "flashinfer" or "pytorch".
    """
    if info.is_all_greedy:
        return logits.argmax(-1)
    probs = torch.softmax(logits / _per_node(info.temperatures.view(-1, 1), width), dim=-1)
    if info.sampling_seed is not None:
        return _seeded(probs, info, width, positions)
    probs = restrict(
        probs,
        _per_node(info.top_ks, width) if info.need_top_k_sampling else None,
        _per_node(info.top_ps, width) if info.need_top_p_sampling else None,
        _per_node(info.min_ps, width) if info.need_min_p_sampling else None,
        joint=not (backend == "flashinfer" and info.need_min_p_sampling),
        fused=backend == "flashinfer",
    )
    # Gumbel's trick, argmax of p / Exp(1): exact, and without multinomial's device-side assertion.
    noise = torch.empty_like(probs).exponential_(1.0).clamp_min_(torch.finfo(probs.dtype).tiny)
    sampled = (probs / noise).argmax(-1)
    # SGLang writes greedy requests of a mixed batch as top-k 1; ties are then the sampler's only freedom.
    return torch.where(_per_node(info.top_ks, width) == 1, logits.argmax(-1), sampled)


def restrict(
    probs: Tensor,
    top_ks: Tensor | None,
    top_ps: Tensor | None,
    min_ps: Tensor | None,
    *,
    joint: bool,
    fused: bool = False,
) -> Tensor:
    """Zero what top-k, top-p and min-p exclude; not renormalised.

    Args:
        probs: float [R, V]. top_ks: int [R]; top_ps, min_ps: float [R]; None for "no such limit".
        joint: top-p counts the original distribution's mass; otherwise that of what top-k left.
        fused: use SGLang's kernels (the same threshold without a sort; CUDA only).
    """
    kept = probs
    if top_ks is not None:
        kept = torch.where(_top_k(probs, top_ks, fused) > 0, probs, 0.0)
    if top_ps is not None:
        base = probs if joint or top_ks is None else kept / kept.sum(-1, keepdim=True)
        kept = torch.where(_top_p(base, top_ps, fused) > 0, kept, 0.0)
    if min_ps is not None:
        kept = torch.where(kept >= kept.amax(-1, keepdim=True) * min_ps[:, None], kept, 0.0)
    return kept


def _seeded(probs: Tensor, info: Any, width: int, positions: Tensor) -> Tensor:
    from sglang.srt.layers.sampler import sampling_from_probs_torch, top_k_top_p_min_p_sampling_from_probs_torch

    seed = _per_node(info.sampling_seed, width)
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return sampling_from_probs_torch(probs, sampling_seed=seed, positions=positions).long()
    return top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        _per_node(info.top_ks, width),
        _per_node(info.top_ps, width),
        _per_node(info.min_ps, width),
        info.need_min_p_sampling,
        seed,
        positions,
    ).long()


def _per_node(values: Tensor, width: int) -> Tensor:
    return values.repeat_interleave(width, 0)


def _top_k(probs: Tensor, top_ks: Tensor, fused: bool) -> Tensor:
    if fused:
        from sgl_kernel import top_k_renorm_prob

        return top_k_renorm_prob(probs, top_ks)
    order = probs.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(probs.shape[1], device=probs.device).expand_as(order)
    )
    return torch.where(rank < top_ks[:, None], probs, 0.0)


def _top_p(probs: Tensor, top_ps: Tensor, fused: bool) -> Tensor:
    if fused:
        from sgl_kernel import top_p_renorm_prob

        return top_p_renorm_prob(probs, top_ps)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    inside = ordered.cumsum(-1) - ordered <= top_ps[:, None]
    return torch.zeros_like(probs).scatter_(-1, order, torch.where(inside, ordered, 0.0))
