"""The replica's side: where its streams' items leave.

Every ingress process that knows the secret has one connection. A stream is opened over it, or by a handle call; one
whose ingress has no connection goes on its call, and moves as soon as there is one.

What this module does not do: make items.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from serve_app.channel.framed import ROOM, Framed
from serve_app.channel.jobs import job_of
from serve_app.channel.wire import (
    MAGIC,
    MAX_GREETING,
    MAX_MESSAGE,
    PIECE,
    About,
    ChannelError,
    LineLost,
    Offer,
    Parcel,
    Ticket,
    about_of,
    cost,
    lost_parcel,
    pack_end,
    pack_item,
    pack_over,
    pack_part,
    pack_takes,
    unpack,
)
from serve_app.protocol import Item, Job

logger = logging.getLogger("ray.serve.ddtree.replica")
GREETING_WITHIN_S = 5.0
# Connections that have not shown the secret yet.
MAX_STRANGERS = 64
DRAIN_S, DRAIN_POLL_S = 5.0, 0.02
# What only Serve's accounts at the other end wait for may wait so long to share a message with items: that a stream was
# taken, with its first, at whose time a message of its own would be in the way; that a place is free again, less.
TAKES_WITHIN_S, ACCOUNTS_WITHIN_S = 0.01, 0.002


class Entrance(Protocol):
    """How a call that comes over the channel enters the replica: Serve's accounts, and then `Outlets.carry`."""

    def __call__(self, about: About, job: Job, ticket: Ticket) -> AsyncIterator[Any]:
        """First whether the call is taken and how many there are now, as a pair; then whatever parcels it has."""


class _Line(Framed):
    """The connection of one ingress process."""

    def __init__(self, outlets: Outlets) -> None:
        super().__init__(MAX_GREETING, MAX_MESSAGE)
        self._outlets, self.ingress = outlets, ""
        self._greeting: asyncio.TimerHandle | None = None
        self._outstanding: dict[int, int] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        # Streams that were opened here.
        self._running: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._outlets.welcome(self):
            self.close(ChannelError("too many strangers"))
            return
        self._greeting = self._loop.call_later(GREETING_WITHIN_S, self.close, ChannelError("no greeting"))

    def message(self, body: bytes) -> None:
        entries = unpack(body)
        if not self.ingress:
            self._greeted(entries)
            return
        for entry in entries:
            self._entry(entry)

    def _entry(self, entry: list[Any]) -> None:
        if not entry or not all(isinstance(value, int) for value in entry[:2]):
            raise ChannelError("not an entry")
        if len(entry) == 2:
            self._taken(*entry)
        elif len(entry) == 1:
            self._left(*entry)
        elif len(entry) == 4 and isinstance(entry[2], list) and isinstance(entry[3], bytes):
            self._opened(Ticket(self.ingress, *entry[:2]), about_of(entry[2]), entry[3])
        else:
            raise ChannelError("not an entry")

    def _greeted(self, entries: list[list[object]]) -> None:
        if len(entries) != 1 or len(entries[0]) != 3:
            raise ChannelError("not a greeting")
        magic, token, ingress = entries[0]
        known = isinstance(token, str) and hmac.compare_digest(token.encode(), self._outlets.token.encode())
        if magic != MAGIC or not known or not isinstance(ingress, str) or not 0 < len(ingress) <= 64:
            raise ChannelError("wrong greeting")
        if self._greeting is not None:
            self._greeting.cancel()
        self.ingress, self._limit_in = ingress, MAX_MESSAGE
        self.send(pack_end(0, 0))  # the greeting's answer
        self._outlets.known(self)

    def _taken(self, stream: int, size: int) -> None:
        if stream not in self._outstanding:
            return  # it is over
        self._outstanding[stream] -= size
        if (waiting := self._waiting.get(stream)) is not None and not waiting.done():
            waiting.set_result(None)

    def _opened(self, ticket: Ticket, about: About, job: bytes) -> None:
        entrance = self._outlets.entrance
        if entrance is None or ticket.stream in self._running:
            raise ChannelError("not a stream")
        self._running[ticket.stream] = self._loop.create_task(self._run(entrance, ticket, about, job))

    async def _run(self, entrance: Entrance, ticket: Ticket, about: About, packed: bytes) -> None:
        raised, within_s = "", 0.0
        try:
            call = entrance(about, job_of(packed), ticket)
            async with contextlib.aclosing(call):  # type: ignore[type-var]
                accepted, ongoing = await anext(call)
                if not accepted:
                    # It may come again as soon as this is read.
                    self._running.pop(ticket.stream, None)
                    self.send(pack_takes(ticket.stream, ongoing, False))
                    return
                self.send(pack_takes(ticket.stream, ongoing, True), TAKES_WITHIN_S)
                async for _ in call:
                    pass  # its parcels say what the channel has said
            within_s = ACCOUNTS_WITHIN_S
        except BaseException as error:
            raised = type(error).__name__
            if not isinstance(error, Exception):
                raise
            # Serve has logged what came from the replica.
            logger.debug("a call over the channel failed", exc_info=error)
        finally:
            if self._running.get(ticket.stream) is asyncio.current_task():
                del self._running[ticket.stream]
                self.send(pack_over(ticket.stream, raised), within_s)

    def _left(self, stream: int) -> None:
        # Not left to the task: one that has not begun yet never runs.
        if (task := self._running.pop(stream, None)) is not None:
            task.cancel()

    async def put(self, ticket: Ticket, number: int, item: Item) -> None:
        """Send an item once the stream's window has room.

        Raises:
            LineLost: with what was on its way.
        """
        stream = ticket.stream
        while not self.closed and self._outstanding.setdefault(stream, 0) >= ticket.window:
            waiting = self._waiting[stream] = self._loop.create_future()
            try:
                await waiting
            finally:
                self._waiting.pop(stream, None)
        if self.closed:
            raise LineLost
        entry = pack_item(stream, number, item)
        self._outstanding[stream] += cost(item)
        if len(entry) <= MAX_MESSAGE - ROOM:
            self.send(entry)
            return
        for at in range(0, len(entry), PIECE):
            self.send(pack_part(stream, entry[at : at + PIECE], at + PIECE >= len(entry)))

    def forget(self, stream: int) -> None:
        self._outstanding.pop(stream, None)

    def ended(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)
        for task in list(self._running.values()):
            task.cancel()
        self._outlets.gone(self)


