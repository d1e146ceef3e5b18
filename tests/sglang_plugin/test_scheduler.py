"""Whole answers through SGLang's own scheduler, overlap on: its loop, its books, its graph runners and our worker.

In processes of their own, in Triton's interpreter, with closures for graphs (`benchmarks/sglang_cpu.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.conftest import ROOT, require_sglang
from tests.sglang_plugin.conftest import DEVICE

pytestmark = pytest.mark.timeout(900)

DETERMINISTIC = {"enable_deterministic_inference": True}
SMALL_POOL = {"max_total_tokens": 64}
# Longer than the defaults, for pools that run full and masks that have been used.
LONG = [[1, "a", [5, 6, 7, 8], 30], [1, "b", [9, 4, 3], 20], [3, "c", [1] * 7, 25]]
# To the last token of the context, beside another.
END = {
    "block": 16,
    "context_length": 64,
    "asked": [[1, "a", [5, 6, 7, 8], 40], [1, "b", [9, 4, 3], 58], [2, "c", [1, 2, 4], 58]],
}
WAYS = {
    "ar": {},
    "direct": {},
    "prepared by SGLang": {"SGLANG_DDTREE_DIRECT_REPLAY": "0"},
    "planned by SGLang": {"SGLANG_DDTREE_PLAN_IN_STEP": "0"},
    "committed after the graph": {"SGLANG_DDTREE_COMMIT_IN_GRAPH": "0"},
}


@cache
def run(way: str) -> dict[str, Any]:
    return answers("ar" if way == "ar" else "ddtree-8", {}, WAYS[way])


def answers(mode: str, changes: dict[str, Any], variables: dict[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sglang_plugin.emulated", mode, json.dumps(changes)],
        env={**os.environ, "TRITON_INTERPRET": "1", **(variables or {})}, cwd=ROOT, capture_output=True, text=True,
        timeout=880,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(autouse=True)
def _on_a_cpu() -> None:
    require_sglang()
    if DEVICE != "cpu":
        pytest.skip("a CPU in a GPU's place")


def test_decoding_itself() -> None:
    assert [len(ids) for ids in run("ar")["answers"].values()] == [9, 5, 6]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ar"])
def test_every_way_of_a_step_answers_as_decoding_does(way: str) -> None:
    assert run(way)["answers"] == run("ar")["answers"]
    assert sum(run(way)["steps"].values()) < 17, "drafts were accepted: 20 tokens, three of them from prompts"
    assert run(way)["free"] == run("ar")["free"] == 2048, "every KV slot is free again"
    assert run(way)["steps"] == run("direct")["steps"]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ar"])
def test_steps_are_counted_by_how_they_were_prepared(way: str) -> None:
    name = "ddtree_step_preparations_total,"
    prepared = {key.removeprefix(name): n for key, n in run(way)["series"].items() if key.startswith(name)}
    reasons = {
        "direct": {"direct", "bs_exceeds_max"},  # three requests run at a time, two are captured
        "prepared by SGLang": {"switched_off"},
        "planned by SGLang": {"not_planned_in_step"},
        "committed after the graph": {"not_in_graphs"},
    }
    assert prepared.keys() == reasons[way]


def test_a_direct_replay_is_counted_as_sglangs_is() -> None:
    """And nothing is owed to the series once all requests have ended."""
    ours, theirs = (
        {key: n for key, n in run(way)["series"].items() if not key.startswith("ddtree_step_preparations")}
        for way in ("direct", "prepared by SGLang")
    )
    assert ours == theirs
    assert ours["ddtree_verify_steps_total"] == sum(run("direct")["steps"].values())
    assert ours["ddtree_graph_replays_total,draft"] == ours["ddtree_graph_replays_total,target"] > 0


@pytest.mark.parametrize("changes", [DETERMINISTIC, SMALL_POOL], ids=["deterministic", "small pool"])
def test_longer_answers_are_decodings_too(changes: dict[str, Any]) -> None:
    """Deterministic inference reads all of the mask, of trees before too; a small pool retracts requests."""
    asked = {**changes, "asked": LONG}
    decoded, drafted = answers("ar", asked), answers("ddtree-8", asked)
    assert drafted["answers"] == decoded["answers"]
    assert drafted["free"] == decoded["free"] == changes.get("max_total_tokens", 2048)


def test_a_chain_ends_with_the_context() -> None:
    """Its reservations ran into the next request's slots: some were lost, and the scheduler ended with an error."""
    ended = answers("dflash", END)
    assert [len(ids) for ids in ended["answers"].values()] == [40, 58, 58]
    assert ended["free"] == 2048
