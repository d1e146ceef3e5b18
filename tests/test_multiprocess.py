"""Series that other processes wrote to files, as they appear on this process's page."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_app.multiprocess import ENV_DIRECTORY, EngineFiles, fold_ended

WRITER = """
import sys
from prometheus_client import CollectorRegistry
from serve_app.metrics import EngineMetrics
metrics = EngineMetrics(CollectorRegistry(), "m", 4, ["no_cuda"])
metrics.verify_step(accepted=1, emitted=2, committed=2, nodes=3)
metrics.load(running=5, queued=0, kv_tokens=0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[], subprocess.Popen[str]]:
    """Starts a process that counts one verify step and lives until its input ends."""
    environ = {**os.environ, ENV_DIRECTORY: str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", WRITER], env=environ, **pipes)  # type: ignore[call-overload]
        assert process.stdout.readline() == "ready\n"
        return process

    return start


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=60)


def value(directory: Path, name: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(EngineFiles({ENV_DIRECTORY: str(directory)}))
    return registry.get_sample_value(name, {"model": "m"})


def test_a_living_process_is_on_the_page(tmp_path: Path, write: Callable[[], subprocess.Popen[str]]) -> None:
    process = write()
    try:
        assert value(tmp_path, "ddtree_verify_steps_total") == 1
        assert value(tmp_path, "ddtree_acceptance_length_sum") == 2
        assert value(tmp_path, "ddtree_running_requests") == 5
    finally:
        end(process)


def test_counters_outlive_their_process_and_gauges_do_not(
    tmp_path: Path, write: Callable[[], subprocess.Popen[str]]
) -> None:
    for _ in range(2):
        end(write())
    assert value(tmp_path, "ddtree_verify_steps_total") == 2
    assert value(tmp_path, "ddtree_acceptance_length_count") == 2
    assert value(tmp_path, "ddtree_running_requests") is None


def test_files_of_ended_processes_do_not_pile_up(tmp_path: Path, write: Callable[[], subprocess.Popen[str]]) -> None:
    for _ in range(2):
        end(write())
        fold_ended(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["counter_ended.db", "histogram_ended.db"]


@pytest.mark.parametrize("environ", [{}, {ENV_DIRECTORY: "/nonexistent"}])
def test_without_a_directory_there_is_nothing(environ: dict[str, str]) -> None:
    registry = CollectorRegistry()
    registry.register(EngineFiles(environ))
    assert generate_latest(registry) == b""
