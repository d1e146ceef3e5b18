"""DDTREE against AR and DFLASH on one GPU, all in one run: engines start side by side and take turns.

    python -m benchmarks.sglang_gpu MODEL DRAFTER [--out docs/results/sglang_gpu.json] [--seconds 540] [--modes …]
    python -m benchmarks.sglang_gpu MODEL DRAFTER --tp 2       several ranks; heads are added where they do not shard
    python -m benchmarks.sglang_gpu MODEL --random [--tp 8]    a made-up model of 7.4 B weights, MODEL for its tokenizer

A mode may be followed by switches of its own: `--modes ddtree-64,ddtree-64:DIRECT_REPLAY=0:PLAN_IN_STEP=0` compares
with and without. Those in capitals are variables of the environment, less their common `SGLANG_DDTREE_`; others are
SGLang's server arguments: `dflash:attention_backend=flashinfer`, or `ddtree-15:speculative_eagle_topk=1`, which is a
chain. A run names its "switches".

Writes after every measurement, and skips what the output file already has, so that a run cut short is continued by the
same command. A run is one mode, budget and batch size: greedy, `--tokens` each, the same 32 chat prompts for all. The
modes take turns at parts of the prompts: the host is shared, and a slow minute of it must not fall on one mode alone.
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

from benchmarks import random_llama
from benchmarks.sglang_fleet import Child, chat_prompts, engine_arguments
from benchmarks.sglang_trace import busy, read_kernels, step_phases
from benchmarks.sharded import write_pair

MODES = "ar,dflash,ddtree-8,ddtree-16,ddtree-32,ddtree-64,ar-eager"
BATCHES = "1,2,4,8,16,32"


def machine() -> dict[str, Any]:
    """What the numbers hold for."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    trees = "spine first" if os.environ.get("SGLANG_DDTREE_SPINE_FIRST", "0") != "0" else "best first"
    return {"gpu": gpus[0], "gpus": len(gpus), "trees": trees} | {
        name: version(name) for name in ("sglang", "torch", "triton")
    }


def measure(child: Child, groups: list[list[str]], tokens: int, left: float) -> dict[str, float]:
    """Groups of prompts one after the other, `tokens` tokens for each prompt: seconds, tokens, steps."""
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    timings = [child.ask("time", left, prompts=group, params=params) for group in groups]
    sums = {key: sum(timing[key] for timing in timings) for key in ("seconds", "tokens", "verify_steps")}
    # A group ends with its slowest request; without drafts every request takes a step per token.
    return sums | {"steps": sum(timing["longest_steps"] or tokens for timing in timings)}


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
    parser.add_argument("drafter", nargs="?")
    parser.add_argument("--random", action="store_true", help="`random_llama` in MODEL's place: step times only")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tp", type=int, default=1, help="ranks of every engine")
    parser.add_argument("--out", type=Path, default=Path("docs/results/sglang_gpu.json"))
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3, help="turns that each mode takes at a batch size")
    parser.add_argument("--stagger", type=float, default=45)
    arguments = parser.parse_args()
    if (arguments.drafter is None) != arguments.random:
        parser.error("give a drafter, or --random")
    deadline = time.monotonic() + arguments.seconds
    result: dict[str, Any] = {"machine": machine(), "runs": [], "phases_ms": {}, "graph_state": {}}
    result["machine"] |= {"tp": arguments.tp, "weights": "random" if arguments.random else "trained"}
    result["machine"]["dtype"] = arguments.dtype
    target, drafter, more = arguments.model, arguments.drafter, {"tp_size": arguments.tp}
    if arguments.tp > 1:
        # It can use NVLink multicast, which machines may have switched off for PyTorch and NCCL but not for FlashInfer.
        more["enforce_disable_flashinfer_allreduce_fusion"] = True
    if arguments.random:
        target, drafter = map(str, random_llama.write(arguments.logs / "random", Path(arguments.model)))
        more |= {"load_format": "dummy", "speculative_draft_load_format": "dummy", "context_length": 4096}
    elif arguments.tp > 1:
        target, drafter = map(str, write_pair(Path(target), Path(drafter), arguments.logs / "sharded", arguments.tp))
    if arguments.out.exists():
        result |= json.loads(arguments.out.read_text())
    batches = [int(size) for size in arguments.batches.split(",")]
    children: dict[str, Child] = {}
    try:
        for name in arguments.modes.split(","):
            changes = {"cuda_graph_max_bs_decode": max(batches), "max_running_requests": max(batches)}
            changes |= {"dtype": arguments.dtype} | more | server_arguments(name)
            fields = engine_arguments(target, drafter, name.partition(":")[0], **changes)
            children[name] = Child(name, fields, arguments.logs / f"{name}.log", env=switches(name))
            if len(children) == 1:
                time.sleep(arguments.stagger)  # the others then find its compiled kernels
        for name, child in list(children.items()):
            try:
                child.wait_ready(deadline - time.monotonic())
            except RuntimeError as error:
                give_up(result, children, name, error)
        save(result, arguments.out)
        for batch in batches:
            rounds(result, children, batch, arguments, deadline)
        for name, child in children.items():
            result["graph_state"][name] = graph_state(arguments.logs / f"{name}.log")
            if name.startswith("ddtree") and name not in result["phases_ms"] and deadline - time.monotonic() > 15:
                folder, left = arguments.logs / f"trace-{name}", deadline - time.monotonic()
                result["phases_ms"][name] = {
                    str(size): phases(child, size, folder.with_name(f"{folder.name}-{size}"), left) for size in (1, 8)
                }
            save(result, arguments.out)
    finally:
        for child in children.values():
            child.close()


