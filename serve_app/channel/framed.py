"""One end of a channel's connection: messages in and out, as many entries as one turn of the event loop makes in each.

What this module does not do: know what the entries say.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import cast

from serve_app.channel.wire import HEADER, ChannelError, join

# A peer that fell silent: probes while nothing is said, and how long what was said may go unacknowledged.
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000))
# What a message takes beside its entries, and more.
ROOM = 64


class Framed(asyncio.Protocol):
    """Subclasses say what a message means and what the end of the connection does. `limit_in`, `limit_out`: the most
    bytes of one message that is taken, and that is sent; a larger one ends the connection."""

    def __init__(self, limit_in: int, limit_out: int) -> None:
        self._limit_in, self._limit_out = limit_in, limit_out
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._entries: list[bytes] = []
        self._flushing = False
        self._due: asyncio.TimerHandle | None = None
        self.closed = False

    def message(self, body: bytes) -> None:
        """One whole message. May raise ChannelError, which ends the connection."""
        raise NotImplementedError

    def ended(self) -> None:
        """The connection is over, for whatever reason; called once."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                if hasattr(socket, name):  # Linux's
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        buffer = self._received
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= HEADER.size:
                (length,) = HEADER.unpack_from(buffer, at)
                if length > self._limit_in:
                    raise ChannelError("the message is too long")
                if len(buffer) - at - HEADER.size < length:
                    break
                at += HEADER.size + length
                self.message(bytes(memoryview(buffer)[at - length : at]))
                if self.closed:
                    return
        except ChannelError as error:
            self.close(error)
            return
        finally:
            del buffer[:at]

    def send(self, entry: bytes, within_s: float = 0.0) -> None:
        """Queue an entry, which leaves with the others of this turn; or with the next that do, after `within_s` at the
        latest."""
        if self.closed:
            return
        self._entries.append(entry)
        if within_s:
            due = self._loop.time() + within_s
            if self._due is None or self._due.when() > due:
                if self._due is not None:
                    self._due.cancel()
                self._due = self._loop.call_at(due, self._flush)
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        entries, self._entries, self._flushing = self._entries, [], False
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self.closed or self._transport is None or not entries:
            return
        if sum(map(len, entries)) < self._limit_out - ROOM:
            self._transport.write(join(entries))
            return
        # More than one message's worth at once: each entry fits by itself.
        for entry in entries:
            self._transport.write(join([entry]))

    def pending(self) -> int:
        """Bytes that have not reached the operating system."""
        written = self._transport.get_write_buffer_size() if self._transport is not None and not self.closed else 0
        return written + sum(map(len, self._entries))

    def eof_received(self) -> bool:
        return False

    def close(self, reason: Exception | None = None) -> None:
        """End it now. `reason` is for those who look at it."""
        if not self.closed and self._transport is not None:
            self._transport.abort() if reason is not None else self._transport.close()
        self._over()

    def connection_lost(self, error: Exception | None) -> None:
        self._over()

    def _over(self) -> None:
        if not self.closed:
            self.closed = True
            with contextlib.suppress(BufferError):
                self._received.clear()
            self.ended()
