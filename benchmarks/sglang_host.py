"""What SGLang's scheduler does on the host in one decode step, counted on a CPU: no kernel runs, only what leads to it.

    python -m benchmarks.sglang_host [--modes ar,dflash,ddtree-64] [--batches 1,16] [--top 25]

Where SGLang is installed for a CPU (`make test-sglang` makes such an environment). Each mode and batch size has a
process of its own, with direct replays unless SGLANG_DDTREE_DIRECT_REPLAY says 0: greedy requests in steady state,
overlap on, every step accepts three drafts. Printed per step: microseconds of the scheduler's thread (median; a GPU's
launches are dearer than these stand-ins), Python calls, operations that PyTorch dispatches without views, kernels
launched through Triton; with --top the dearest functions.
DFLASH writes the drafter's cache by plain operations here, on a GPU by one kernel: read its times as too long.

What this program does not do: run kernels, so it says nothing about a GPU's time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import sglang_cpu

WARM_UP, STEPS, ACCEPTED, TOKEN = 60, 300, 4, 7
VIEWS = {"view", "slice", "select", "expand", "_unsafe_view", "unsqueeze", "transpose", "t", "alias", "detach"}


def measure(mode: str, batch: int, top: int) -> dict[str, Any]:
    """Three runs of STEPS steps after the warm-up: timed, then with calls counted, then with operations counted."""
    sglang_cpu.prepare()
    import torch
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner
    from torch.utils._python_dispatch import TorchDispatchMode

    torch.set_num_threads(1)
    session = sglang_cpu.Session(mode, Path(tempfile.mkdtemp()), vocabulary=256, block=16)
    aside = 0.0  # seconds spent on what a GPU would do
    operations: Counter[str] = Counter()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations[function.name().partition("::")[2].partition(".")[0]] += not standing_in
            return function(*args, **(kwargs or {}))

    standing_in = False
    worker = session.scheduler.draft_worker

    def accept(runner: Any, bucket: int) -> None:
        nonlocal aside, standing_in
        began, standing_in = time.thread_time(), True
        if worker is not None and hasattr(worker, "chosen") and not runner.model_runner.is_draft_worker:
            out, lengths = worker._commit, runner.buffers.seq_lens[:bucket]
            capacity, path = out.rows.shape
            out.result[: bucket * path] = TOKEN
            tail = out.result[capacity * path :].view(3, capacity)[:, :bucket]
            tail[0], tail[1], tail[2] = ACCEPTED, TOKEN, lengths + ACCEPTED
        standing_in = False
        aside += time.thread_time() - began

    decode_cuda_graph_runner.resolve_decode_backend.replayed = staticmethod(accept)
    if worker is not None:
        _settle_worker(worker)
    profile, counting = cProfile.Profile(), Operations()
    times: list[float] = []
    last = (0.0, 0.0)

    def each(iteration: int) -> bool:
        nonlocal last
        at, now = iteration - WARM_UP, time.thread_time()
        if 0 < at <= STEPS:
            times.append(now - last[0] - (aside - last[1]))
        last = (now, aside)
        if at == 0:
            sglang_cpu.LAUNCHES.clear()
        elif at == STEPS:
            launches.update(sglang_cpu.LAUNCHES)
            profile.enable()
        elif at == 2 * STEPS:
            profile.disable()
            counting.__enter__()
        elif at == 3 * STEPS:
            counting.__exit__(None, None, None)
        return at >= 3 * STEPS

    launches: Counter[str] = Counter()
    length = (WARM_UP + 3 * STEPS) * ACCEPTED + 64
    asked = [(1, sglang_cpu.request(str(i), list(range(10 + i, 40 + i)), length)) for i in range(batch)]
    session.run(asked, each)
    rows: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    dearest = sorted(rows.items(), key=lambda row: -row[1][2])[:top]
    return {
        "mode": mode, "batch": batch, "us": round(1e6 * median(times), 1),
        "calls": round(sum(row[1] for row in rows.values()) / STEPS),
        "operations": round(sum(n for name, n in operations.items() if name not in VIEWS) / STEPS, 1),
        "launches": {name: round(n / STEPS, 2) for name, n in launches.items()},
        "by_operation": {name: round(n / STEPS, 2) for name, n in operations.items() if n > STEPS / 10},
        "top": [
            f"{1e6 * row[2] / STEPS:7.1f} us {row[1] / STEPS:7.1f} calls  {Path(file).name}:{line} {name}"
            for (file, line, name), row in dearest
        ],
    }  # fmt: skip


def _settle_worker(worker: Any) -> None:
    """Inputs that no kernel will write must be valid ids all the same, and DFLASH shall take its way on a GPU."""
    worker._ensure_draft_block_buffers(16)
    for name in ("block_ids", "block_positions", "block_tokens", "verify_out_cache_loc"):
        getattr(worker, f"_draft_{name}_buf").zero_()
    if hasattr(worker, "chosen"):
        return
    from sglang.srt.speculative import dflash_worker_v2

    worker._use_triton_prepare_block = worker._use_triton_accept_bonus = True
    kernel = dflash_worker_v2._compute_dflash_accept_bonus_triton_unchecked

    def accept(**tensors: Any) -> None:
        kernel(**tensors)
        for name, value in (("accept_lens", ACCEPTED - 1), ("commit_lens", ACCEPTED), ("bonus_ids", TOKEN)):
            tensors[f"{name}_out"].fill_(value)
        tensors["out_tokens_out"].fill_(TOKEN)
        tensors["new_seq_lens_out"].copy_(tensors["prefix_lens"] + ACCEPTED)

    dflash_worker_v2._compute_dflash_accept_bonus_triton_unchecked = accept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--modes", default="ar,dflash,ddtree-64")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--top", type=int, default=0, help="print that many functions by their own time")
    parser.add_argument("--one", action="store_true", help="measure in this process; one mode and batch size")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.modes, int(arguments.batches), arguments.top)), flush=True)
        os._exit(0)  # SGLang's threads are not asked
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    for mode in arguments.modes.split(","):
        for batch in arguments.batches.split(","):
            own = [
                "-m",
                "benchmarks.sglang_host",
                "--one",
                "--modes",
                mode,
                "--batches",
                batch,
                "--top",
                str(arguments.top),
            ]
            done = subprocess.run(
                [sys.executable, "-W", "ignore", *own], env=environment, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            if done.returncode:
                sys.exit(done.stderr[-4000:])
            found = json.loads(done.stdout.splitlines()[-1])
            functions = found.pop("top")
            print(json.dumps(found), *functions, sep="\n", flush=True)


if __name__ == "__main__":
    main()
