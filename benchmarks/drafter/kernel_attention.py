"""Triton: attention of draft blocks over their context and themselves; forward and backward.

A program holds all slots and all query heads of one KV head, so the gradients of a block's own K and V need no
second pass, and those of the context are summed over the anchors of a row without atomics. Called through
`kernels.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _block_attn_fwd(
    q,
    kc,
    vc,
    kb,
    vb,
    anchor,
    start,
    blen,
    out,
    lse,
    A,
    L,
    scale,
    sc,
    sb,
    HQ: tl.constexpr,
    G: tl.constexpr,
    HK: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    ba, hk = tl.program_id(0), tl.program_id(1)
    b = ba // A
    r = tl.arange(0, M)
    g, slot = r // S, r % S
    live = g < G
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    a = tl.load(anchor + ba)
    cs = tl.load(start + ba)
    bl = tl.load(blen + ba)
    tok = ba.to(tl.int64) * S + slot
    at = tok * (HQ * D) + (hk * G + g) * D
    qt = tl.load(q + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    m_i = tl.full([M], -1e30, tl.float32)
    l_i = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for n0 in range((cs // N) * N, a, N):
        rows = b.to(tl.int64) * L + n0 + n
        ok = (n0 + n >= cs) & (n0 + n < a)
        k = tl.load(kc + rows[:, None] * (HK * D) + hk * D + d[None, :], mask=ok[:, None], other=0.0)
        v = tl.load(vc + rows[:, None] * sc + hk * D + d[None, :], mask=ok[:, None], other=0.0)
        s = tl.where(ok[None, :], tl.dot(qt, tl.trans(k)) * scale, -1e30)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.where(ok[None, :], tl.exp(s - m_new[:, None]), 0.0)
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m_i = m_new
    j = tl.arange(0, S)
    kt = ba.to(tl.int64) * S + j
    k = tl.load(kb + kt[:, None] * (HK * D) + hk * D + d[None, :])
    v = tl.load(vb + kt[:, None] * sb + hk * D + d[None, :])
    s = tl.where((j < bl)[None, :], tl.dot(qt, tl.trans(k)) * scale, -1e30)
    m_new = tl.maximum(m_i, tl.max(s, 1))
    p = tl.exp(s - m_new[:, None])
    alpha = tl.exp(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
    tl.store(out + at[:, None] + d[None, :], acc / l_i[:, None], mask=live[:, None])
    tl.store(lse + tok * HQ + hk * G + g, m_new + tl.log(l_i), mask=live)


@triton.jit
def _block_attn_bwd_q(
    q,
    kc,
    vc,
    kb,
    vb,
    anchor,
    start,
    blen,
    out,
    dout,
    lse,
    delta,
    dq,
    dkb,
    dvb,
    A,
    L,
    scale,
    sc,
    sb,
    HQ: tl.constexpr,
    G: tl.constexpr,
    HK: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    ba, hk = tl.program_id(0), tl.program_id(1)
    b = ba // A
    r = tl.arange(0, M)
    g, slot = r // S, r % S
    live = g < G
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    a = tl.load(anchor + ba)
    cs = tl.load(start + ba)
    bl = tl.load(blen + ba)
    tok = ba.to(tl.int64) * S + slot
    at = tok * (HQ * D) + (hk * G + g) * D
    qt = tl.load(q + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    do = tl.load(dout + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    o = tl.load(out + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    dl = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + tok * HQ + hk * G + g, dl, mask=live)
    ls = tl.load(lse + tok * HQ + hk * G + g, mask=live, other=0.0)
    acc = tl.zeros([M, D], tl.float32)
    for n0 in range((cs // N) * N, a, N):
        rows = b.to(tl.int64) * L + n0 + n
        ok = (n0 + n >= cs) & (n0 + n < a)
        k = tl.load(kc + rows[:, None] * (HK * D) + hk * D + d[None, :], mask=ok[:, None], other=0.0)
        v = tl.load(vc + rows[:, None] * sc + hk * D + d[None, :], mask=ok[:, None], other=0.0)
        p = tl.where(ok[None, :], tl.exp(tl.dot(qt, tl.trans(k)) * scale - ls[:, None]), 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - dl[:, None]) * scale
        acc += tl.dot(ds.to(k.dtype), k)
    j = tl.arange(0, S)
    kt = ba.to(tl.int64) * S + j
    k = tl.load(kb + kt[:, None] * (HK * D) + hk * D + d[None, :])
    v = tl.load(vb + kt[:, None] * sb + hk * D + d[None, :])
    p = tl.where((j < bl)[None, :] & live[:, None], tl.exp(tl.dot(qt, tl.trans(k)) * scale - ls[:, None]), 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - dl[:, None]) * scale
    acc += tl.dot(ds.to(k.dtype), k)
    tl.store(dq + at[:, None] + d[None, :], acc, mask=live[:, None])
    tl.store(dkb + kt[:, None] * (HK * D) + hk * D + d[None, :], tl.dot(tl.trans(ds).to(qt.dtype), qt))
    tl.store(dvb + kt[:, None] * (HK * D) + hk * D + d[None, :], tl.dot(tl.trans(p).to(do.dtype), do))


@triton.jit
def _block_attn_bwd_ctx(
    q,
    kc,
    vc,
    anchor,
    start,
    dout,
    lse,
    delta,
    dkc,
    dvc,
    A,
    L,
    scale,
    sc,
    HQ: tl.constexpr,
    G: tl.constexpr,
    HK: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    n0, b, hk = tl.program_id(0) * N, tl.program_id(1), tl.program_id(2)
    r = tl.arange(0, M)
    g, slot = r // S, r % S
    live = g < G
    d = tl.arange(0, D)
    n = n0 + tl.arange(0, N)
    rows = b.to(tl.int64) * L + n
    k = tl.load(kc + rows[:, None] * (HK * D) + hk * D + d[None, :], mask=(n < L)[:, None], other=0.0)
    v = tl.load(vc + rows[:, None] * sc + hk * D + d[None, :], mask=(n < L)[:, None], other=0.0)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    for i in range(A):
        ba = b * A + i
        a = tl.load(anchor + ba)
        cs = tl.load(start + ba)
        if (a > n0) & (cs < n0 + N):
            tok = ba.to(tl.int64) * S + slot
            at = tok * (HQ * D) + (hk * G + g) * D
            qt = tl.load(q + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
            do = tl.load(dout + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
            ls = tl.load(lse + tok * HQ + hk * G + g, mask=live, other=0.0)
            dl = tl.load(delta + tok * HQ + hk * G + g, mask=live, other=0.0)
            ok = ((n >= cs) & (n < a))[None, :] & live[:, None]
            p = tl.where(ok, tl.exp(tl.dot(qt, tl.trans(k)) * scale - ls[:, None]), 0.0)
            dv += tl.dot(tl.trans(p).to(do.dtype), do)
            ds = p * (tl.dot(do, tl.trans(v)) - dl[:, None]) * scale
            dk += tl.dot(tl.trans(ds).to(qt.dtype), qt)
    tl.store(dkc + rows[:, None] * (HK * D) + hk * D + d[None, :], dk, mask=(n < L)[:, None])
    tl.store(dvc + rows[:, None] * (HK * D) + hk * D + d[None, :], dv, mask=(n < L)[:, None])


class BlockAttention(torch.autograd.Function):
    """Draft blocks attend to the context strictly before their anchor (from `start`) and to the first `blen` slots
    of themselves.

    q [B·A·S, HQ·D]; kc, vc [B·L, HK·D] context; kb, vb [B·A·S, HK·D] block; anchor, start, blen [B·A]. v may be
    column slices.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kc: Tensor,
        vc: Tensor,
        kb: Tensor,
        vb: Tensor,
        anchor: Tensor,
        start: Tensor,
        blen: Tensor,
        dims: tuple[int, int, int, int, int],
    ) -> Tensor:
        slots, length, hq, hk, size = dims
        ba = anchor.numel()
        rows = kc.shape[0] // length
        m = triton.next_power_of_2(hq // hk * slots)
        const = {"HQ": hq, "G": hq // hk, "HK": hk, "S": slots, "D": size, "M": m, "N": 64}
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], hq, dtype=torch.float32, device=q.device)
        _block_attn_fwd[(ba, hk)](
            q,
            kc,
            vc,
            kb,
            vb,
            anchor,
            start,
            blen,
            out,
            lse,
            ba // rows,
            length,
            size**-0.5,
            vc.stride(0),
            vb.stride(0),
            **const,
            num_warps=4,
        )
        ctx.save_for_backward(q, kc, vc, kb, vb, anchor, start, blen, out, lse)
        ctx.dims, ctx.const, ctx.rows = dims, const, rows
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kc, vc, kb, vb, anchor, start, blen, out, lse = ctx.saved_tensors
        _, length, _, hk, size = ctx.dims
        ba, rows = anchor.numel(), ctx.rows
        dout = dout.contiguous()
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        dkb, dvb = torch.empty_like(kb), torch.empty(kb.shape, dtype=kb.dtype, device=kb.device)
        dkc, dvc = torch.empty_like(kc), torch.empty(kc.shape, dtype=kc.dtype, device=kc.device)
        scale = size**-0.5
        _block_attn_bwd_q[(ba, hk)](
            q,
            kc,
            vc,
            kb,
            vb,
            anchor,
            start,
            blen,
            out,
            dout,
            lse,
            delta,
            dq,
            dkb,
            dvb,
            ba // rows,
            length,
            scale,
            vc.stride(0),
            vb.stride(0),
            **ctx.const,
            num_warps=4,
        )
        _block_attn_bwd_ctx[(triton.cdiv(length, 64), rows, hk)](
            q,
            kc,
            vc,
            anchor,
            start,
            dout,
            lse,
            delta,
            dkc,
            dvc,
            ba // rows,
            length,
            scale,
            vc.stride(0),
            **ctx.const,
            num_warps=4,
        )
        return dq, dkc, dvc, dkb, dvb, None, None, None, None


def block_attention(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kb: Tensor,
    vb: Tensor,
    anchor: Tensor,
    start: Tensor,
    blen: Tensor,
    dims: tuple[int, int, int, int, int],
) -> Tensor:
    """See BlockAttention; dims = (slots, row length, query heads, KV heads, head size)."""
    return BlockAttention.apply(q, kc, vc, kb, vb, anchor, start, blen, dims)
