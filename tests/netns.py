"""Machines for tests: network namespaces on one bridge, each with an address, ports and processes of its own.

Needs root and iproute2. What it does not do: separate file systems, clocks or memory.
"""

import contextlib
import os
import signal
import subprocess
import time

SUBNET = "10.211.7"


class Network:
    """Up between enter and exit, which kills whatever still runs in its namespaces."""

    def __init__(self, *hosts: str) -> None:
        self._prefix = f"dd{os.getpid() % 10**6}"
        self._addresses = {host: f"{SUBNET}.{index}" for index, host in enumerate(hosts, 1)}

    def __enter__(self) -> "Network":
        try:
            ip("link", "add", self._prefix, "type", "bridge")
            ip("link", "set", self._prefix, "up")
            for index, host in enumerate(self._addresses, 1):
                self._add(host, f"{self._prefix}v{index}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._addresses:
            self.kill(host)
            ip("netns", "del", self.namespace(host), check=False)
        ip("link", "del", self._prefix, check=False)

    def _add(self, host: str, link: str) -> None:
        space = self.namespace(host)
        ip("netns", "add", space)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", link, "master", self._prefix, "up")
        ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", space, "link", "set", device, "up")

    def namespace(self, host: str) -> str:
        return f"{self._prefix}{host}"

    def address(self, host: str) -> str:
        return self._addresses[host]

    def inside(self, host: str, *command: str) -> list[str]:
        """The command that runs another one on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def unplug(self, host: str) -> None:
        """Nothing reaches it and nothing leaves it; nobody is told."""
        ip("-n", self.namespace(host), "link", "set", "eth0", "down")

    def kill(self, host: str) -> None:
        """All its processes at once, until none is left."""
        space = self.namespace(host)
        for _ in range(100):
            pids = ip("netns", "pids", space, check=False).split()
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        raise RuntimeError(f"processes of {host} do not end")

    def host_of(self, pid: int) -> str:
        """Where a process runs, or ""."""
        spaces = ip("netns", "identify", str(pid)).split()
        return next((host for host in self._addresses if self.namespace(host) in spaces), "")


def ip(*words: str, check: bool = True) -> str:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=60).stdout


def available() -> bool:
    """Whether this machine lets us."""
    try:
        with Network("probe"):
            return True
    except (OSError, subprocess.SubprocessError):
        return False
