"""Acceptance on the held-out prompts during training: the same measure as `serve_app.models.eval`, fed by the
training forward.

Fixed continuations: written once at the start of a call, greedy and at T = 0.8, by the same captured decoder as the
training text.

    python -m benchmarks.drafter.heldout --tokenizer tokenizer.json --out eval.npz      encodes the prompts for train.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.drafter.decode import Pool, Writer
from benchmarks.drafter.drafter import DrafterShape
from benchmarks.drafter.encode import END, START, SYSTEM, Stream, pack_control
from benchmarks.drafter.prompts import EVAL_PROMPTS
from benchmarks.drafter.target import Target
from serve_app.models.acceptance import Tally, chain_lengths, tree_lengths

BUDGETS = (8, 16, 32, 64, 128)


def encode_held_out(items: list[dict[str, Any]], tokenizer: Any, limit: int) -> Stream:
    """One chat per prompt, its assistant turn greedy and at most `limit` tokens."""
    codes: list[int] = []
    offsets = []
    for item in items:
        messages = item["messages"]
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": SYSTEM}, *messages]
        text = (
            "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
            + "<|im_start|>assistant\n"
        )
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        offsets.append(len(codes))
        codes += [ids[0] + START, *ids[1:], pack_control(limit), END]
    return Stream(np.array(codes, dtype=np.int32), np.array(offsets, dtype=np.int64))


def at_temperature(stream: Stream, index: int) -> Stream:
    """The same chats with every assistant turn drawn at encode.TEMPERATURES[index]."""
    control = (stream.codes < 0) & (stream.codes != END)
    return Stream(np.where(control, stream.codes - 1024 * 16 * index, stream.codes).astype(np.int32), stream.offsets)


class HeldOut:
    """Continuations of the held-out prompts with features, and the report over them."""

    def __init__(
        self, target: Target, shape: DrafterShape, args: argparse.Namespace, ops: ModuleType, note: Callable[..., None]
    ) -> None:
        stream = Stream.load(args.eval_stream)
        self.rows, self.note, self.target, self.shape = len(stream.offsets), note, target, shape
        hidden, device = target.shape.hidden, target.embed.device
        self.pools: dict[float, Pool] = {}
        for temperature, index in ((0.0, 0), (0.8, 4)):
            pool = Pool.allocate(
                self.rows, args.eval_length, len(shape.layer_ids) * hidden, hidden, device, target.embed.dtype
            )
            writer = Writer(
                target, list(shape.layer_ids), pool, self.rows, at_temperature(stream, index), ops, args.im_end, seed=7
            )
            if device.type == "cuda":
                writer.capture()
            writer.fill(0)
            pool.label[pool.start > 0] = 0  # a row's later chats repeat the prompts
            self.pools[temperature] = pool
            del writer

    def texts(self) -> dict[str, list[list[int]]]:
        """The continuations as token ids, for a second evaluation elsewhere."""
        return {str(t): [p.tokens[r][p.label[r] > 0].tolist() for r in range(self.rows)] for t, p in self.pools.items()}

    @torch.no_grad()
    def marginals(self, trainer: Any, pool: Pool, k: int, block: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """(tokens [P, D, k], logps, truth [P, D], anchors per row) at every anchor of every row, row after row."""
        label = pool.label > 0
        first, count = label.int().argmax(1), (label.sum(1) - 1).clamp(min=0)
        s, width, embed = self.shape.block, trainer.anchors, self.target.embed
        ids, lps = [], []
        row_of = torch.repeat_interleave(torch.arange(self.rows, device=embed.device), count)
        nth = torch.arange(row_of.numel(), device=embed.device) - (count.cumsum(0) - count)[row_of]
        anchors = first[row_of] + nth
        at = anchors[:, None] + torch.arange(1, block, device=embed.device)
        inside = at < (first + count + 1)[row_of][:, None]
        truth = torch.where(inside, pool.tokens[row_of[:, None], at.clamp(max=pool.tokens.shape[1] - 1)].long(), -1)
        per = max(1, trainer.batch_rows)
        tables: dict[tuple[int, int], int] = {}
        for r0 in range(0, self.rows, per):
            rows = torch.arange(r0, min(r0 + per, self.rows), device=embed.device)
            most = int(count[rows].max())
            for c0 in range(0, max(most, 1), width):
                anchor = first[rows][:, None] + torch.arange(c0, c0 + width, device=embed.device)
                anchor = torch.minimum(anchor, (first + count)[rows][:, None])
                blocks = trainer.blocks(pool, rows, anchor, torch.full((len(rows), 1), block, device=embed.device))
                hidden = trainer.hidden(pool, rows, blocks).view(-1, s, embed.shape[1])[:, 1:block]
                for i in range(0, hidden.shape[0], 256):
                    logits = F.linear(hidden[i : i + 256], self.target.head)
                    if k == 1:
                        best = logits.max(-1, keepdim=True)
                        ids.append(best.indices.int())
                        lps.append(torch.zeros_like(best.values, dtype=torch.float32))
                    else:
                        top = logits.topk(k, dim=-1)
                        ids.append(top.indices.int())
                        lps.append(top.values.float() - logits.float().logsumexp(-1, keepdim=True))
                for i in range(len(rows)):
                    tables[(r0 + i, c0)] = sum(x.shape[0] for x in ids) - len(rows) * width + i * width
        where = []
        for r, n in enumerate(count.tolist()):
            where += [tables[(r, c - c % width)] + c % width for c in range(n)]
        index = torch.tensor(where, device=embed.device, dtype=torch.int64)
        return torch.cat(ids)[index].long(), torch.cat(lps)[index], truth, count.tolist()

    def report(self, trainer: Any, label: str, full: bool = False) -> dict[str, Any]:
        """Chain lengths by walk; with `full`, trees of every budget, for whole and half blocks, and acceptance
        by depth."""
        out: dict[str, Any] = {}
        for temperature, pool in self.pools.items():
            for block in (self.shape.block, self.shape.block // 2) if full else (self.shape.block,):
                tokens, logps, truth, counts = self.marginals(
                    trainer, pool, min(max(BUDGETS), self.target.shape.vocab) if full else 1, block
                )
                lengths = {"chain": chain_lengths(tokens[:, :, 0], truth)}
                if full:
                    for name, spine in (("tree", False), ("spine", True)):
                        grown = tree_lengths(tokens, logps, truth, BUDGETS, spine_first=spine)
                        lengths |= {f"{name}{b}": x for b, x in zip(BUDGETS, grown, strict=True)}
                key = f"T{temperature} block{block}"
                out[key] = {}
                for name, values in lengths.items():
                    tally, flat, at = Tally(block - 1), values.tolist(), 0
                    for n in counts:
                        tally.add(flat[at : at + n])
                        at += n
                    out[key][name] = round(tally.mean, 4)
                    if name in ("chain", "tree32") and full:
                        out[key][f"{name} by depth"] = [round(x, 3) for x in tally.per_depth()]
                out[key]["all anchors"] = round(lengths["chain"].float().mean().item(), 4)
        self.note(event="held-out", at=label, **out)
        return out


def main(argv: list[str] | None = None) -> None:
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description="Encode the held-out prompts for train.py.")
    parser.add_argument("--prompts", type=Path, default=EVAL_PROMPTS)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=260, help="new tokens per reply")
    args = parser.parse_args(argv)
    encode_held_out(json.loads(args.prompts.read_text()), Tokenizer.from_file(str(args.tokenizer)), args.limit).save(
        args.out
    )


if __name__ == "__main__":
    main()
