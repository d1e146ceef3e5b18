"""Series that other processes wrote to files, as they appear on this process's page."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from serve_app.multiprocess import ENV_DIRECTORY, EngineFiles, _packed, fold_ended

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


@pytest.mark.parametrize("name", ["counter_{}.db", "histogram_{}.db", "gauge_livesum_{}.db", "counter_ended.db"])
@pytest.mark.parametrize(
    "damage", [b"", b"\0", b"\xff" * 200, b"\x40\0\0\0\0\0\0\0\x08\0\0\0notjson!", b"\x10\0\0\0\0\0\0\0\x04\0\0\0"]
)
@pytest.mark.parametrize("alive", [True, False])
def test_a_damaged_file_costs_its_own_series_only(
    tmp_path: Path, write: Callable[[], subprocess.Popen[str]], name: str, damage: bytes, alive: bool
) -> None:
    end(write())
    # The parent of this process lives as long as this one.
    (tmp_path / name.format(os.getppid() if alive else 2**22 + 1)).write_bytes(damage)
    for _ in range(2):
        assert value(tmp_path, "ddtree_verify_steps_total") == 1


def test_a_full_disk_costs_no_counts(
    tmp_path: Path, write: Callable[[], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for _ in range(2):
        end(write())
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        for _ in range(2):
            assert value(tmp_path, "ddtree_verify_steps_total") == 2
    assert value(tmp_path, "ddtree_verify_steps_total") == 2


def test_the_folded_file_is_as_prometheus_client_writes_it(tmp_path: Path) -> None:
    values = {mmap_key(f"n{'x' * i}", "n", ["l"], ["é"], "H."): i / 3 for i in range(9)}
    theirs = MmapedDict(str(tmp_path / "theirs.db"))
    for key, number in values.items():
        theirs.write_value(key, number, 0.0)
    theirs.close()
    packed = _packed(values)
    written = (tmp_path / "theirs.db").read_bytes()
    assert written[: len(packed)] == packed and not any(written[len(packed) :])
