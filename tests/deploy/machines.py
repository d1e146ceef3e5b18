"""Machines of a test's own on this one: systemd as their first process, an address each, a disk that copies on write.

For a process that is alone in its mount and network namespaces and first in its process namespace (`isolated` makes the
command), so that all of it ends with that process and none of it is seen outside. Needs root, and systemd installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BOOT_S = 60
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
NEEDED = ("unshare", "nsenter", "ip", "nft", "curl", "redis-server", "openssl", "/lib/systemd/systemd",
          "/usr/bin/python3.11")  # fmt: skip


def missing() -> list[str]:
    """What this machine lacks to hold others."""
    if os.geteuid() != 0:
        return ["root"]
    lacks = [tool for tool in NEEDED if shutil.which(tool) is None]
    if not lacks and subprocess.run(["unshare", "-mnp", "--fork", "true"], check=False).returncode != 0:
        lacks = ["namespaces"]
    return lacks


def isolated(*command: str) -> list[str]:
    return ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *command]


def bridge(*addresses: str) -> None:
    """The network that machines are put on, with this process at all of `addresses` (CIDR)."""
    _ip("link set lo up", "link add br0 type bridge", "link set br0 up")
    _ip(*(f"addr add {address} dev br0" for address in addresses))


class Machine:
    """One at `address` (CIDR), whose router is `router`. Its disk's changes are in `directory`, `files` is at /mnt."""

    def __init__(self, name: str, address: str, router: str, directory: Path, files: Path) -> None:
        self.name, self.address = name, address.split("/")[0]
        flags = ["--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child"]
        command = ["unshare", *flags, str(HERE / "machine.sh"), str(directory), name, str(files)]
        self._log = (directory / f"{name}.log").open("wb")
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        self._pid = self._first_process()
        _ip(f"link add {name} type veth peer name eth0 netns {self._pid}", f"link set {name} master br0 up")
        for words in (f"addr add {address} dev eth0", "link set eth0 up", f"route add default via {router}"):
            self.run(f"ip {words}")
        self._wait_until_booted()

    def run(self, command: str, *, check: bool = True, seconds: float = 300, **env: str) -> str:
        """Output of a shell command as root; raises with it where the command fails and `check` is set."""
        words = ["nsenter", "--target", str(self._pid), "--all", "bash", "-c", command]
        done = subprocess.run(words, env={**ENVIRONMENT, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False)  # fmt: skip
        if check and done.returncode != 0:
            raise RuntimeError(f"{self.name}: {command}: exit code {done.returncode}\n{done.stdout[-4000:]}")
        return done.stdout

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(60)
        self._log.close()

    def _first_process(self) -> str:
        """systemd, or the script that becomes it, by the number it has here."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        end = time.monotonic() + BOOT_S
        while not (found := children.read_text().split()):
            assert time.monotonic() < end
            time.sleep(0.05)
        return found[0]

    def _wait_until_booted(self) -> None:
        end = time.monotonic() + BOOT_S
        while (state := self.run("systemctl is-system-running", check=False).strip()) not in ("running", "degraded"):
            assert time.monotonic() < end, state
            time.sleep(0.5)


def _ip(*commands: str) -> None:
    for words in commands:
        subprocess.run(["ip", *words.split()], check=True)
