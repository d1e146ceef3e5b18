"""The kernels' operations in plain PyTorch: the reference in tests, and what runs where there is no CUDA.

Same names, arguments and results as `kernels.py`; simple and slow, and the attention materialises its mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x / rms(x) · w over the last dimension, computed in fp32 and returned in x's dtype."""
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


def add_norm(x: Tensor, y: Tensor | None, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y) · w)."""
    res = x if y is None else x + y
    return res, rms_norm(res, w, eps)


def swiglu(z: Tensor) -> Tensor:
    """silu(first half) · second half of the last dimension."""
    g, u = z.chunk(2, -1)
    return (F.silu(g.float()) * u.float()).to(z.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in halves: x [T, heads, size], cos and sin [T, size / 2]."""
    a, b = x.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


def head_norm_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, heads: int, eps: float) -> Tensor:
    """Per-head RMS norm, then rotary embedding. x [T, heads·size], pos [T]."""
    h = rms_norm(x.reshape(x.shape[0], heads, -1), w, eps)
    return rotate(h, cos[pos], sin[pos]).reshape(x.shape[0], -1)


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
    """Each block of S slots sees context [start, anchor) of its row and the first blen slots of itself. See
    kernels.BlockAttention."""
    slots, length, hq, hk, size = dims
    ba, rows = anchor.numel(), kc.shape[0] // length
    per_row = ba // rows
    q = q.view(rows, per_row, slots, hk, hq // hk, size).float()
    kc, vc = (t.reshape(rows, length, hk, size).float() for t in (kc, vc))
    kb, vb = (t.reshape(rows, per_row, slots, hk, size).float() for t in (kb, vb))
    sc = torch.einsum("raskgd,rlkd->raskgl", q, kc)
    sb = torch.einsum("raskgd,ratkd->raskgt", q, kb)
    col = torch.arange(length, device=q.device)
    ok_c = (col >= start[:, None]) & (col < anchor[:, None])
    ok_b = torch.arange(slots, device=q.device) < blen[:, None]
    sc = sc.masked_fill(~ok_c.view(rows, per_row, 1, 1, 1, length), float("-inf"))
    sb = sb.masked_fill(~ok_b.view(rows, per_row, 1, 1, 1, slots), float("-inf"))
    p = torch.softmax(torch.cat([sc, sb], -1) * size**-0.5, -1)
    out = torch.einsum("raskgl,rlkd->raskgd", p[..., :length], vc) + torch.einsum(
        "raskgt,ratkd->raskgd", p[..., length:], vb
    )
    return out.reshape(ba * slots, hq * size).to(vb.dtype)


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
    """See kernels.head_loss_: (logq of label, argmax == label, weight); z becomes its own gradient when `grad`."""
    logp = torch.log_softmax(z.float(), -1)
    good = label >= 0
    own = logp.gather(1, label.clamp(min=0)[:, None].long())[:, 0]
    lq = torch.where(good, own, torch.zeros_like(own)).view(-1, slots)
    before = lq.cumsum(1) - lq
    seen = torch.arange(slots, device=z.device).clamp(min=1)
    reach = torch.exp(beta * before * (depth.view(-1, slots) - 1) / seen)
    reach[:, 0] = 1.0
    weight = torch.where(good, base * reach.view(-1), torch.zeros_like(base))
    hit = ((own >= logp.max(-1).values) & good).int()
    if grad:
        goal = torch.zeros_like(logp)
        goal.scatter_(1, label.clamp(min=0)[:, None].long(), 1.0)
        soft = torch.softmax(zt.float() / tau[:, None], -1) if zt is not None else 0.0
        goal = lam * goal + (1 - lam) * soft
        z.copy_(weight[:, None] * (logp.exp() - goal))
    return own, hit, weight


def decode_attention(
    qkv: Tensor, kcache: Tensor, vcache: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, start: Tensor, hq: int
) -> Tensor:
    """One token per row: rotate, append to the caches [R, HK, L, D] at `pos`, attend to [start, pos]. Returns
    [R, HQ·D]."""
    rows, hk, length, size = kcache.shape
    x = qkv.view(rows, hq + 2 * hk, size)
    at = pos.expand(rows)
    q = rotate(x[:, :hq], cos[at], sin[at])
    kcache.index_copy_(2, pos, rotate(x[:, hq : hq + hk], cos[at], sin[at])[:, :, None])
    vcache.index_copy_(2, pos, x[:, hq + hk :, None].contiguous())
    col = torch.arange(length, device=qkv.device)
    keep = (col >= start[:, None]) & (col <= pos)
    s = torch.einsum("rkgd,rkld->rkgl", q.view(rows, hk, hq // hk, size).float(), kcache.float()) * size**-0.5
    p = torch.softmax(s.masked_fill(~keep[:, None, None], float("-inf")), -1)
    return torch.einsum("rkgl,rkld->rkgd", p, vcache.float()).reshape(rows, hq * size).to(qkv.dtype)


def sample(logits: Tensor, temp: Tensor, seed: Tensor) -> Tensor:
    """Argmax where temp is 0, else a draw from softmax(logits / temp). `seed` is unused here: torch's generator
    draws."""
    noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32) + 1e-20) + 1e-20)
    return (logits.float() + temp[:, None] * noise).argmax(-1)
