"""One training step and its loss: choose rows and anchors, run the drafter, weigh the slots, update. Host-free, so
one CUDA graph holds it.

The loss of slot k mixes the target's own token (hard) with the target's distribution there (soft), weighed by
exp(-(k-1)/gamma) and by how likely the drafter was to have the block right up to k. Reference: DFlash, arXiv
2602.06036; the reach weight is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.drafter.decode import Pool
from benchmarks.drafter.drafter import Blocks, DrafterShape, forward
from benchmarks.drafter.muon import Muon
from benchmarks.drafter.target import Target, rope_tables


@dataclass(frozen=True)
class LossMix:
    """hard: share of the target's token against its distribution; gamma: decay by depth; reach: exponent of the
    reach weight; greedy_tau: temperature of the soft labels where the text is greedy; short: share of rows
    trained with a half-length block; sampled: loss on this many random deep slots besides the first five
    (None: on every slot)."""

    hard: float = 0.5
    gamma: float = 7.0
    reach: float = 0.5
    greedy_tau: float = 0.6
    short: float = 0.25
    sampled: bool = True


def choose_anchors(pool: Pool, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(anchor [B, count], valid [B, count]): random learned tokens whose successor is learned too; invalid where
    a row has too few."""
    label = pool.label[rows]
    good = torch.zeros_like(label, dtype=torch.bool)
    good[:, :-1] = (label[:, :-1] > 0) & (label[:, 1:] > 0)
    score = torch.rand(label.shape, device=label.device) * good
    value, anchor = score.topk(count, dim=1)
    return anchor, value > 0


def slot_labels(pool: Pool, rows: Tensor, anchor: Tensor, valid: Tensor, block: int) -> Tensor:
    """[B, A, block-1] token anchor+k of slot k, -1 from the first token on that the target did not write in this
    turn."""
    length = pool.tokens.shape[1]
    at = anchor[..., None] + torch.arange(1, block, device=anchor.device)
    inside = at < length
    at = at.clamp(max=length - 1).view(rows.numel(), -1)
    token = pool.tokens[rows].gather(1, at).view(*anchor.shape, block - 1)
    mine = pool.label[rows].gather(1, at).view(*anchor.shape, block - 1) > 0
    mine = (mine & inside & valid[..., None]).int().cumprod(-1) > 0
    return torch.where(mine, token, torch.full_like(token, -1))


