"""Free ports for servers that start later: a port that was free a moment ago may be taken by then.

So they are none of those that are handed out meanwhile: Linux gives connections, and servers that name no port, those
from 32768 on, Serve gives ingress processes those from 30000 on, and Ray its workers 10002 to 19999.

What this module does not do: keep them.
"""

from __future__ import annotations

import contextlib
import random
import socket

ENGINE_PORTS = range(20_000, 25_000)
PROXY_PORTS = range(25_000, 30_000)
_TRIES = 1000


def free_ports(among: range, count: int = 1) -> list[int]:
    """Different ones, free on every address of this machine, at random: others choose at the same time. Raises OSError
    where there are none."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        return [_bound(probe, among) for probe in probes]


def _bound(probe: socket.socket, among: range) -> int:
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):
            probe.bind(("", random.SystemRandom().choice(among)))
            return int(probe.getsockname()[1])
    raise OSError(f"no free port from {among.start} to {among.stop - 1}")