class Outlets:
    """All connections of a replica. `open` listens; without it everything goes on the handle calls."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(32)
        self.entrance: Entrance | None = None
        self._lines: dict[str, _Line] = {}
        self._strangers: set[_Line] = set()
        self._server: asyncio.Server | None = None
        self._offer: Offer | None = None

    async def open(self, host: str, name: str = "", entrance: Entrance | None = None) -> None:
        """Listen on a free port of `host`, an address of this node. Where that is impossible the replica does without
        it, and says so in its log. With an `entrance` streams can be opened over the connections; `name` is then the
        replica's, as routers know it."""
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            logger.warning("no channel: Ray speaks TLS here, which the channel does not")
            return
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Line(self), host, 0)
        except OSError as error:
            logger.warning("no channel: cannot listen on %s: %s", host, error)
            return
        self.entrance = entrance
        port: int = self._server.sockets[0].getsockname()[1]
        self._offer = Offer(host, port, self.token, name if entrance is not None else "")

    @property
    def offer(self) -> Offer | None:
        """How to connect; None where nothing listens."""
        return self._offer

    async def carry(self, items: AsyncIterator[Item], ticket: Ticket) -> AsyncIterator[Parcel]:
        """Send the items by the ticket's channel. What comes out is what shall go on the handle call. Closing it closes
        `items`. Losing the connection does as well, and is told on the call as the loss of a replica."""
        line: _Line | None = None
        number, ended = 0, False
        try:
            async with contextlib.aclosing(items):  # type: ignore[type-var]
                async for item in items:
                    moved = False
                    if line is None:
                        line = self._lines.get(ticket.ingress)
                        # The first one of a stream that moves is told on the call, or the end of that would be its end.
                        moved = line is not None and number > 0
                    if line is not None and not moved:
                        await line.put(ticket, number, item)
                    else:
                        yield Parcel(number, item, line is not None, None if number else self._offer)
                    number += 1
                    if item.last and line is not None:
                        # In one message with it: what the maker still does, nobody waits for.
                        line.send(pack_end(ticket.stream, number))
                        ended = True
            if line is not None:
                if not ended:
                    line.send(pack_end(ticket.stream, number))
                # Serve tells by the call's metadata whether a replica took it, and gRPC may lose them where no message
                # follows.
                yield Parcel(number, None, True)
        except LineLost:
            yield lost_parcel()
        finally:
            if line is not None:
                line.forget(ticket.stream)

    def welcome(self, line: _Line) -> bool:
        """A connection whose secret is not known yet; False where there are too many."""
        if len(self._strangers) >= MAX_STRANGERS:
            return False
        self._strangers.add(line)
        return True

    def known(self, line: _Line) -> None:
        self._strangers.discard(line)
        before = self._lines.pop(line.ingress, None)
        self._lines[line.ingress] = line
        if before is not None:
            before.close()

    def gone(self, line: _Line) -> None:
        self._strangers.discard(line)
        if self._lines.get(line.ingress) is line:
            del self._lines[line.ingress]

    async def close(self) -> None:
        """Let what was sent leave, for a moment, and end the connections."""
        if self._server is None:
            return
        self._server.close()
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until and any(line.pending() for line in self._lines.values()):
            await asyncio.sleep(DRAIN_POLL_S)
        for line in [*self._lines.values(), *self._strangers]:
            line.close()
