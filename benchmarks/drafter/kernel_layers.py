"""Triton: RMS norm with residual, SwiGLU, per-head norm with rotary embedding; forward and backward.

Called through `kernels.py`. Any hidden size; the head size must be a power of two.
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
def _norm_bwd(
    h_ptr, w, dres, dn, dx, dw, n, hidden, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_RES: tl.constexpr
):
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
        _add_norm_fwd[(n,)](
            x, y if y is not None else x, w, res, out, n, hidden, eps, HAS_Y=y is not None, BLOCK=block, num_warps=4
        )
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
        _norm_bwd[(programs,)](
            h,
            w,
            dres if dres is not None else dn,
            dn,
            dx,
            dw,
            n,
            hidden,
            ctx.eps,
            ROWS=rows,
            BLOCK=triton.next_power_of_2(hidden),
            HAS_RES=dres is not None,
            num_warps=4,
        )
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
def _head_rope_fwd(
    x, w, cos, sin, pos, out, rows, heads, stride_x, eps, HALF: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr
):
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
def _head_rope_bwd(
    x, w, cos, sin, pos, dout, dx, dw, rows, heads, stride_x, eps, HALF: tl.constexpr, ROWS: tl.constexpr
):
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
    """Per-head RMS norm, then rotary embedding. x [T, heads·size] (may be a column slice), pos [T] -> [T,
    heads·size] contiguous."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, heads: int, eps: float
    ) -> Tensor:
        n, size = x.shape[0], w.shape[0]
        rows = n * heads
        out = torch.empty(n, heads * size, dtype=x.dtype, device=x.device)
        _head_rope_fwd[(triton.cdiv(rows, 64),)](
            x, w, cos, sin, pos, out, rows, heads, x.stride(0), eps, HALF=size // 2, ROWS=64, NORM=True
        )
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
        _head_rope_bwd[(programs,)](
            x,
            w,
            cos,
            sin,
            pos,
            dout.contiguous(),
            dx,
            dw,
            rows,
            ctx.heads,
            x.stride(0),
            ctx.eps,
            HALF=size // 2,
            ROWS=64,
        )
        return dx, dw.sum(0).to(w.dtype), None, None, None, None, None


def add_norm(x: Tensor, y: Tensor | None, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See AddNorm."""
    return AddNorm.apply(x, y, w, eps)


def swiglu(z: Tensor) -> Tensor:
    """See SwiGLU."""
    return SwiGLU.apply(z)


def head_norm_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, heads: int, eps: float) -> Tensor:
    """See HeadNormRope."""
    return HeadNormRope.apply(x, w, cos, sin, pos, heads, eps)
