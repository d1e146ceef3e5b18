"""Triton kernels for a drafter's training step and for the target's decode step, with what autograd needs around them.

Every kernel has a plain PyTorch twin in `plain.py`; `ops.py` chooses. Shapes are those of Llama-like models with grouped heads;
head size and hidden size are free, but the head size must be a power of two. Not here: matrix products, which stay with cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm_fwd(x, y, w, res, out, n, hidden, eps, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    keep = cols < hidden
    h = tl.load(x + row * hidden + cols, mask=keep, other=0.0).to(tl.float32)
    if HAS_Y:
        h += tl.load(y + row * hidden + cols, mask=keep, other=0.0).to(tl.float32)
        h = h.to(res.dtype.element_ty).to(tl.float32)
        tl.store(res + row * hidden + cols, h, mask=keep)
    rstd = tl.rsqrt(tl.sum(h * h, 0) / hidden + eps)
    scale = tl.load(w + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + cols, h * rstd * scale, mask=keep)


@triton.jit
def _norm_bwd(h_ptr, w, dres, dn, dx, dw, n, hidden, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_RES: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    keep = cols < hidden
    scale = tl.load(w + cols, mask=keep, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(ROWS):
        row = pid * ROWS + i
        live = keep & (row < n)
        at = row.to(tl.int64) * hidden + cols
        h = tl.load(h_ptr + at, mask=live, other=0.0).to(tl.float32)
        g = tl.load(dn + at, mask=live, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(h * h, 0) / hidden + eps)
        normed = h * rstd
        acc += g * normed
        g = g * scale
        d = (g - normed * (tl.sum(g * normed, 0) / hidden)) * rstd
        if HAS_RES:
            d += tl.load(dres + at, mask=live, other=0.0).to(tl.float32)
        tl.store(dx + at, d, mask=live)
    tl.store(dw + pid * hidden + cols, acc, mask=keep)


class AddNorm(torch.autograd.Function):
    """(x, y or None, weight) -> (x + y, rms_norm(x + y) · weight); all [T, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        n, hidden = x.shape
        res = torch.empty_like(x) if y is not None else x
        out = torch.empty_like(x)
        block = triton.next_power_of_2(hidden)
        _add_norm_fwd[(n,)](x, y if y is not None else x, w, res, out, n, hidden, eps, HAS_Y=y is not None, BLOCK=block, num_warps=4)
        ctx.save_for_backward(res, w)
        ctx.eps, ctx.has_y = eps, y is not None
        ctx.set_materialize_grads(False)
        return res, out

    @staticmethod
    def backward(ctx: Any, dres: Tensor | None, dn: Tensor) -> tuple[Tensor | None, ...]:
        h, w = ctx.saved_tensors
        n, hidden = h.shape
        rows = 16
        programs = triton.cdiv(n, rows)
        dx = torch.empty_like(h)
        dw = torch.empty(programs, hidden, dtype=torch.float32, device=h.device)
        dn = dn.contiguous()
        dres = dres.contiguous() if dres is not None else None
        _norm_bwd[(programs,)](h, w, dres if dres is not None else dn, dn, dx, dw, n, hidden, ctx.eps, ROWS=rows,
                               BLOCK=triton.next_power_of_2(hidden), HAS_RES=dres is not None, num_warps=4)
        return dx, dx if ctx.has_y else None, dw.sum(0).to(w.dtype), None


@triton.jit
def _swiglu_fwd(z, out, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < inter
    g = tl.load(z + row * 2 * inter + cols, mask=keep, other=0.0).to(tl.float32)
    u = tl.load(z + row * 2 * inter + inter + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + row * inter + cols, g * tl.sigmoid(g) * u, mask=keep)


@triton.jit
def _swiglu_bwd(z, dout, dz, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < inter
    g = tl.load(z + row * 2 * inter + cols, mask=keep, other=0.0).to(tl.float32)
    u = tl.load(z + row * 2 * inter + inter + cols, mask=keep, other=0.0).to(tl.float32)
    d = tl.load(dout + row * inter + cols, mask=keep, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dz + row * 2 * inter + cols, d * u * s * (1 + g * (1 - s)), mask=keep)
    tl.store(dz + row * 2 * inter + inter + cols, d * g * s, mask=keep)


class SwiGLU(torch.autograd.Function):
    """[T, 2·inter] (gate, up) -> silu(gate) · up [T, inter]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        n, inter = z.shape[0], z.shape[1] // 2
        out = torch.empty(n, inter, dtype=z.dtype, device=z.device)
        _swiglu_fwd[(n, triton.cdiv(inter, 1024))](z, out, inter, BLOCK=1024)
        ctx.save_for_backward(z)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        dz = torch.empty_like(z)
        inter = z.shape[1] // 2
        _swiglu_bwd[(z.shape[0], triton.cdiv(inter, 1024))](z, dout.contiguous(), dz, inter, BLOCK=1024)
        return dz


@triton.jit
def _head_rope_fwd(x, w, cos, sin, pos, out, rows, heads, stride_x, eps, HALF: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = r < rows
    tok, head = r // heads, r % heads
    d = tl.arange(0, HALF)
    p = tl.load(pos + tok, mask=live, other=0)
    src = tok.to(tl.int64)[:, None] * stride_x + head[:, None] * 2 * HALF + d[None, :]
    keep = live[:, None] & (d[None, :] < HALF)
    a = tl.load(x + src, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(x + src + HALF, mask=keep, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = a * rstd * tl.load(w + d).to(tl.float32)[None, :]
        b = b * rstd * tl.load(w + HALF + d).to(tl.float32)[None, :]
    c = tl.load(cos + p[:, None] * HALF + d[None, :], mask=keep, other=0.0)
    s = tl.load(sin + p[:, None] * HALF + d[None, :], mask=keep, other=0.0)
    dst = r.to(tl.int64)[:, None] * 2 * HALF + d[None, :]
    tl.store(out + dst, a * c - b * s, mask=keep)
    tl.store(out + dst + HALF, b * c + a * s, mask=keep)


@triton.jit
def _head_rope_bwd(x, w, cos, sin, pos, dout, dx, dw, rows, heads, stride_x, eps, HALF: tl.constexpr, ROWS: tl.constexpr):
    pid = tl.program_id(0)
    r = pid * ROWS + tl.arange(0, ROWS)
    live = r < rows
    tok, head = r // heads, r % heads
    d = tl.arange(0, HALF)
    p = tl.load(pos + tok, mask=live, other=0)
    src = tok.to(tl.int64)[:, None] * stride_x + head[:, None] * 2 * HALF + d[None, :]
    keep = live[:, None] & (d[None, :] < HALF)
    a = tl.load(x + src, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(x + src + HALF, mask=keep, other=0.0).to(tl.float32)
    c = tl.load(cos + p[:, None] * HALF + d[None, :], mask=keep, other=0.0)
    s = tl.load(sin + p[:, None] * HALF + d[None, :], mask=keep, other=0.0)
    dst = r.to(tl.int64)[:, None] * 2 * HALF + d[None, :]
    g1 = tl.load(dout + dst, mask=keep, other=0.0).to(tl.float32)
    g2 = tl.load(dout + dst + HALF, mask=keep, other=0.0).to(tl.float32)
    da = g1 * c + g2 * s
    db = g2 * c - g1 * s
    rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    na, nb = a * rstd, b * rstd
    tl.store(dw + pid * 2 * HALF + d, tl.sum(da * na, 0))
    tl.store(dw + pid * 2 * HALF + HALF + d, tl.sum(db * nb, 0))
    da = da * tl.load(w + d).to(tl.float32)[None, :]
    db = db * tl.load(w + HALF + d).to(tl.float32)[None, :]
    m = ((tl.sum(da * na, 1) + tl.sum(db * nb, 1)) / (2 * HALF))[:, None]
    tl.store(dx + dst, (da - na * m) * rstd, mask=keep)
    tl.store(dx + dst + HALF, (db - nb * m) * rstd, mask=keep)


class HeadNormRope(torch.autograd.Function):
    """Per-head RMS norm, then rotary embedding. x [T, heads·size] (may be a column slice), pos [T] -> [T, heads·size] contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, heads: int, eps: float) -> Tensor:
        n, size = x.shape[0], w.shape[0]
        rows = n * heads
        out = torch.empty(n, heads * size, dtype=x.dtype, device=x.device)
        _head_rope_fwd[(triton.cdiv(rows, 64),)](x, w, cos, sin, pos, out, rows, heads, x.stride(0), eps, HALF=size // 2, ROWS=64, NORM=True)
        ctx.save_for_backward(x, w, cos, sin, pos)
        ctx.heads, ctx.eps = heads, eps
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, w, cos, sin, pos = ctx.saved_tensors
        n, size = x.shape[0], w.shape[0]
        rows = n * ctx.heads
        programs = triton.cdiv(rows, 64)
        dx = torch.empty(n, ctx.heads * size, dtype=x.dtype, device=x.device)
        dw = torch.empty(programs, size, dtype=torch.float32, device=x.device)
        _head_rope_bwd[(programs,)](x, w, cos, sin, pos, dout.contiguous(), dx, dw, rows, ctx.heads, x.stride(0), ctx.eps, HALF=size // 2, ROWS=64)
        return dx, dw.sum(0).to(w.dtype), None, None, None, None, None


@triton.jit
def _block_attn_fwd(q, kc, vc, kb, vb, anchor, start, blen, out, lse, A, L, scale, sc, sb,
                    HQ: tl.constexpr, G: tl.constexpr, HK: tl.constexpr, S: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
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
def _block_attn_bwd_q(q, kc, vc, kb, vb, anchor, start, blen, out, dout, lse, delta, dq, dkb, dvb, A, L, scale, sc, sb,
                      HQ: tl.constexpr, G: tl.constexpr, HK: tl.constexpr, S: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
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
def _block_attn_bwd_ctx(q, kc, vc, anchor, start, dout, lse, delta, dkc, dvc, A, L, scale, sc,
                        HQ: tl.constexpr, G: tl.constexpr, HK: tl.constexpr, S: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
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
    """Draft blocks attend to the context strictly before their anchor (from `start`) and to the first `blen` slots of themselves.

    q [B·A·S, HQ·D]; kc, vc [B·L, HK·D] context; kb, vb [B·A·S, HK·D] block; anchor, start, blen [B·A]. v may be column slices.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, anchor: Tensor, start: Tensor, blen: Tensor,
                dims: tuple[int, int, int, int, int]) -> Tensor:
        slots, length, hq, hk, size = dims
        ba = anchor.numel()
        rows = kc.shape[0] // length
        m = triton.next_power_of_2(hq // hk * slots)
        const = {"HQ": hq, "G": hq // hk, "HK": hk, "S": slots, "D": size, "M": m, "N": 64}
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], hq, dtype=torch.float32, device=q.device)
        _block_attn_fwd[(ba, hk)](q, kc, vc, kb, vb, anchor, start, blen, out, lse, ba // rows, length, size**-0.5, vc.stride(0), vb.stride(0),
                                  **const, num_warps=4)
        ctx.save_for_backward(q, kc, vc, kb, vb, anchor, start, blen, out, lse)
        ctx.dims, ctx.const, ctx.rows = dims, const, rows
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kc, vc, kb, vb, anchor, start, blen, out, lse = ctx.saved_tensors
        _, length, hq, hk, size = ctx.dims
        ba, rows = anchor.numel(), ctx.rows
        dout = dout.contiguous()
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        dkb, dvb = torch.empty_like(kb), torch.empty(kb.shape, dtype=kb.dtype, device=kb.device)
        dkc, dvc = torch.empty_like(kc), torch.empty(kc.shape, dtype=kc.dtype, device=kc.device)
        scale = size**-0.5
        _block_attn_bwd_q[(ba, hk)](q, kc, vc, kb, vb, anchor, start, blen, out, dout, lse, delta, dq, dkb, dvb, ba // rows, length, scale,
                                    vc.stride(0), vb.stride(0), **ctx.const, num_warps=4)
        _block_attn_bwd_ctx[(triton.cdiv(length, 64), rows, hk)](q, kc, vc, anchor, start, dout, lse, delta, dkc, dvc, ba // rows, length,
                                                                 scale, vc.stride(0), **ctx.const, num_warps=4)
        return dq, dkc, dvc, dkb, dvb, None, None, None, None


@triton.jit
def _head_loss(z, zt, label, base, tau, logq, hit, weight, V, K, lam, beta, GRAD: tl.constexpr, SOFT: tl.constexpr, BLOCK: tl.constexpr):
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


def head_loss_(z: Tensor, zt: Tensor | None, label: Tensor, base: Tensor, depth: Tensor, tau: Tensor, slots: int, lam: float, beta: float,
               grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the labels, whether each is the argmax, and the weights used; `z` becomes its own gradient when `grad`.

    Rows of z are `slots` per block in order of depth. label -1: no loss. weight = base · exp(beta · depth-1 · mean logq so far in the block).
    """
    t, v = z.shape
    logq = torch.empty(t, dtype=torch.float32, device=z.device)
    hit = torch.empty(t, dtype=torch.int32, device=z.device)
    weight = (depth - 1).float().contiguous()
    _head_loss[(t // slots,)](z, zt if zt is not None else z, label, base, tau, logq, hit, weight, v, slots, lam, beta, GRAD=grad,
                              SOFT=zt is not None, BLOCK=4096, num_warps=8)
    return logq, hit, weight


@triton.jit
def _decode_attn(qkv, kcache, vcache, cos, sin, pos_ptr, start, out, R, L, scale, HQ: tl.constexpr, G: tl.constexpr, HK: tl.constexpr,
                 D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    row, hk = tl.program_id(0), tl.program_id(1)
    pos = tl.load(pos_ptr)
    cs = tl.load(start + row)
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, M)
    d = tl.arange(0, D)
    dh = d % HALF
    other = (d + HALF) % D
    sign = tl.where(d < HALF, -1.0, 1.0)
    c = tl.load(cos + pos * HALF + dh)
    s = tl.load(sin + pos * HALF + dh) * sign
    base = row.to(tl.int64) * ((HQ + 2 * HK) * D)
    live = h < G
    qa = base + (hk * G + h) * D
    x = tl.load(qkv + qa[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    y = tl.load(qkv + qa[:, None] + other[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    q = (x * c[None, :] + y * s[None, :]).to(qkv.dtype.element_ty)
    ka = base + (HQ + hk) * D
    k1 = tl.load(qkv + ka + d).to(tl.float32) * c + tl.load(qkv + ka + other).to(tl.float32) * s
    k1 = k1.to(qkv.dtype.element_ty)
    v1 = tl.load(qkv + ka + HK * D + d)
    cache = (row.to(tl.int64) * HK + hk) * L * D
    tl.store(kcache + cache + pos * D + d, k1)
    tl.store(vcache + cache + pos * D + d, v1)
    s0 = tl.sum(q.to(tl.float32) * k1.to(tl.float32)[None, :], 1) * scale
    m_i = s0
    l_i = tl.full([M], 1.0, tl.float32)
    acc = tl.zeros([M, D], tl.float32) + v1.to(tl.float32)[None, :]
    n = tl.arange(0, N)
    for n0 in range((cs // N) * N, pos, N):
        ok = (n0 + n >= cs) & (n0 + n < pos)
        k = tl.load(kcache + cache + (n0 + n)[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        v = tl.load(vcache + cache + (n0 + n)[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        sc = tl.where(ok[None, :], tl.dot(q, tl.trans(k)) * scale, -1e30)
        m_new = tl.maximum(m_i, tl.max(sc, 1))
        p = tl.where(ok[None, :], tl.exp(sc - m_new[:, None]), 0.0)
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m_i = m_new
    oa = row.to(tl.int64) * (HQ * D) + (hk * G + h) * D
    tl.store(out + oa[:, None] + d[None, :], acc / l_i[:, None], mask=live[:, None])


def decode_attention(qkv: Tensor, kcache: Tensor, vcache: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, start: Tensor, hq: int) -> Tensor:
    """One token per row: rotate, append to the caches [R, HK, L, D] at `pos`, attend to [start, pos]. Returns [R, HQ·D]."""
    rows, hk, length, size = kcache.shape
    out = torch.empty(rows, hq * size, dtype=qkv.dtype, device=qkv.device)
    _decode_attn[(rows, hk)](qkv, kcache, vcache, cos, sin, pos, start, out, rows, length, size**-0.5, HQ=hq, G=hq // hk, HK=hk, D=size,
                             M=16, N=64, num_warps=2)
    return out


@triton.jit
def _sample(logits, temp, seed, out, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    t = tl.load(temp + row)
    sd = tl.load(seed)
    cols = tl.arange(0, BLOCK)
    best = -1e30
    arg = 0
    for c in range(0, V, BLOCK):
        keep = c + cols < V
        x = tl.load(logits + row.to(tl.int64) * V + c + cols, mask=keep, other=-1e30).to(tl.float32)
        if t > 0:
            u = tl.rand(sd, row * V + c + cols)
            x = x - t * tl.log(-tl.log(u + 1e-20) + 1e-20)
            x = tl.where(keep, x, -1e30)
        top = tl.max(x, 0)
        at = tl.argmax(x, 0) + c
        arg = tl.where(top > best, at, arg)
        best = tl.maximum(best, top)
    tl.store(out + row, arg.to(tl.int64))


def sample(logits: Tensor, temp: Tensor, seed: Tensor) -> Tensor:
    """Argmax where temp is 0, else a draw from softmax(logits / temp) by Gumbel noise. logits [R, V], temp [R], seed int64 [1]."""
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _sample[(logits.shape[0],)](logits, temp, seed, out, logits.shape[1], BLOCK=4096, num_warps=8)
    return out


def add_norm(x: Tensor, y: Tensor | None, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See AddNorm."""
    return AddNorm.apply(x, y, w, eps)


def swiglu(z: Tensor) -> Tensor:
    """See SwiGLU."""
    return SwiGLU.apply(z)


def head_norm_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, heads: int, eps: float) -> Tensor:
    """See HeadNormRope."""
    return HeadNormRope.apply(x, w, cos, sin, pos, heads, eps)


def block_attention(q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, anchor: Tensor, start: Tensor, blen: Tensor,
                    dims: tuple[int, int, int, int, int]) -> Tensor:
    """See BlockAttention; dims = (slots, row length, query heads, KV heads, head size)."""
    return BlockAttention.apply(q, kc, vc, kb, vb, anchor, start, blen, dims)
