"""Triton: the loss over the vocabulary, whose gradient overwrites the logits. Called through `kernels.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _head_loss(
    z,
    zt,
    label,
    base,
    tau,
    logq,
    hit,
    weight,
    V,
    K,
    lam,
    beta,
    GRAD: tl.constexpr,
    SOFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blk = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    run = 0.0
    seen = 0.0
    for j in range(K):
        t = blk * K + j
        row = t.to(tl.int64) * V
        y = tl.load(label + t)
        w0 = tl.load(base + t)
        it = 1.0 / tl.load(tau + t)
        m = -1e30
        s = 0.0
        mt = -1e30
        st = 0.0
        for c in range(0, V, BLOCK):
            keep = c + cols < V
            x = tl.load(z + row + c + cols, mask=keep, other=-1e30).to(tl.float32)
            m_new = tl.maximum(m, tl.max(x, 0))
            s = s * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)
            m = m_new
            if SOFT:
                x = tl.load(zt + row + c + cols, mask=keep, other=-1e30).to(tl.float32) * it
                m_new = tl.maximum(mt, tl.max(x, 0))
                st = st * tl.exp(mt - m_new) + tl.sum(tl.exp(x - m_new), 0)
                mt = m_new
        lse = m + tl.log(s)
        own = tl.load(z + row + tl.maximum(y, 0)).to(tl.float32)
        lq = own - lse
        w = w0 * tl.exp(beta * run * tl.where(seen > 0, tl.load(weight + t) / tl.maximum(seen, 1.0), 0.0))
        w = tl.where(y >= 0, w, 0.0)
        tl.store(logq + t, lq)
        tl.store(hit + t, ((own >= m) & (y >= 0)).to(tl.int32))
        if GRAD:
            tl.debug_barrier()
            for c in range(0, V, BLOCK):
                keep = c + cols < V
                x = tl.load(z + row + c + cols, mask=keep, other=-1e30).to(tl.float32)
                goal = tl.where(c + cols == y, lam, 0.0)
                if SOFT:
                    xt = tl.load(zt + row + c + cols, mask=keep, other=-1e30).to(tl.float32) * it
                    goal += (1.0 - lam) * tl.exp(xt - mt) / st
                tl.store(z + row + c + cols, w * (tl.exp(x - lse) - goal), mask=keep)
        tl.store(weight + t, w)
        run += tl.where(y >= 0, lq, 0.0)
        seen += 1.0


def head_loss_(
    z: Tensor,
    zt: Tensor | None,
    label: Tensor,
    base: Tensor,
    depth: Tensor,
    tau: Tensor,
    slots: int,
    lam: float,
    beta: float,
    grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the labels, whether each is the argmax, and the weights used; `z` becomes its own gradient
    when `grad`.

    Rows of z are `slots` per block in order of depth. label -1: no loss. weight = base · exp(beta · depth-1 · mean
    logq so far in the block).
    """
    t, v = z.shape
    logq = torch.empty(t, dtype=torch.float32, device=z.device)
    hit = torch.empty(t, dtype=torch.int32, device=z.device)
    weight = (depth - 1).float().contiguous()
    _head_loss[(t // slots,)](
        z,
        zt if zt is not None else z,
        label,
        base,
        tau,
        logq,
        hit,
        weight,
        v,
        slots,
        lam,
        beta,
        GRAD=grad,
        SOFT=zt is not None,
        BLOCK=4096,
        num_warps=8,
    )
    return logq, hit, weight
