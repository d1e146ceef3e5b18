"""DDTREE against AR and DFLASH on one GPU, all in one run: engines start side by side and are measured one at a time.

    python benchmarks/sglang_gpu.py MODEL DRAFTER [--out docs/results/sglang_gpu.json] [--seconds 540] [--modes …]

Writes after every measurement, and skips what the output file already has, so that a run cut short is continued by the
same command. A run is one mode, budget and batch size: greedy, `--tokens` per request, prompts of the chat kind.

What this program does not do: check that the outputs are right (tests/gpu does).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.sglang_fleet import Child, chat_prompts, engine_arguments

MODES = "ar,dflash,ddtree-8,ddtree-16,ddtree-32,ddtree-64,ar-eager"
BATCHES = "1,2,4,8,16,32"


def machine() -> dict[str, Any]:
    """What the numbers hold for."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {"gpu": gpu, **{name: version(name) for name in ("sglang", "torch", "triton")}}


def measure(child: Child, batch: int, tokens: int, repeats: int, left: float) -> dict[str, Any]:
    """Medians over `repeats` of one batch decoded to `tokens` tokens each, after a warm-up of the same shape."""
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    timings = []
    for attempt in range(repeats + 1):
        prompts = chat_prompts(200)[attempt * 32 : attempt * 32 + batch]
        timing = child.ask("time", left, prompts=prompts, params=params)
        timings.append(timing)
    kept = sorted(timings[1:], key=lambda timing: timing["seconds"] / timing["tokens"])[repeats // 2]
    steps = kept["longest_steps"] or tokens
    lengths = [t["tokens"] / t["verify_steps"] for t in timings[1:] if t["verify_steps"]]
    return {
        "tok_s": round(kept["tokens"] / kept["seconds"], 1),
        "tok_s_per_request": round(kept["tokens"] / kept["seconds"] / batch, 1),
        "acceptance_length": round(sum(lengths) / len(lengths), 3) if lengths else 1.0,
        "step_ms": round(1000 * kept["seconds"] / steps, 3),
    }


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
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stagger", type=float, default=45)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    result: dict[str, Any] = {"machine": machine(), "runs": []}
    if arguments.out.exists():
        result["runs"] = json.loads(arguments.out.read_text())["runs"]
    batches = [int(size) for size in arguments.batches.split(",")]
    done = {(run["mode"], run["budget"], run["batch"]) for run in result["runs"]}
    children: dict[str, Child] = {}
    try:
        for name in arguments.modes.split(","):
            changes = {"cuda_graph_max_bs_decode": max(batches), "max_running_requests": max(batches)}
            fields = engine_arguments(arguments.model, arguments.drafter, name, **changes)
            children[name] = Child(name, fields, arguments.logs / f"{name}.log")
            if len(children) == 1:
                time.sleep(arguments.stagger)  # the others then find its compiled kernels
        for name, child in children.items():
            child.wait_ready(deadline - time.monotonic())
            mode, _, budget = name.partition("-") if name.startswith("ddtree") else (name, "", "")
            before: dict[str, float] = {}
            for batch in batches:
                key = (mode, int(budget or 0), batch)
                if key in done or deadline - time.monotonic() < 10:
                    continue
                left = deadline - time.monotonic()
                run = dict(zip(("mode", "budget", "batch"), key, strict=True))
                run |= measure(child, batch, arguments.tokens, arguments.repeats, left)
                after = fallbacks(child, left)
                run["fallbacks"] = {reason: count - before.get(reason, 0) for reason, count in after.items()}
                run["fallbacks"] = sum(run["fallbacks"].values())
                before = after
                result["runs"].append(run)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
                print(json.dumps(run), flush=True)
    finally:
        for child in children.values():
            child.close()


if __name__ == "__main__":
    main()
