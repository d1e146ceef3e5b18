"""The model cache: where it is, and how a directory gets into it whole or not at all.

Root: `$DDTREE_CACHE`, else `$XDG_CACHE_HOME/ddtree-serve`, else `~/.cache/ddtree-serve`. Under it:

    models/NAME/       a converted model, with the size and SHA-256 of every file in its manifest.json
    downloads/         packages as fetched; kept, so that a repair or an interrupted conversion needs no network
    hub/               snapshots of Hugging Face repositories, in that library's own layout
    tmp/NAME/, locks/  work in progress and who does it

Everything may be deleted at any time when nothing runs. Knows nothing about model formats.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serve_app.errors import ModelFetchError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
ABSENT = "not in the cache"
LOCK_TIMEOUT_S = 1800.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


def cache_root(override: str | os.PathLike[str] | None = None) -> Path:
    """The cache directory, absolute; not created.

    Raises:
        ModelFetchError: no home directory to put it in.
    """
    chosen = override or os.environ.get("DDTREE_CACHE")
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        # The XDG specification says to ignore relative paths.
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "ddtree-serve"
    except RuntimeError:
        raise ModelFetchError("no home directory for the model cache; set DDTREE_CACHE") from None


@contextmanager
def clear_errors(doing: str, root: Path) -> Iterator[None]:
    """Turn an OSError into a ModelFetchError that says what to do about it."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        if error.errno in _FULL:
            text = f"no space left in {root} (or over a quota or file size limit); free some or set DDTREE_CACHE"
        elif error.errno in _DENIED:
            text = f"no permission to write {where}; fix its permissions or set DDTREE_CACHE"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            text = f"the model cache {root} is not a directory, or a file is in its way: {where}"
        else:
            text = f"{where}: {error.strerror or error}"
        raise ModelFetchError(f"cannot {doing}: {text}") from error


@contextmanager
def workspace(root: Path, name: str) -> Iterator[Path]:
    """Hold the lock of `name` and yield an empty directory on the cache's file system, removed afterwards.

    The kernel drops the lock with its process, so whatever lies in `tmp/NAME` when the lock is ours was left by a
    process that died.

    Raises:
        ModelFetchError: another process held the lock for `LOCK_TIMEOUT_S`.
        OSError: as the file system says.
    """
    with _lock(root / "locks" / f"{name}.lock"):
        parent = root / "tmp" / name
        shutil.rmtree(parent, ignore_errors=True)
        parent.mkdir(parents=True, exist_ok=True)
        try:
            yield Path(tempfile.mkdtemp(dir=parent))
        finally:
            shutil.rmtree(parent, ignore_errors=True)


def sweep(root: Path, name: str) -> None:
    """Remove what a process that died left of `name`, unless another one is at work or the cache is read-only."""
    if (root / "tmp" / name).exists():
        with suppress(OSError, ModelFetchError), _lock(root / "locks" / f"{name}.lock", timeout_s=0):
            shutil.rmtree(root / "tmp" / name, ignore_errors=True)


@contextmanager
def _lock(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    timeout_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as handle:
        deadline = time.monotonic() + timeout_s
        waiting = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ModelFetchError(f"another process has held {path} for {timeout_s:.0f} s") from None
                if not waiting:
                    log.info("waiting for another process that holds %s", path)
                    waiting = True
                time.sleep(0.1)
        yield


def write_manifest(directory: Path, about: dict[str, Any]) -> None:
    """Record `about` and the size and SHA-256 of every file in `directory`."""
    files = {p.name: {"size": p.stat().st_size, "sha256": sha256(p)} for p in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(json.dumps({**about, "files": files}, indent=1) + "\n")


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of `directory`, or None if there is none that can be read."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        sound = all(isinstance(f["size"], int) and isinstance(f["sha256"], str) for f in manifest["files"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if sound else None


def damage(directory: Path, about: dict[str, Any], *, full: bool = False) -> str | None:
    """What is wrong with a published directory, in a few words, or None if nothing is.

    Compares sizes, which costs one `stat` a file; `full` also hashes every file. `about` must equal what was given
    to `write_manifest`.
    """
    if not directory.is_dir():
        return ABSENT
    manifest = read_manifest(directory)
    if manifest is None:
        return f"{MANIFEST} is missing or damaged"
    if {key: value for key, value in manifest.items() if key != "files"} != about:
        return "made by another version"
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
        if full and sha256(path) != expected["sha256"]:
            return f"{name} has the wrong SHA-256"
    return None


def publish(built: Path, final: Path) -> None:
    """Put `built` in the place of `final`, durably: a crash leaves the old directory, none, or the whole new one."""
    for path in [*built.iterdir(), built]:
        _fsync(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    replaced = built.with_name(built.name + ".replaced")
    if final.exists():
        os.rename(final, replaced)
    try:
        os.rename(built, final)
    except OSError:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    _fsync(final.parent)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
