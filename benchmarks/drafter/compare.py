"""Short trials of losses and learning rates on the same text, before the long run: which recipe learns most in half
a minute.

Every trial starts from the same drafter (or from scratch), trains on all slots but the last, with the rate going
down to zero at its end, and is judged on the last slot, which no trial has seen: prompts of the training grammar,
not the evaluation's.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.drafter.drafter import initial
from benchmarks.drafter.step import LossMix, Trainer
from benchmarks.drafter.train import Run, parser, power_of_two_scale

TRIALS: dict[str, dict[str, Any]] = {
    "soft and reach": {},
    "DFlash's loss": {"hard": 1.0, "reach": 0.0, "gamma": 5.0, "sampled": False, "short": 0.0},
    "soft only": {"reach": 0.0, "gamma": 5.0},
    "from scratch": {"scratch": True},
}


def trial(run: Run, masters: dict[str, torch.Tensor], mix: LossMix, seconds: float, peak: float) -> dict[str, float]:
    """Train for `seconds` (capture not counted) and look at unseen text."""
    a = run.args
    t = run.trainer = Trainer(
        run.shape,
        masters,
        run.target,
        run.pool,
        torch.ones_like(run.trainer.scale),
        mix,
        run.ops,
        a.batch_rows,
        a.anchors,
        a.chunk_blocks,
    )
    t.train_rows = a.rows * (a.slots - 1)
    t.opt.decay.fill_(a.weight_decay)
    t.set_scale(power_of_two_scale(run.pool, len(run.shape.layer_ids)))
    if run.cuda:
        t.capture()
    begin, steps = time.monotonic(), 0
    while (done := (time.monotonic() - begin) / seconds) < 1:
        t.opt.lr.fill_(peak * min(1.0, done * 10, 2 * (1 - done)))
        t.run("train_step", 10)
        steps += 10
        run._sync()
    return {
        "steps": steps,
        "per_second": round(steps / (time.monotonic() - begin), 2),
        "fresh_chain": round(run.look(a.slots - 1), 4),
    }


def main(argv: list[str] | None = None) -> None:
    p = parser()
    p.add_argument("--trial-seconds", type=float, default=20)
    p.add_argument("--trials", nargs="+", default=list(TRIALS))
    args = p.parse_args(argv)
    run = Run(args)
    start = {k: v.cpu().clone() for k, v in run.trainer.masters.items()}
    if run.cuda:
        run.note(event="built", gib=round(torch.cuda.memory_allocated() / 2**30, 1))
        run.writer.capture()
        run.note(event="captured writer")
    for slot in range(args.slots):
        run.write_slot(slot)
    run.note(event="before", fresh_chain=run.look(args.slots - 1))
    run.held.report(run.trainer, "before", full=args.full_begin)
    for name in args.trials:
        change = dict(TRIALS[name])
        masters = initial(run.shape, args.seed) if change.pop("scratch", False) else start
        run.trainer.graphs.clear()
        gc.collect()
        if run.cuda:
            torch.cuda.empty_cache()
        result = trial(run, masters, replace(LossMix(), **change), args.trial_seconds, args.lr)
        run.note(
            event="trial",
            name=name,
            **result,
            gib=round(torch.cuda.max_memory_allocated() / 2**30, 1) if run.cuda else 0,
            hit=[round(x, 3) for x in (run.trainer.stats[1, 1:] / run.trainer.stats[0, 1:].clamp(min=1)).tolist()[:8]],
        )
        run.held.report(run.trainer, name)
        if run.left() < args.reserve + args.trial_seconds:
            break


if __name__ == "__main__":
    main()
