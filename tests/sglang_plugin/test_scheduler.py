"""Whole answers through SGLang's own scheduler, overlap on: its loop, its books, its graph runners and our worker.

In processes of their own, in Triton's interpreter, with closures for graphs (`benchmarks/sglang_cpu.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import ROOT, require_sglang
from tests.sglang_plugin.conftest import DEVICE

WAYS = {
    "ar": {},
    "direct": {},
    "prepared by SGLang": {"SGLANG_DDTREE_DIRECT_REPLAY": "0"},
    "planned by SGLang": {"SGLANG_DDTREE_PLAN_IN_STEP": "0"},
    "committed after the graph": {"SGLANG_DDTREE_COMMIT_IN_GRAPH": "0"},
}


def answers(way: str) -> dict[str, Any]:
    mode = "ar" if way == "ar" else "ddtree-16"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sglang_plugin.emulated", mode],
        env={**os.environ, "TRITON_INTERPRET": "1", **WAYS[way]}, cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def ways() -> dict[str, dict[str, Any]]:
    require_sglang()
    if DEVICE != "cpu":
        pytest.skip("a CPU in a GPU's place")
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(WAYS, pool.map(answers, WAYS), strict=True))


def test_every_way_of_a_step_answers_as_decoding_does(ways: dict[str, dict[str, Any]]) -> None:
    expected = ways["ar"]["answers"]
    assert [len(ids) for ids in expected.values()] == [14, 11, 12, 9]
    for way in WAYS:
        assert ways[way]["answers"] == expected, way
        assert ways[way]["free"] == 2048, f"{way}: every KV slot is free again"


def test_every_way_takes_the_same_steps(ways: dict[str, dict[str, Any]]) -> None:
    steps = ways["prepared by SGLang"]["steps"]
    assert sum(steps.values()) < sum(len(ids) for ids in ways["ar"]["answers"].values()), "drafts were accepted"
    assert all(ways[way]["steps"] == steps for way in WAYS if way != "ar")


def test_steps_are_counted_by_how_they_were_prepared(ways: dict[str, dict[str, Any]]) -> None:
    def prepared(way: str) -> dict[str, float]:
        name = "ddtree_step_preparations_total,"
        return {key.removeprefix(name): n for key, n in ways[way]["series"].items() if key.startswith(name)}

    direct = prepared("direct")
    assert direct.keys() == {"direct", "bs_exceeds_max"}, "four requests run at a time, three are captured"
    assert direct["direct"] > direct["bs_exceeds_max"] > 0
    assert prepared("prepared by SGLang").keys() == {"switched_off"}
    assert prepared("planned by SGLang").keys() == {"not_planned_in_step"}
    assert prepared("committed after the graph").keys() == {"not_in_graphs"}


def test_a_direct_replay_is_counted_as_sglangs_is(ways: dict[str, dict[str, Any]]) -> None:
    """Nothing is owed to the series once all requests have ended."""
    ours, theirs = ({**ways[way]["series"]} for way in ("direct", "prepared by SGLang"))
    for series in (ours, theirs):
        for key in [key for key in series if key.startswith("ddtree_step_preparations")]:
            del series[key]
    assert ours == theirs
    assert ours["ddtree_verify_steps_total"] == sum(ways["direct"]["steps"].values())
    assert ours["ddtree_graph_replays_total,draft"] == ours["ddtree_graph_replays_total,target"] > 0
