"""When bytes really left and arrived, however busy this process was.

The kernel notes when a segment arrives, and gives that time along with the bytes (SO_TIMESTAMPNS). What a busy client
reads late keeps its true time. A request begins when its first byte is handed to the kernel: making it and connecting
are the client's own work, told apart. Where the kernel has no stamps (other systems than Linux), the time of reading is
used. All times are `time.perf_counter()`'s.

What this module does not do: tell apart segments that lay in the kernel together; they have the time of the last.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import sys
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import gevent.socket
from geventhttpclient.client import HTTPClient, HTTPClientPool

# Of Linux's asm-generic/socket.h; Python's socket module has no name for it.
SO_TIMESTAMPNS = 35 if sys.platform == "linux" else None
_TIMESPEC = struct.Struct("@ll")
CLOCK_READS, CLOCK_CLOSE_S = 5, 2e-5
_ROOM = gevent.socket.CMSG_SPACE(_TIMESPEC.size)
STAMPS_WITHIN_S = 5.0
_KEPT: list[gevent.socket.socket] = []


@dataclass
class Stamps:
    """Of one request. None until it happened; `connect_s` stays None on a connection that was there."""

    connect_s: float | None = None
    sent: float | None = None
    received: float | None = None


CURRENT: ContextVar[Stamps] = ContextVar("stamps")


class TimedSocket(gevent.socket.socket):
    """Writes into the `Stamps` of the greenlet that uses it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if SO_TIMESTAMPNS is not None:
            with contextlib.suppress(OSError):
                self.setsockopt(gevent.socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def connect(self, address: Any) -> None:
        begin = time.perf_counter()
        super().connect(address)
        if (stamps := CURRENT.get(None)) is not None:
            stamps.connect_s = time.perf_counter() - begin

    def sendall(self, data: Any, flags: int = 0) -> None:
        if (stamps := CURRENT.get(None)) is not None:
            stamps.sent = time.perf_counter()
        super().sendall(data, flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        data, ancillary, _, _ = self.recvmsg(size, _ROOM, flags)
        if (stamps := CURRENT.get(None)) is not None:
            stamps.received = arrival(ancillary, stamps.received or stamps.sent or 0.0)
        return bytes(data)


def arrival(ancillary: Iterable[tuple[int, int, bytes]], not_before: float) -> float:
    """When the data came that these control messages are about. The wall clock that the kernel stamps with may be set
    meanwhile: never before `not_before`, and never in the future."""
    for level, kind, data in ancillary:
        if (level, kind) == (gevent.socket.SOL_SOCKET, SO_TIMESTAMPNS) and len(data) >= _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(data[: _TIMESPEC.size])
            now, wall = clocks()
            return min(now, max(not_before, now - (wall - seconds - 1e-9 * nanoseconds)))
    return time.perf_counter()


def clocks() -> tuple[float, float]:
    """(monotonic, wall) of the same moment: read again where something else ran in between."""
    best: tuple[float, float, float] | None = None
    for _ in range(CLOCK_READS):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        if best is None or after - before < best[0]:
            best = after - before, before, wall
        if best[0] < CLOCK_CLOSE_S:
            break
    assert best is not None
    return best[1], best[2]


@functools.cache
def stamping() -> bool:
    """Whether the kernel stamps what arrives, from now on and as long as this process lives.

    It begins a moment after the first socket asked, and ends when no socket asks any more; what arrives meanwhile has
    no stamp. So one connection stays open here, and this waits, a few seconds at most, for its first stamp.
    """
    if SO_TIMESTAMPNS is None:
        return False
    client = TimedSocket()
    with gevent.socket.create_server(("127.0.0.1", 0)) as door:
        client.connect(door.getsockname())
        server, _ = door.accept()
    _KEPT.extend((client, server))
    deadline = time.perf_counter() + STAMPS_WITHIN_S
    while time.perf_counter() < deadline:
        server.sendall(b".")
        if client.recvmsg(1, _ROOM)[1]:
            return True
        time.sleep(0.001)
    return False


class TimedClients(HTTPClientPool):
    """Clients whose connections are `TimedSocket`s."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        stamping()

    def get_client(self, url: Any) -> HTTPClient:
        client = super().get_client(url)
        # The pool has this method for subclasses, but the client no way to be given one.
        client._connection_pool._create_tcp_socket = TimedSocket
        return client
