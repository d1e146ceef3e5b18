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


def step_phases(kernels: list[Kernel]) -> dict[str, float]:
    """Median milliseconds of each phase over the complete steps, and their number as "steps".

    Raises ValueError when the trace has no complete step.
    """
    starts = [index for index, (name, _, _) in enumerate(kernels) if name.startswith("_prepare")]
    spans: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for begin, following in pairwise(starts):
        step = kernels[begin:following]
        marks = {mark: [k for k in step if k[0].startswith(mark)] for mark in ("_build", "_mask", "_accept")}
        if any(len(found) != 1 for found in marks.values()):
            continue  # a prefill came in between, or the step committed outside the graph
        build, mask, accept = (marks[mark][0] for mark in ("_build", "_mask", "_accept"))
        last = max(end for _, _, end in step)
        borders = (step[0][1], build[1], mask[2], accept[1], last, kernels[following][1])
        for phase, start, end in zip(PHASES, borders[:-1], borders[1:], strict=True):
            spans[phase].append((end - start) / 1000)
    if not spans["draft"]:
        raise ValueError("no complete step in the trace")
    return {**{phase: round(median(values), 4) for phase, values in spans.items()}, "steps": len(spans["draft"])}
