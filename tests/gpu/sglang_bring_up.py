"""DDTREE's checks on a GPU in a fixed time, in order of importance, each result written as it comes.

Prints one JSON object and writes it to OUT/bring_up.json; the engines' logs lie beside it. A run cut short tells how
far it came. `test_sglang_ddtree.py` runs the same and asserts.

Usage: sglang_bring_up.py MODEL DRAFTER OUT [--seconds 480] [--prompts 100] [--tokens 128] [--modes ar,ddtree,…]

What this program does not do: assert.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.sglang_fleet import chat_prompts as prompts
from tests.gpu import checks
from tests.gpu.drafter_parity import parity
from tests.gpu.fleet import Fleet

MODES = (
    "ar,soak,ddtree,dflash,chain,eager,page16,wide,prompts,full,dflash-full,plain,"
    "deterministic,bf16,flashinfer,flashinfer16,mla-ar,mla"
)
SEVERAL_GPUS = "mla-ranks-ar,mla-ranks,ranks-ar,ranks"
IDENTITY = (
    *("ddtree", "dflash", "dflash-full", "chain", "page16", "wide", "prompts", "full", "plain"),
    *("deterministic", "bf16", "flashinfer", "flashinfer16"),
)  # fmt: skip
CONTEXT = 2048  # of `fleet`'s engines
LONG = (1, 20, 200, 700)  # tokens of the soak's answers: most of its time is to be verify steps, not prompts


def run(fleet: Fleet) -> None:
    """Every check whose engines were started."""
    fleet.start()
    expected: list[dict[str, Any]] = []
    count, tokens = fleet.arguments.prompts, fleet.arguments.tokens
    names = fleet.names()
    if "ar" in names:
        fleet.stage("ar", lambda: expected.extend(fleet.greedy("ar", prompts(count), tokens)) or len(expected))
        if not expected:
            return  # nothing to compare with
        lengths = {number: len(output["ids"]) for number, output in enumerate(expected) if len(output["ids"]) > 90}
        fleet.report["ending"] = [number for number, length in lengths.items() if length < tokens][:8]
    if "soak" in names:
        fleet.stage("soak start", lambda: fleet.child("soak").start_s)
    with ThreadPoolExecutor(1) as beside:
        soak = beside.submit(_soak, fleet) if "soak" in names else None
        _check(fleet, expected)
        if soak is not None:
            fleet.stage("soak", lambda: checks.left_behind(fleet, "soak", soak.result(max(1.0, fleet.left()))))


def _soak(fleet: Fleet) -> dict[str, Any]:
    return checks.send_traffic(fleet, "soak", fleet.arguments.soak, 3, LONG)


def _check(fleet: Fleet, expected: list[dict[str, Any]]) -> None:
    """Everything but the soak, which runs beside it."""
    names, count = fleet.names(), fleet.arguments.prompts
    if "ddtree" in names:
        fleet.stage("ddtree alone", lambda: checks.identity(fleet, "ddtree", expected[:24], one_by_one=True))
        fleet.stage("ddtree steady counters", lambda: checks.counters(fleet, "ddtree"))
        fleet.stage("ddtree batch sizes", lambda: checks.batch_sizes(fleet, "ddtree", expected[:32]))
        fleet.stage("ddtree counters", lambda: checks.counters(fleet, "ddtree"))
    for name in IDENTITY:
        if name in names:
            fleet.stage(f"{name} identity", lambda n=name: checks.identity(fleet, n, expected, one_by_one=False))
    if "eager" in names:
        if "ddtree" in names:
            fleet.stage("graph and eager", lambda: checks.graph_and_eager(fleet, "ddtree", "eager", 4, 64))
        fleet.stage("eager identity", lambda: checks.identity(fleet, "eager", expected[:16], one_by_one=False))
        fleet.stage("eager counters", lambda: checks.counters(fleet, "eager"))
        paths = fleet.out / "drafts.pt", fleet.arguments.drafter, fleet.arguments.model
        fleet.stage("drafter parity", lambda: parity(*paths))
    if "mla" in names:
        fleet.stage("mla identity", lambda: checks.mla(fleet, "mla", "mla-ar"))
    if "prompts" in names:
        apart = tuple(name for name in ("ar", "ddtree", "prompts", "full") if name in names)
        fleet.stage("first tokens", lambda: checks.first_tokens(fleet, apart))
    for name in ("ddtree", "page16", "prompts", "full"):
        if name in names:
            fleet.stage(f"{name} context end", lambda n=name: checks.context_end(fleet, n, CONTEXT))
            fleet.stage(f"{name} prefix cache", lambda n=name: checks.prefix_cache(fleet, n))
    if "ddtree" in names:
        fleet.stage("logprobs", lambda: checks.logprobs(fleet, "ddtree"))
        fleet.stage("limits", lambda: checks.limits(fleet, "ddtree"))
        fleet.stage("grammars", lambda: checks.grammars(fleet, "ddtree"))
        fleet.stage("law", lambda: checks.law(fleet, "ddtree", 3000))
    for name in ("ddtree", "page16", "prompts", "full", "flashinfer16"):
        if name in names:
            fleet.stage(f"{name} traffic", lambda n=name: checks.traffic(fleet, n, 8, workers=14))
    if "mla-ranks" in names:
        fleet.stage("mla ranks", lambda: checks.mla(fleet, "mla-ranks", "mla-ranks-ar"))
    if "ranks" in names:
        fleet.stage("ranks", lambda: checks.several_ranks(fleet, "ranks", "ranks-ar", count))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "drafter", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--soak", type=float, default=90, help="seconds of mixed traffic beside everything else")
    parser.add_argument("--stagger", type=float, default=0, help="seconds that the first engine starts ahead")
    parser.add_argument("--ready", type=float, default=300, help="seconds after which an engine that is not up failed")
    parser.add_argument("--modes", default=MODES)
    fleet = Fleet(parser.parse_args())
    try:
        run(fleet)
    finally:
        fleet.close()
    print(json.dumps(fleet.report))


if __name__ == "__main__":
    main()
