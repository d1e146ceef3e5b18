"""The target writes the training text: static KV, all rows at the same position, one CUDA graph replay per token.

Rows read chats from a stream of token ids with control codes (`encode.py`): forced tokens are copied, a code below
zero hands the pen to the target until it ends its turn. While it decodes, the outputs of the chosen layers and the
last hidden state are kept per token, so that training needs no forward of the target. No admission, no paging: rows
stop together after `length` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.drafter.encode import END, START, Stream, unpack_control
from benchmarks.drafter.plain import rms_norm
from benchmarks.drafter.target import Target, rope_tables


@dataclass
class Pool:
    """Text and features of `rows` rows of `length` tokens.

    features [rows, length, n·H]; last [rows, length, H] (normed, what the head reads); tokens, start (first
    position of the token's chat) [rows, length]; label [rows, length] 1 where the target wrote the token as
    assistant and it may be learned; temp [rows, length].
    """

    features: Tensor
    last: Tensor
    tokens: Tensor
    start: Tensor
    label: Tensor
    temp: Tensor

    @classmethod
    def allocate(
        cls, rows: int, length: int, width: int, hidden: int, device: torch.device, dtype: torch.dtype
    ) -> Pool:
        """Zeroed buffers."""
        z = lambda *s, d=torch.int32: torch.zeros(*s, dtype=d, device=device)  # noqa: E731
        return cls(
            z(rows, length, width, d=dtype),
            z(rows, length, hidden, d=dtype),
            z(rows, length),
            z(rows, length),
            z(rows, length, d=torch.int8),
            z(rows, length, d=torch.float32),
        )


class Writer:
    """Fills slots of a pool: slot s is rows [s·R, (s+1)·R)."""

    def __init__(
        self,
        target: Target,
        layer_ids: list[int],
        pool: Pool,
        rows: int,
        stream: Stream,
        ops: ModuleType,
        im_end: int,
        seed: int = 0,
    ):
        shape, device = target.shape, target.embed.device
        length = pool.tokens.shape[1]
        self.target, self.layer_ids, self.pool, self.rows, self.ops, self.im_end = (
            target,
            layer_ids,
            pool,
            rows,
            ops,
            im_end,
        )
        self.length = length
        cache = (shape.layers, rows, shape.kv_heads, length, shape.head_dim)
        self.k = torch.zeros(cache, dtype=target.embed.dtype, device=device)
        self.v = torch.zeros(cache, dtype=target.embed.dtype, device=device)
        self.cos, self.sin = rope_tables(shape, length, device)
        self.codes = torch.from_numpy(stream.codes).to(device)
        self.offsets = torch.from_numpy(stream.offsets).to(device)
        i64 = lambda *s: torch.zeros(*s, dtype=torch.int64, device=device)  # noqa: E731
        self.pos, self.slot, self.next_chat, self.seed = i64(1), i64(1), i64(1), i64(1)
        self.seed.fill_(seed * 1_000_003 + 17)
        self.cur, self.start, self.ptr, self.left, self.hot = i64(rows), i64(rows), i64(rows), i64(rows), i64(rows)
        self.user, self.wrote = i64(rows), i64(rows)
        self.temp = torch.zeros(rows, device=device)
        self.step_temp = torch.zeros(rows, device=device)
        self.row = torch.arange(rows, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def begin(self, slot: int) -> None:
        """Rewind all rows to position 0 of `slot`, each at a fresh chat."""
        self.pos.zero_()
        self.slot.fill_(slot)
        self.left.zero_()
        self.hot.zero_()
        self.wrote.zero_()
        self.start.zero_()
        self.temp.zero_()
        self._take_chats(torch.ones_like(self.left, dtype=torch.bool))
        self.cur.copy_(self.codes[self.ptr] - START)
        self.ptr += 1

    def _take_chats(self, need: Tensor) -> None:
        number = (self.next_chat + need.long().cumsum(0) - 1) % self.offsets.numel()
        self.ptr.copy_(torch.where(need, self.offsets[number], self.ptr))
        self.next_chat += need.long().sum()

    def _forward(self) -> Tensor:
        """Logits [R, V] at `pos`; stores features and the last hidden state of the current token."""
        t, shape, ops = self.target, self.target.shape, self.ops
        flat = (self.slot * self.rows + self.row) * self.length + self.pos
        width = shape.hidden
        features = self.pool.features.view(-1, len(self.layer_ids), width)
        x, y = F.embedding(self.cur, t.embed), None
        for i, layer in enumerate(t.layers):
            x, n = ops.add_norm(x, y, layer["norm1"], shape.eps)
            if i - 1 in self.layer_ids:
                features[:, self.layer_ids.index(i - 1)].index_copy_(0, flat, x)
            qkv = F.linear(n, layer["qkv"])
            if "q_norm" in layer:
                qkv = self._norm_heads(qkv, layer)
            att = ops.decode_attention(qkv, self.k[i], self.v[i], self.cos, self.sin, self.pos, self.start, shape.heads)
            x, n = ops.add_norm(x, F.linear(att, layer["o"]), layer["norm2"], shape.eps)
            y = F.linear(ops.swiglu(F.linear(n, layer["gate_up"])), layer["down"])
        x, n = ops.add_norm(x, y, t.norm, shape.eps)
        if shape.layers - 1 in self.layer_ids:
            features[:, self.layer_ids.index(shape.layers - 1)].index_copy_(0, flat, x)
        self.pool.last.view(-1, width).index_copy_(0, flat, n)
        for buffer, value in (
            (self.pool.tokens, self.cur),
            (self.pool.start, self.start),
            (self.pool.label, self.wrote),
        ):
            buffer.view(-1).index_copy_(0, flat, value.to(buffer.dtype))
        self.pool.temp.view(-1).index_copy_(0, flat, self.temp)
        return F.linear(n, t.head)

    def _norm_heads(self, qkv: Tensor, layer: dict[str, Tensor]) -> Tensor:
        """Qwen3's norm per head, on the queries and keys of qkv [R, (HQ+2HK)·D]."""
        s = self.target.shape
        heads = qkv.view(len(qkv), -1, s.head_dim)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], 1)
        q, k = rms_norm(q, layer["q_norm"], s.eps), rms_norm(k, layer["k_norm"], s.eps)
        return torch.cat([q, k, v], 1).view(qkv.shape)

    def step(self) -> None:
        """Write position `pos` and choose the token of pos + 1; everything stays on the device."""
        logits = self._forward()
        code = self.codes[self.ptr]
        writing = self.left > 0
        enter = ~writing & (code < 0)
        limit, hot, temp, user = unpack_control(code)
        self.left.copy_(torch.where(enter, limit, self.left))
        self.hot.copy_(torch.where(enter, hot, self.hot))
        self.temp.copy_(torch.where(enter, temp, self.temp))
        self.user.copy_(torch.where(enter, user, self.user))
        self.ptr += enter
        writing = writing | enter
        self.step_temp.copy_(torch.where(self.hot > 0, self.temp.clamp(min=1.0), self.temp))
        drawn = self.ops.sample(logits, self.step_temp, self.seed)
        self.seed += 1
        forced = torch.where(code >= START, code - START, code)
        token = torch.where(writing, drawn, forced)
        self.start.copy_(torch.where(~writing & (code >= START), self.pos + 1, self.start))
        self.wrote.copy_((writing & (self.user == 0) & (self.hot <= 0)).long())
        stop = writing & (token == self.im_end)
        self.left.copy_(torch.where(stop, torch.zeros_like(self.left), torch.where(writing, self.left - 1, self.left)))
        self.hot.copy_(torch.where(writing, self.hot - 1, self.hot))
        self.ptr += ~writing
        self.ptr += stop & (self.codes[self.ptr] == self.im_end)
        self._take_chats((self.left <= 0) & (self.codes[self.ptr] == END))
        self.cur.copy_(token)
        self.pos += 1

    def capture(self) -> None:
        """Record `step` as a CUDA graph (two eager steps first, on a side stream); rows begin anew afterwards."""
        self.begin(0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.step()
        self.next_chat.zero_()

    @torch.no_grad()
    def fill(self, slot: int) -> None:
        """Write all `length` positions of every row of `slot`."""
        self.begin(slot)
        for _ in range(self.length):
            self.graph.replay() if self.graph else self.step()
