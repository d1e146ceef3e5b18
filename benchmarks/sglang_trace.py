"""Where a DDTREE step's time goes, from a kernel trace of replayed graphs: draft, tree build, verify, commit, waiting.

The step's own kernels mark the borders, so nothing is added to the product for measuring: `_prepare` begins a step, the
drafter and its top-k run until `_build`, build and mask end with `_mask`, the target's forward runs until `_accept`,
acceptance, KV move and the drafter's new context until the step's last kernel.

What this module does not do: record traces (SGLang's profiler does).
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

MARKS = ("_build", "_mask", "_accept")
PHASES = ("draft", "build", "verify", "commit", "wait")
Kernel = tuple[str, float, float]


def read_kernels(folder: Path) -> list[Kernel]:
    """(name, start µs, end µs) of every kernel of the newest trace in `folder`, by start. Raises FileNotFoundError."""
    traces = sorted(folder.glob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise FileNotFoundError(f"no trace in {folder}")
    with gzip.open(traces[-1], "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    kernels = [
        (e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") == "kernel"
    ]
    return sorted(kernels, key=lambda kernel: kernel[1])


def steps(kernels: list[Kernel]) -> list[list[Kernel]]:
    """The complete steps, each with the first kernel of the next one behind its own.

    Left out are those in which a prefill came in between, or that committed outside the graph.
    """
    starts = [index for index, (name, _, _) in enumerate(kernels) if name.startswith("_prepare")]
    cut = [kernels[begin : following + 1] for begin, following in pairwise(starts)]
    return [step for step in cut if all(sum(k[0].startswith(mark) for k in step) == 1 for mark in MARKS)]


def step_phases(kernels: list[Kernel]) -> dict[str, float]:
    """Median milliseconds of each phase over the complete steps, and their number as "steps".

    Raises ValueError when the trace has no complete step.
    """
    spans: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for *step, following in steps(kernels):
        build, mask, accept = (next(k for k in step if k[0].startswith(mark)) for mark in MARKS)
        last = max(end for _, _, end in step)
        borders = (step[0][1], build[1], mask[2], accept[1], last, following[1])
        for phase, start, end in zip(PHASES, borders[:-1], borders[1:], strict=True):
            spans[phase].append((end - start) / 1000)
    if not spans["draft"]:
        raise ValueError("no complete step in the trace")
    return {**{phase: round(median(values), 4) for phase, values in spans.items()}, "steps": len(spans["draft"])}


def busy(kernels: list[Kernel]) -> dict[str, float]:
    """Median milliseconds for which the kernels of each phase ran, the gaps between them left out."""
    ran: dict[str, list[float]] = {phase: [] for phase in PHASES[:-1]}
    for *step, _ in steps(kernels):
        sums, phase = dict.fromkeys(ran, 0.0), "draft"
        for name, start, end in step:
            phase = "build" if name.startswith("_build") else "commit" if name.startswith("_accept") else phase
            sums[phase] += (end - start) / 1000
            phase = "verify" if name.startswith("_mask") else phase
        for name, value in sums.items():
            ran[name].append(value)
    return {phase: round(median(values), 4) for phase, values in ran.items()}