def choose_slots(blocks: int, block: int, sampled: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """(depth [blocks, K] ascending, times [K]): slots whose loss is computed, and how many slots each stands for."""
    every = torch.arange(1, block, device=device)
    if not sampled or block < 16:
        return every.expand(blocks, -1), torch.ones(block - 1, device=device)
    edges = [(6, 3), (9, 3), (12, block - 12)]
    deep = [lo + (torch.rand(blocks, 1, device=device) * n).long().clamp(max=n - 1) for lo, n in edges]
    times = torch.ones(5 + len(edges), device=device)
    for i, (_, n) in enumerate(edges):
        times[5 + i : 6 + i].fill_(n)
    return torch.cat([every[:5].expand(blocks, -1), *deep], 1), times


class Trainer:
    """Master weights, working copies, optimiser and the two captured programs: a training step, and a look at
    fresh rows."""

    def __init__(
        self,
        shape: DrafterShape,
        masters: dict[str, Tensor],
        target: Target,
        pool: Pool,
        scale: Tensor,
        mix: LossMix,
        ops: ModuleType,
        batch_rows: int,
        anchors: int,
        chunk_blocks: int = 1024,
    ):
        device, dtype = target.embed.device, target.embed.dtype
        self.shape, self.target, self.pool, self.mix, self.ops = shape, target, pool, mix, ops
        self.batch_rows, self.anchors, self.chunk = batch_rows, anchors, chunk_blocks
        self.scale = scale.to(device, dtype)
        self.masters = {k: v.to(device, torch.float32).clone() for k, v in masters.items()}
        self.work = {
            k: v.to(dtype if v.dim() == 2 else torch.float32, copy=True).requires_grad_()
            for k, v in self.masters.items()
        }
        t = shape.target
        kv = t.kv_heads * t.head_dim
        self.opt = Muon(self.masters, {"qkv": [t.heads * t.head_dim, kv, kv], "gate_up": [t.inter, t.inter]})
        self.cos, self.sin = rope_tables(t, pool.tokens.shape[1] + shape.block, device)
        self.first_row = torch.zeros(1, dtype=torch.int64, device=device)  # fresh rows to look at begin here
        self.fresh = torch.zeros(2, device=device)  # sum of correct prefix lengths, blocks
        self.stats = torch.zeros(3, shape.block, device=device)  # per depth: slots, hits, sum of logq
        self.train_rows = pool.tokens.shape[0]  # training draws from the first rows only
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def blocks(self, pool: Pool, rows: Tensor, anchor: Tensor, blen: Tensor) -> Blocks:
        """The draft blocks at anchor [B, A] of the pool's `rows`, with block lengths blen [B, 1]."""
        root = pool.tokens[rows].gather(1, anchor)
        start = pool.start[rows].gather(1, anchor)
        flat = lambda x: x.reshape(-1).int().contiguous()  # noqa: E731
        return Blocks(flat(anchor), flat(start), flat(blen.expand_as(anchor)), root.reshape(-1).long())

    def hidden(self, pool: Pool, rows: Tensor, blocks: Blocks) -> Tensor:
        """Drafter hidden states [B·A·S, H]."""
        return forward(
            self.work,
            self.shape,
            self.target.embed,
            pool.features[rows] * self.scale,
            blocks,
            self.cos,
            self.sin,
            self.ops,
        )

    def train_step(self) -> None:
        """One update on random rows of the pool."""
        s, device, mix = self.shape.block, self.scale.device, self.mix
        rows = torch.randint(0, self.train_rows, (self.batch_rows,), device=device)
        anchor, valid = choose_anchors(self.pool, rows, self.anchors)
        blen = torch.where(torch.rand(self.batch_rows, 1, device=device) < mix.short, s // 2, s)
        blocks = self.blocks(self.pool, rows, anchor, blen)
        ba = blocks.anchor.numel()
        label = slot_labels(self.pool, rows, anchor, valid, s).view(ba, s - 1)
        depth, times = choose_slots(ba, s, mix.sampled, device)
        label = torch.where(depth < blocks.blen[:, None], label.gather(1, depth - 1), -1).int()
        base = torch.exp(-(depth - 1).float() / mix.gamma) * times
        hidden = self.hidden(self.pool, rows, blocks)
        pick = (torch.arange(ba, device=device)[:, None] * s + depth).view(-1)
        # Distribution over the token at anchor+k: what the target saw at anchor+k-1.
        before = (rows[:, None] * self.pool.tokens.shape[1] + anchor).view(-1, 1) + depth - 1
        before = before.clamp(max=self.pool.tokens.numel() - 1).view(-1)
        temp = self.pool.temp[rows].gather(1, anchor).view(-1, 1).expand_as(depth)
        tau = torch.where(temp > 0, temp, torch.full_like(temp, mix.greedy_tau)).contiguous()
        grad = self._head(hidden, pick, before, label, base, depth, tau)
        names = list(self.work)
        grads = torch.autograd.grad(hidden, [self.work[n] for n in names], grad)
        with torch.no_grad():
            self.opt.step(dict(zip(names, grads, strict=True)))
            for name in names:
                self.work[name].data.copy_(self.masters[name])

    @torch.no_grad()
    def _head(
        self, hidden: Tensor, pick: Tensor, before: Tensor, label: Tensor, base: Tensor, depth: Tensor, tau: Tensor
    ) -> Tensor:
        """Gradient of the loss with respect to `hidden`, without ever holding all logits."""
        k = depth.shape[1]
        head, last = self.target.head, self.pool.last.view(-1, self.target.shape.hidden)
        out = torch.zeros_like(hidden)
        norm = 1.0 / base.sum()
        for i in range(0, depth.shape[0], self.chunk):
            part = slice(i * k, min((i + self.chunk) * k, pick.numel()))
            here = slice(i, i + self.chunk)
            z = F.linear(hidden[pick[part]], head)
            zt = F.linear(last[before[part]], head) if self.mix.hard < 1 else None
            logq, hit, _ = self.ops.head_loss_(
                z,
                zt,
                label[here].reshape(-1),
                base[here].reshape(-1),
                depth[here].reshape(-1),
                tau[here].reshape(-1),
                k,
                self.mix.hard,
                self.mix.reach,
                True,
            )
            out.index_copy_(0, pick[part], (z @ head) * norm)
            good = (label[here] >= 0).float().view(-1)
            at = depth[here].reshape(-1)
            for row, value in enumerate((good, hit.float(), logq * good)):
                self.stats[row].index_add_(0, at, value)
        return out

    @torch.no_grad()
    def look_fresh(self) -> None:
        """Add the correct greedy prefixes of random blocks in `batch_rows` rows from `first_row` on to `fresh`."""
        s, device = self.shape.block, self.scale.device
        rows = self.first_row + torch.arange(self.batch_rows, device=device)
        anchor, valid = choose_anchors(self.pool, rows, self.anchors)
        blocks = self.blocks(self.pool, rows, anchor, torch.full((self.batch_rows, 1), s, device=device))
        label = slot_labels(self.pool, rows, anchor, valid, s).view(-1, s - 1)
        hidden = self.hidden(self.pool, rows, blocks).view(-1, s, self.target.shape.hidden)
        for i in range(0, label.shape[0], self.chunk):
            top = F.linear(hidden[i : i + self.chunk, 1:], self.target.head).argmax(-1)
            good = (top == label[i : i + self.chunk]).int().cumprod(1).sum(1)
            usable = label[i : i + self.chunk, 0] >= 0
            self.fresh += torch.stack([(good * usable).sum(), usable.sum()]).float()

    def capture(self) -> None:
        """Warm up and record both programs. The weights keep what the warm-up steps did at learning rate 0."""
        rate = self.opt.lr.clone()
        self.opt.lr.zero_()
        for name in ("train_step", "look_fresh"):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    getattr(self, name)()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                getattr(self, name)()
            self.graphs[name] = graph
        self.opt.lr.copy_(rate)
        self.stats.zero_()
        self.fresh.zero_()

    def run(self, name: str, times: int = 1) -> None:
        """Replay a captured program, or run it eagerly where there is none."""
        for _ in range(times):
            self.graphs[name].replay() if name in self.graphs else getattr(self, name)()

    def set_scale(self, scale: Tensor) -> None:
        """Change the features' scale without changing what the drafter computes."""
        ratio = self.scale.float() / scale.to(self.scale.device).float()
        self.masters["fc"].mul_(ratio)
        self.work["fc"].data.copy_(self.masters["fc"])
        self.scale.copy_(scale)
