"""Phases of a step from a trace that looks like SGLang's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.sglang_trace import busy, read_kernels, step_phases

# Names and durations in µs of one step's kernels, back to back.
STEP = (
    ("_prepare", 2), ("gemm", 30), ("_slice_topk", 8), ("_build", 10), ("_mask", 4), ("flash", 100), ("_accept", 5),
    ("_move", 6), ("gemm", 9),
)  # fmt: skip


def trace(path: Path, steps: int, gap: float) -> None:
    events, now = [{"name": "cudaGraphLaunch", "cat": "cuda_runtime", "ts": 0, "dur": 9}], 0.0
    for _ in range(steps):
        for name, duration in STEP:
            events.append({"name": name, "cat": "kernel", "ts": now, "dur": duration})
            now += duration
        now += gap
    with gzip.open(path / "1-TP-0.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events[::-1]}, file)


def test_phases_are_the_time_between_the_steps_own_kernels(tmp_path: Path) -> None:
    trace(tmp_path, 4, gap=50)
    found = step_phases(read_kernels(tmp_path))
    assert found == {"draft": 0.04, "build": 0.014, "verify": 0.1, "commit": 0.02, "wait": 0.05, "steps": 3}


def test_busy_time_is_that_of_the_kernels(tmp_path: Path) -> None:
    trace(tmp_path, 4, gap=50)
    assert busy(read_kernels(tmp_path)) == {"draft": 0.04, "build": 0.014, "verify": 0.1, "commit": 0.02}


def test_a_step_with_a_prefill_in_it_is_left_out(tmp_path: Path) -> None:
    trace(tmp_path, 4, gap=0)
    kernels = read_kernels(tmp_path)
    second = [index for index, kernel in enumerate(kernels) if kernel[0] == "_accept"][1]
    del kernels[second]
    assert step_phases(kernels)["steps"] == 2


def test_no_step_is_an_error(tmp_path: Path) -> None:
    trace(tmp_path, 1, gap=0)
    with pytest.raises(ValueError, match="no complete step"):
        step_phases(read_kernels(tmp_path))
    with pytest.raises(FileNotFoundError):
        read_kernels(tmp_path / "missing")
