"""Train a DFlash drafter: text is written by the target while training, every piece is used for a few hundred steps
and replaced.

Stops and saves by itself well before `--call-seconds`; run again with the same `--state` to go on. The learning
rate follows the seconds spent over all calls (`--budget-seconds`): constant, then down to zero over the last part.
Not here: the choice of data (prompts.py, encode.py), trees and walks (serve_app/models/eval.py).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.drafter import plain
from benchmarks.drafter.decode import Pool, Writer
from benchmarks.drafter.drafter import DrafterShape, initial, load_checkpoint, save_checkpoint
from benchmarks.drafter.encode import Stream
from benchmarks.drafter.heldout import HeldOut
from benchmarks.drafter.state import load_state, save_state
from benchmarks.drafter.step import LossMix, Trainer
from benchmarks.drafter.target import Target, read_directory, read_gguf, tiny_target


def learning_rate(spent: float, budget: float, peak: float, decay_from: float, warm: float) -> float:
    """Peak rate after `warm` seconds; linear to 2 % of it from `decay_from`·budget on."""
    left = max(0.0, 1 - spent / budget) / (1 - decay_from)
    return peak * min(1.0, (spent + 1e-9) / warm if warm else 1.0, max(0.02, left))


def power_of_two_scale(pool: Pool, n: int) -> Tensor:
    """[n·H] per-layer factor that brings the features of learned tokens to RMS of about 1; powers of two lose no
    bits."""
    features = pool.features[: min(64, pool.features.shape[0])]
    keep = pool.label[: features.shape[0]] > 0
    rms = features[keep].float().view(-1, n, features.shape[-1] // n).pow(2).mean((0, 2)).sqrt()
    return torch.exp2(-torch.log2(rms).round()).repeat_interleave(features.shape[-1] // n)


class Run:
    """The state of one training run: trainer, writer, clock, history."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.cuda = args.device == "cuda"
        device = torch.device(args.device)
        if self.cuda:
            from benchmarks.drafter import kernels

            self.ops: Any = kernels
        else:
            self.ops = plain
        torch.manual_seed(args.seed + int(time.time()) % 100_000 * self.cuda)
        self.target = self._target(device)
        n = len(args.layer_ids)
        shape = DrafterShape(self.target.shape, args.layers, args.block, args.mask_id, tuple(args.layer_ids))
        masters: dict[str, Tensor] = initial(shape, args.seed)
        if args.init:
            shape, masters = load_checkpoint(args.init, self.target.shape)
        self.shape, self.history, self.looks = shape, list[dict[str, Any]](), list[float]()
        self.spent, self.steps, self.tokens, self.best, self.place = 0.0, 0, 0, 0.0, 0
        hidden, width = self.target.shape.hidden, n * self.target.shape.hidden
        self.pool = Pool.allocate(args.rows * args.slots, args.length, width, hidden, device, self.target.embed.dtype)
        self.writer = Writer(
            self.target,
            list(shape.layer_ids),
            self.pool,
            args.rows,
            Stream.load(args.stream),
            self.ops,
            args.im_end,
            args.seed,
        )
        self.held = HeldOut(self.target, shape, args, self.ops, self.note)
        mix = LossMix(args.hard, args.gamma, args.reach, args.greedy_tau, args.short, not args.all_slots)
        self.trainer = Trainer(
            shape,
            masters,
            self.target,
            self.pool,
            torch.ones(width),
            mix,
            self.ops,
            args.batch_rows,
            args.anchors,
            args.chunk_blocks,
        )
        self.trainer.opt.decay.fill_(args.weight_decay)
        if args.state.exists():
            self.resume()

    def _target(self, device: torch.device) -> Target:
        if self.args.tiny:
            return tiny_target().to(device, torch.float32)
        if self.args.cache and self.args.cache.exists():
            target: Target = torch.load(self.args.cache, weights_only=False)
        else:
            target = read_directory(self.args.model) if self.args.model else read_gguf(self.args.gguf)
            if self.args.cache:
                torch.save(target, self.args.cache)
        return target.to(device, torch.bfloat16 if self.cuda else torch.float32)

    def note(self, **facts: Any) -> None:
        """One line of the log, kept in the history too."""
        facts = {"t": round(time.monotonic() - self.began, 1), **facts}
        self.history.append(facts)
        print(json.dumps(facts), flush=True)

    def left(self) -> float:
        """Seconds until this call must be over."""
        return self.args.call_seconds - (time.monotonic() - self.began)

    def resume(self) -> None:
        """Take up where the last call stopped."""
        facts = load_state(self.args.state, self.trainer, self.writer)
        self.spent, self.steps, self.tokens = facts["spent"], facts["steps"], facts["tokens"]
        self.best, self.history, self.place = facts["best"], facts["history"], facts["next_chat"]

    def save(self) -> None:
        """The checkpoint for engines, the held-out answers as token ids, and the state for the next call."""
        save_checkpoint(self.trainer.masters, self.shape, self.trainer.scale, self.args.out)
        (self.args.out / "continuations.json").write_text(json.dumps(self.held.texts()))
        names = ("spent", "steps", "tokens", "best", "history")
        save_state(self.args.state, self.trainer, self.writer, {name: getattr(self, name) for name in names})

    def keep_best(self) -> None:
        """Keep the weights in OUT-best if the fresh text since the last look was accepted further than ever before."""
        mean = sum(self.looks) / max(1, len(self.looks))
        self.looks = []
        if mean > self.best:
            self.best = mean
            save_checkpoint(self.trainer.masters, self.shape, self.trainer.scale, Path(f"{self.args.out}-best"))

    def write_slot(self, slot: int) -> None:
        """Fill a slot with new text and log how the drafter does on it before training sees it."""
        a = self.args
        begin = time.monotonic()
        self.writer.fill(slot % a.slots)
        self._sync()
        self.tokens += a.rows * a.length
        took = time.monotonic() - begin
        self.spent += took
        label = self.pool.label[slot % a.slots * a.rows : (slot % a.slots + 1) * a.rows]
        self.note(
            event="slot",
            slot=slot,
            seconds=round(took, 2),
            tokens=self.tokens,
            learned=round(label.float().mean().item(), 3),
        )

    def look(self, slot: int) -> float:
        """Mean acceptance length of the chain over all anchors of fresh text."""
        t, a = self.trainer, self.args
        t.fresh.zero_()
        t.first_row.fill_(slot % a.slots * a.rows)
        for _ in range(2):
            t.run("look_fresh")
            t.first_row += a.batch_rows
        total, blocks = t.fresh.tolist()
        self.looks.append(1 + total / max(1.0, blocks))
        return self.looks[-1]

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def train(self, steps: int) -> None:
        """`steps` updates at the rate of the present moment."""
        a, t = self.args, self.trainer
        begin = time.monotonic()
        done = 0
        while done < steps and self.left() > a.reserve:
            now = self.spent + time.monotonic() - begin
            t.opt.lr.fill_(learning_rate(now, a.budget_seconds, a.lr, a.decay_from, a.warm_seconds))
            n = min(25, steps - done)
            t.run("train_step", n)
            done += n
            self._sync()
        self.spent += time.monotonic() - begin
        self.steps += done

    def log_train(self, slot: int, fresh: float) -> None:
        """One line with the losses since the last."""
        count, hit, logq = self.trainer.stats[:, 1:]
        hit, logq = hit / count.clamp(min=1), logq / count.clamp(min=1)
        self.note(
            event="train",
            slot=slot,
            steps=self.steps,
            spent=round(self.spent, 1),
            lr=round(self.trainer.opt.lr.item(), 6),
            fresh_chain=round(fresh, 4),
            hit=[round(x, 3) for x in hit.tolist()[:8]],
            loss=[round(-x, 3) for x in logq.tolist()[:8]],
        )
        self.trainer.stats.zero_()


