"""Every kernel compiles for the GPU it is meant for, in the specialisations that occur; needs Triton but no GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

COMPILE = """
import json, sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
for module, name, types, constants, warps in json.loads(sys.argv[1]):
    kernel = getattr(import_module("serve_app.sglang_plugin." + module), name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*i64") for n in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(k),): v for k, v in constants.items()})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(json.dumps([name, built.asm["ptx"].count("bar.sync")]))
"""
I32 = dict.fromkeys(
    ["stride", "vocab", "first_id", "k", "chunks", "parts", "root_stride", "width", "depths", "path", "capacity",
     "length", "mask_token", "block", "batch"], "i32",
)  # fmt: skip
FLOATS = dict.fromkeys(["values", "peaks", "sums", "best_values", "best_peak", "best_sum", "logps"], "*fp32")
TREE = {**I32, **FLOATS, "FLOOR": "fp32"}
COMMIT = {**I32, "enabled": "*i32", "lengths": "*i32"}
TABLE = {**I32, "table": "*i32", "draft_kv_indptr": "*i32", "verify_kv_indptr": "*i32"}
PLAN = {"ROWS": 32, "PLAN": True, "SPLITS": 16, "CHUNK": 256}
KERNELS = [
    ("topk", "_slice_topk", {**I32, **FLOATS, "logits": "*bf16"}, {"CHUNK": 2048}, 4),
    ("topk", "_slice_topk", {**I32, **FLOATS, "logits": "*fp16"}, {"CHUNK": 2048, "k": 1}, 4),
    ("topk", "_merge_topk", {**I32, **FLOATS}, {"CANDIDATES": 256, "PARTS": 32, "NORMALISE": True}, 4),
    ("topk", "_merge_topk", {**I32, **FLOATS}, {"CANDIDATES": 16, "PARTS": 1, "NORMALISE": False, "parts": 1}, 4),
    ("tree", "_build", TREE, {"LANES": 64, "SPINE": 0}, 1),
    ("tree", "_build", {**TREE, "starts": "*i32"}, {"LANES": 128, "SPINE": 1}, 1),
    ("tree", "_build", TREE, {"LANES": 16, "k": 1, "SPINE": 0}, 1),
    ("tree", "_mask", {**I32, "mask": "*u8"}, {"LANES": 64, "REQUESTS": 1, "WHOLE": False, "CHUNK": 1024}, 1),
    (
        "tree",
        "_mask",
        {**I32, "mask": "*i1", "starts": "*i32"},
        {"LANES": 128, "REQUESTS": 64, "WHOLE": True, "CHUNK": 1024},
        1,
    ),
    ("commit", "_accept", COMMIT, {"LANES": 64, "PATH": 16, "HEED": True}, 1),
    ("commit", "_accept", {**COMMIT, "starts": "*i32"}, {"LANES": 16, "PATH": 16, "HEED": False, "capacity": 1}, 1),
    ("commit", "_move", COMMIT, {"PATH": 16, "TILE": 128}, 4),
    ("prepare", "_prepare", TABLE, {"COLUMNS": 64, **PLAN}, 2),
    ("prepare", "_prepare", {**TABLE, "roots": "*i32"}, {"COLUMNS": 16, "mask_token": 1, **PLAN, "ROWS": 1}, 2),
    ("prepare", "_prepare", {**TABLE, "starts": "*i32"}, {"COLUMNS": 16, **PLAN, "PLAN": False, "ROWS": 1}, 2),
]


def test_kernels_compile_and_the_move_waits_between_reading_and_writing() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(KERNELS)], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    barriers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _ in barriers] == [kernel[1] for kernel in KERNELS]
    assert dict(barriers)["_move"] >= 1
