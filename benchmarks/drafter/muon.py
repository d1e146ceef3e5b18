"""Muon for the matrices, Adam for the norms: every update is in place and free of host decisions, so a CUDA graph
can hold it.

Update of a matrix: momentum (Nesterov), orthogonalised by five Newton-Schulz steps, scaled by 0.2·√max(rows,
columns) so that its entries have the size of AdamW's (Moonlight, arXiv 2502.16982). Fused projections are
orthogonalised part by part.
"""

from __future__ import annotations

import torch
from torch import Tensor


def newton_schulz(g: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of a batch g [n, rows ≤ columns], roughly: singular values land in about
    [0.7, 1.2]. bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    x = x / (x.float().pow(2).sum((-2, -1), keepdim=True).sqrt() + 1e-7).bfloat16()
    for _ in range(steps):
        m = x @ x.mT
        x = a * x + (b * m + c * (m @ m)) @ x
    return x


class Muon:
    """Steps fp32 master weights in place. `parts` splits fused matrices by rows; lr and wd are 0-d tensors on
    the weights' device."""

    def __init__(
        self, weights: dict[str, Tensor], parts: dict[str, list[int]], momentum: float = 0.95, norm_lr: float = 0.25
    ):
        self.weights, self.momentum, self.norm_lr = weights, momentum, norm_lr
        device = next(iter(weights.values())).device
        self.lr = torch.zeros((), device=device)
        self.decay = torch.zeros((), device=device)
        self.count = torch.zeros((), device=device)
        self.buffer = {k: torch.zeros_like(v) for k, v in weights.items()}
        self.square = {k: torch.zeros_like(v) for k, v in weights.items() if v.dim() == 1}
        self.groups: dict[tuple[int, int], list[tuple[str, slice, bool]]] = {}
        for name, w in weights.items():
            if w.dim() == 1:
                continue
            start = 0
            for rows in parts.get(name.split(".")[-1], [w.shape[0]]):
                flip = rows > w.shape[1]
                key = (w.shape[1], rows) if flip else (rows, w.shape[1])
                self.groups.setdefault(key, []).append((name, slice(start, start + rows), flip))
                start += rows

    def step(self, grads: dict[str, Tensor]) -> None:
        """One update. grads: as the weights, any float dtype."""
        self.count += 1
        updates = {}
        for name, w in self.weights.items():
            g = grads[name].float()
            buf = self.buffer[name]
            if w.dim() == 1:
                sq = self.square[name]
                buf.lerp_(g, 0.1)
                sq.lerp_(g * g, 0.05)
                mean, var = buf / (1 - 0.9**self.count), sq / (1 - 0.95**self.count)
                w.sub_(self.lr * self.norm_lr * mean / (var.sqrt() + 1e-10))
            else:
                buf.mul_(self.momentum).add_(g)
                updates[name] = g + self.momentum * buf
        for (rows, cols), members in self.groups.items():
            stack = torch.stack([updates[n][s].T if flip else updates[n][s] for n, s, flip in members])
            out = newton_schulz(stack).float() * (0.2 * max(rows, cols) ** 0.5)
            for (name, s, flip), u in zip(members, out.unbind(0), strict=True):
                part = self.weights[name][s]
                part.mul_(1 - self.lr * self.decay).sub_(self.lr * (u.T if flip else u))

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs: momentum in bf16, second moments, the step count."""
        out = {f"buffer.{k}": v.bfloat16().cpu() for k, v in self.buffer.items()}
        return out | {f"square.{k}": v.cpu() for k, v in self.square.items()} | {"count": self.count.cpu()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take up a saved state."""
        for k, v in self.buffer.items():
            v.copy_(state[f"buffer.{k}"])
        for k, v in self.square.items():
            v.copy_(state[f"square.{k}"])
        self.count.copy_(state["count"])