def rounds(
    result: dict[str, Any], children: dict[str, Child], batch: int, arguments: argparse.Namespace, deadline: float
) -> None:
    """One batch size: the prompts in `--rounds` parts, every mode taking its turn at each part."""
    done = {(run["mode"], run["budget"], run["batch"], run.get("switches", "")) for run in result["runs"]}
    keys = {name: key(name, batch) for name in children if key(name, batch) not in done}
    prompts = chat_prompts(200)[: max(32, batch)]
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    count = min(arguments.rounds, len(groups))
    before = {name: fallbacks(children[name], deadline - time.monotonic()) for name in keys}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in keys}
    for turn in range(count):
        for name in list(keys):
            left = deadline - time.monotonic()
            if left < 10:
                return
            # Eager decoding is an order of magnitude slower and its step time steady.
            eager = name == "ar-eager"
            tokens, taken = (24, groups[:1]) if eager else (arguments.tokens, groups[turn::count])
            try:
                if turn == 0:
                    measure(children[name], taken[:1], tokens, left)
                if turn == 0 or not eager:
                    parts[name].append(measure(children[name], taken, tokens, left))
            except RuntimeError as error:
                give_up(result, children, name, error)
                del keys[name]
    for name, (mode, budget, _, switched) in keys.items():
        sums = {field: sum(part[field] for part in parts[name]) for field in parts[name][0]}
        after = fallbacks(children[name], deadline - time.monotonic())
        run = {
            "mode": mode, "budget": budget, "batch": batch,
            "tok_s": round(sums["tokens"] / sums["seconds"], 1),
            "tok_s_per_request": round(sums["tokens"] / sums["seconds"] / batch, 1),
            "tok_s_of_rounds": [round(part["tokens"] / part["seconds"], 1) for part in parts[name]],
            "acceptance_length": round(sums["tokens"] / sums["verify_steps"], 3) if sums["verify_steps"] else 1.0,
            "step_ms": round(1000 * sums["seconds"] / sums["steps"], 3),
            "fallbacks": sum(after.values()) - sum(before[name].values()),
        }  # fmt: skip
        result["runs"].append(run | ({"switches": switched} if switched else {}))
        print(json.dumps(run), flush=True)
    save(result, arguments.out)


def give_up(result: dict[str, Any], children: dict[str, Child], name: str, error: RuntimeError) -> None:
    """One mode's failure must not cost the others their numbers."""
    result.setdefault("failed", {})[name] = str(error)[-2000:]
    print(name, error, file=sys.stderr)
    children.pop(name).close()


def key(name: str, batch: int) -> tuple[str, int, int, str]:
    """Mode, budget, batch size and switches of a run of the engine `name`."""
    name, _, switched = name.partition(":")
    mode, _, budget = name.partition("-") if name.startswith("ddtree") else (name, "", "")
    return mode, int(budget or 0), batch, switched


def switches(name: str) -> dict[str, str]:
    """The environment that the engine `name` asks for."""
    return {f"SGLANG_DDTREE_{variable}": value for variable, value in _pairs(name) if variable.isupper()}


def server_arguments(name: str) -> dict[str, Any]:
    """The server arguments that the engine `name` asks for; values are JSON where they can be read as such."""
    found: dict[str, Any] = {}
    for field, value in _pairs(name):
        if not field.isupper():
            try:
                found[field] = json.loads(value)
            except ValueError:
                found[field] = value
    return found


def _pairs(name: str) -> list[tuple[str, str]]:
    return [(field, value) for field, _, value in (pair.partition("=") for pair in name.split(":")[1:])]


def save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
