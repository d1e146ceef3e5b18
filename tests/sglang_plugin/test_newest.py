"""A newer release of SGLang than the supported one: everything of ours refuses it, and leaves nothing half in place.

`make test-sglang` names a directory with the newest release in SGLANG_NEWEST; it is imported in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_app.sglang_plugin.plugin import SUPPORTED
from tests.conftest import ROOT
from tests.sglang_plugin.conftest import CPU_KERNELS
from tests.sglang_plugin.test_resolution import DRAFTER, TARGET

NEWEST = os.environ.get("SGLANG_NEWEST")
pytestmark = pytest.mark.skipif(NEWEST is None, reason="the newest SGLang is not at hand: make test-sglang")

PROGRAM = """
import asyncio, json, sys
from importlib.metadata import version

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from serve_app.config import load_config
from serve_app.engines.sglang.engine import SglangEngine

target, drafter = sys.argv[1:]

def error(call):
    try:
        call()
    except Exception as failure:
        return [type(failure).__name__, str(failure), getattr(failure, "param", None)]

def serve():
    ServerArgs(
        model_path=target, speculative_draft_model_path=drafter, speculative_algorithm="DDTREE", device="cuda"
    ).resolve_once()

def engine(**model):
    tree = {"model": {"source": target, "device": "cpu", **model}, "engine": {"kind": "sglang"}}
    return error(lambda: asyncio.run(SglangEngine(load_config(tree, use_env=False)).start()))

load_plugins()
print("SEEN", json.dumps({
    "version": version("sglang"), "hooks": sorted(HookRegistry._hooks),
    "algorithm": error(lambda: SpeculativeAlgorithm.from_string("DDTREE")), "server": error(serve),
    "engine": engine(drafter=None), "drafting": engine(drafter=drafter),
}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with the newest release saw; `log` is its standard error."""
    base = tmp_path_factory.mktemp("newest")
    for name, config in (("target", TARGET), ("drafter", DRAFTER)):
        (base / name).mkdir()
        (base / name / "config.json").write_text(json.dumps(config))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(NEWEST), str(ROOT), str(CPU_KERNELS)))}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(base / "target"), str(base / "drafter")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("SEEN "))
    return {**found, "log": done.stderr}


def test_the_plugin_refuses_it_with_both_releases(seen: dict[str, Any]) -> None:
    assert seen["version"] not in SUPPORTED and Path(str(NEWEST), "sglang").is_dir()
    assert f"supports sglang {SUPPORTED[0]}, not {seen['version']}" in seen["log"]


def test_nothing_of_the_plugin_is_in_place(seen: dict[str, Any]) -> None:
    assert seen["hooks"] == []
    assert seen["algorithm"] == ["ValueError", "Unknown speculative algorithm name: DDTREE", None]


def test_a_server_that_asks_for_trees_does_not_start(seen: dict[str, Any]) -> None:
    kind, message, _ = seen["server"]
    assert kind == "ValueError" and "DDTREE" in message


@pytest.mark.parametrize("asked", ["engine", "drafting"])
def test_the_engine_refuses_it_with_a_way_out(seen: dict[str, Any], asked: str) -> None:
    kind, message, param = seen[asked]
    assert (kind, param) == ("ConfigError", "engine.kind")
    assert seen["version"] in message and "[sglang]" in message