def loop(run: Run) -> None:
    """Fill the pool, then: replace a slot, look, train about `epochs` of its anchors; until the time is up."""
    a = run.args
    if run.cuda:
        run.writer.capture()
        run.note(event="captured writer", gib=round(torch.cuda.memory_allocated() / 2**30, 1))
    resumed = run.steps
    run.writer.next_chat.fill_(run.place)  # capturing moved it
    for slot in range(a.slots):
        run.write_slot(slot)
    if not resumed:
        run.trainer.set_scale(power_of_two_scale(run.pool, len(run.shape.layer_ids)))
    if run.cuda:
        run.trainer.capture()
        run.note(event="captured trainer", gib=round(torch.cuda.max_memory_allocated() / 2**30, 1))
    run.held.report(run.trainer, "begin", full=a.full_begin)
    slot, last_eval = a.slots, time.monotonic()
    while run.left() > a.reserve and run.spent < a.budget_seconds:
        learned = run.pool.label.float().sum().item() / a.slots
        steps = max(1, round(a.epochs * learned / (a.batch_rows * a.anchors)))
        run.train(steps)
        if run.left() <= a.reserve or run.spent >= a.budget_seconds:
            break
        run.write_slot(slot)
        run.log_train(slot, run.look(slot))
        if time.monotonic() - last_eval > a.eval_seconds:
            run.held.report(run.trainer, f"step {run.steps}")
            run.keep_best()
            last_eval = time.monotonic()
        slot += 1
    run.save()
    run.held.report(run.trainer, "end", full=True)
    run.save()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--device", default="cuda")
    add("--tiny", action="store_true", help="a random toy target")
    add("--model", type=Path, help="the target's directory (config.json, safetensors)")
    add("--gguf", type=Path, help="the target as a GGUF file instead")
    add("--cache", type=Path, help="keep the dequantised target here")
    add("--stream", type=Path, required=True, help="encode.py's output")
    add("--eval-stream", type=Path, required=True, help="held-out prompts, one chat each (heldout.py)")
    add("--init", type=Path, help="a drafter to start from")
    add("--state", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--call-seconds", type=float, default=570)
    add("--reserve", type=float, default=45, help="seconds kept for the last evaluation and for saving")
    add("--budget-seconds", type=float, default=1000, help="writing and training over all calls: the schedule's length")
    add("--eval-seconds", type=float, default=90)
    add("--full-begin", action="store_true", help="evaluate trees before training too")
    for name, value in (
        ("layers", 5),
        ("block", 16),
        ("mask-id", 16),
        ("im-end", 2),
        ("rows", 2560),
        ("slots", 4),
        ("length", 768),
        ("batch-rows", 64),
        ("anchors", 48),
        ("chunk-blocks", 1024),
        ("seed", 1),
        ("eval-length", 400),
    ):
        add(f"--{name}", type=int, default=value)
    for name, value in (
        ("lr", 4e-3),
        ("weight-decay", 0.03),
        ("epochs", 0.5),
        ("decay-from", 0.6),
        ("warm-seconds", 10.0),
        ("hard", 0.5),
        ("gamma", 7.0),
        ("reach", 0.5),
        ("greedy-tau", 0.6),
        ("short", 0.25),
    ):
        add(f"--{name}", type=float, default=value)
    add("--all-slots", action="store_true", help="loss on every slot instead of a sample of the deep ones")
    add("--layer-ids", type=int, nargs="+", default=[1, 8, 14, 20, 27])
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    loop(Run(args))


if __name__ == "__main__":
    main()
