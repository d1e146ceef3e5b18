"""DDTREE against AR and DFLASH on one GPU, all in one run: engines start side by side and are measured one at a time.

    python benchmarks/sglang_gpu.py MODEL DRAFTER [--out docs/results/sglang_gpu.json] [--seconds 540] [--modes …]

Writes after every measurement, and skips what the output file already has, so that a run cut short is continued by the
same command. A run is one mode, budget and batch size: greedy, `--tokens` each, the same 32 chat prompts for all.
Beside the runs: where a DDTREE step's time goes, and the memory of its captured state.

What this program does not do: check that the outputs are right (tests/gpu does).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.sglang_fleet import Child, chat_prompts, engine_arguments
from benchmarks.sglang_trace import busy, read_kernels, step_phases

MODES = "ar,dflash,ddtree-8,ddtree-16,ddtree-32,ddtree-64,ar-eager"
BATCHES = "1,2,4,8,16,32"


def machine() -> dict[str, Any]:
    """What the numbers hold for."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    trees = "spine first" if os.environ.get("SGLANG_DDTREE_SPINE_FIRST", "0") != "0" else "best first"
    return {"gpu": gpu, **{name: version(name) for name in ("sglang", "torch", "triton")}, "trees": trees}


def measure(child: Child, batch: int, tokens: int, prompts: int, left: float) -> dict[str, Any]:
    """`prompts` prompts in groups of `batch`, `tokens` tokens each, after a warm-up group."""
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    asked = chat_prompts(200)[:prompts]
    groups = [asked[start : start + batch] for start in range(0, prompts, batch)]
    child.ask("time", left, prompts=groups[-1], params=params)
    timings = [child.ask("time", left, prompts=group, params=params) for group in groups]
    seconds, made, steps, longest = (
        sum(timing[key] for timing in timings) for key in ("seconds", "tokens", "verify_steps", "longest_steps")
    )
    return {
        "tok_s": round(made / seconds, 1),
        "tok_s_per_request": round(made / seconds / batch, 1),
        "acceptance_length": round(made / steps, 3) if steps else 1.0,
        "step_ms": round(1000 * seconds / (longest or tokens * len(timings)), 3),
    }


def phases(child: Child, batch: int, folder: Path, left: float) -> dict[str, Any]:
    """Milliseconds per phase of a step, on the clock and (as "busy") in kernels. The profiler slows the host: the gaps
    are longer than without it."""
    params = {"temperature": 0.0, "max_new_tokens": 96, "ignore_eos": True}
    child.ask("profile", left, prompts=chat_prompts(batch), params=params, folder=str(folder))
    kernels = read_kernels(folder)
    return step_phases(kernels) | {"busy": busy(kernels)}


def graph_state(log: Path) -> str | None:
    """What DDTREE printed at its start about the memory of its captured state. (SGLang's own figures are differences of
    free memory, which engines that start side by side blur.)"""
    printed = [line for line in log.read_text().splitlines() if "graph state" in line]
    return printed[-1].partition("graph state ")[2] if printed else None


def fallbacks(child: Child, left: float) -> dict[str, float]:
    """Counted eager forwards so far, those that occurred."""
    samples = child.ask("metrics", left)["metrics"]
    return {name: value for name, value in samples.items() if "graph_fallbacks_total" in name and value}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("drafter")
    parser.add_argument("--out", type=Path, default=Path("docs/results/sglang_gpu.json"))
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--stagger", type=float, default=45)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    result: dict[str, Any] = {"machine": machine(), "runs": [], "phases_ms": {}, "graph_state": {}}
    if arguments.out.exists():
        result |= json.loads(arguments.out.read_text())
    batches = [int(size) for size in arguments.batches.split(",")]
    children: dict[str, Child] = {}
    try:
        for name in arguments.modes.split(","):
            changes = {"cuda_graph_max_bs_decode": max(batches), "max_running_requests": max(batches)}
            fields = engine_arguments(arguments.model, arguments.drafter, name, **changes)
            children[name] = Child(name, fields, arguments.logs / f"{name}.log")
            if len(children) == 1:
                time.sleep(arguments.stagger)  # the others then find its compiled kernels
        for name, child in children.items():
            try:
                child.wait_ready(deadline - time.monotonic())
                runs(result, name, child, batches, arguments, deadline)
            except RuntimeError as error:  # one mode's failure must not cost the others their numbers
                result.setdefault("failed", {})[name] = str(error)[-2000:]
                print(name, error, file=sys.stderr)
            save(result, arguments.out)
    finally:
        for child in children.values():
            child.close()


def runs(
    result: dict[str, Any], name: str, child: Child, batches: list[int], arguments: argparse.Namespace, deadline: float
) -> None:
    """Measure one engine at every batch size that `result` lacks."""
    mode, _, budget = name.partition("-") if name.startswith("ddtree") else (name, "", "")
    done = {(run["mode"], run["budget"], run["batch"]) for run in result["runs"]}
    before = fallbacks(child, deadline - time.monotonic())
    for batch in batches:
        key = (mode, int(budget or 0), batch)
        left = deadline - time.monotonic()
        if key in done or left < 10:
            continue
        # Eager decoding is an order of magnitude slower and its step time steady.
        tokens, prompts = (32, batch) if mode == "ar-eager" else (arguments.tokens, max(32, batch))
        run: dict[str, Any] = dict(zip(("mode", "budget", "batch"), key, strict=True))
        run |= measure(child, batch, tokens, prompts, left)
        after = fallbacks(child, left)
        run["fallbacks"] = sum(after.values()) - sum(before.values())
        before = after
        result["runs"].append(run)
        save(result, arguments.out)
        print(json.dumps(run), flush=True)
    if mode == "ddtree" and name not in result["phases_ms"] and deadline - time.monotonic() > 15:
        left = deadline - time.monotonic()
        found = {str(batch): phases(child, batch, arguments.logs / f"trace-{name}-{batch}", left) for batch in (1, 8)}
        result["phases_ms"][name] = found
    result["graph_state"][name] = graph_state(arguments.logs / f"{name}.log")


def save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
