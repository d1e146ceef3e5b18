"""Triton: one decoding step's attention over a static cache, and sampling. Called through `kernels.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _decode_attn(
    qkv,
    kcache,
    vcache,
    cos,
    sin,
    pos_ptr,
    start,
    out,
    R,
    L,
    scale,
    HQ: tl.constexpr,
    G: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
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


def decode_attention(
    qkv: Tensor, kcache: Tensor, vcache: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, start: Tensor, hq: int
) -> Tensor:
    """One token per row: rotate, append to the caches [R, HK, L, D] at `pos`, attend to [start, pos]. Returns
    [R, HQ·D]."""
    rows, hk, length, size = kcache.shape
    out = torch.empty(rows, hq * size, dtype=qkv.dtype, device=qkv.device)
    _decode_attn[(rows, hk)](
        qkv,
        kcache,
        vcache,
        cos,
        sin,
        pos,
        start,
        out,
        rows,
        length,
        size**-0.5,
        HQ=hq,
        G=hq // hk,
        HK=hk,
        D=size,
        M=16,
        N=64,
        num_warps=2,
    )
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
    """Argmax where temp is 0, else a draw from softmax(logits / temp) by Gumbel noise. logits [R, V], temp [R],
    seed int64 [1]."""
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _sample[(logits.shape[0],)](logits, temp, seed, out, logits.shape[1], BLOCK=4096, num_warps=8)
    return out
