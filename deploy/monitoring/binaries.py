"""Finds Prometheus and promtool: on the PATH, or unpacked from Debian's package into a cache, without root.

    python -m deploy.monitoring.binaries        # prints where they are, fetching them if need be

What this module does not do: install anything, or work without apt where nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "prometheus"  # holds promtool too, up to Debian 12
LATER_PACKAGE = "promtool"  # a package of its own since
TIMEOUT_S = 240


class Unavailable(RuntimeError):
    """The program is neither installed nor to be had; the message says what was tried."""


def cache() -> Path:
    base = os.environ.get("DDTREE_CACHE") or Path.home() / ".cache" / "ddtree-serve"
    return Path(base) / "debian"


def find(program: str, *, fetch: bool = True) -> Path:
    """Path of `prometheus` or `promtool`.

    Raises:
        Unavailable: it is not there, and apt cannot bring it.
    """
    if installed := shutil.which(program):
        return Path(installed)
    unpacked = cache() / "root" / "usr" / "bin" / program
    if not unpacked.exists() and fetch:
        _unpack()
    if not unpacked.exists():
        raise Unavailable(f"{program} is neither on the PATH nor in {unpacked.parent}")
    return unpacked


def _unpack() -> None:
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{PACKAGE} is not installed, and without {' and '.join(missing)} it cannot be fetched")
    where = cache()
    (where / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (where / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    # Lists and archives of our own: the system's belong to root.
    apt = ["apt-get", "-q", "-o", f"Dir::State::lists={where / 'lists'}", "-o", f"Dir::Cache={where}",
           "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=", "-o", "Acquire::Retries=1"]  # fmt: skip
    _run([*apt, "update"], where)
    for package in (PACKAGE, LATER_PACKAGE):
        _run([*apt, "download", package], where)
        for archive in where.glob("*.deb"):
            _run(["dpkg-deb", "-x", str(archive), str(where / "root")], where)
            archive.unlink()
        if (where / "root" / "usr" / "bin" / "promtool").exists():
            return


def _run(command: list[str], where: Path) -> None:
    try:
        subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{command[0]} failed: {error.stderr.strip()[-300:]}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not end within {TIMEOUT_S} s") from None


def main() -> int:
    try:
        for program in ("prometheus", "promtool"):
            print(find(program))
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
