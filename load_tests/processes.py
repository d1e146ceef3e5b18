"""The processes of a server that was started here: memory, file descriptors, and which of them are engines.

What this module does not do: look at processes of others; everything is found below one process id.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_ROLE = re.compile(r"^ray::(?:ServeReplica:\w+:)?(\w+)")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True)
class Sample:
    """One process at one moment. `role`: "engine", "ingress", "exporters", "ProxyActor", …, or its command's name."""

    pid: int
    role: str
    rss_kib: int
    fds: int


def below(root: int) -> list[int]:
    """Process ids of `root` and everything it started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += children.get(pid, [])
    return found


def sample(root: int) -> list[Sample]:
    """Every process below `root` that still lives."""
    out = []
    for pid in below(root):
        proc = Path("/proc") / str(pid)
        try:
            command = (proc / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            rss = int((proc / "statm").read_text().split()[1]) * PAGE_KIB
            out.append(Sample(pid, _role(command), rss, len(os.listdir(proc / "fd"))))
        except OSError:
            continue  # it ended meanwhile
    return out


def _role(command: str) -> str:
    match = _ROLE.match(command)
    return match.group(1) if match else Path(command.split(" ")[0]).name


def engines(root: int) -> list[int]:
    """Process ids of the engine replicas below `root`, the oldest first."""
    return sorted((one.pid for one in sample(root) if one.role == "engine"), key=_started)


def _started(pid: int) -> int:
    """Clock ticks since boot; process ids may wrap around."""
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return sys.maxsize  # it ended meanwhile
