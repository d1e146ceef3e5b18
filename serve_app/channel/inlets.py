"""The ingress's side: where streams' items arrive, from whichever replica Serve chose.

What this module does not do: call replicas (see `ingress.backend`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
import weakref
from collections import deque
from typing import Any, ClassVar

from serve_app.channel.framed import ROOM, Framed
from serve_app.channel.jobs import pack_job
from serve_app.channel.wire import (
    END,
    ITEM,
    MAGIC,
    MAX_ITEM,
    MAX_MESSAGE,
    OVER,
    PART,
    TAKES,
    About,
    ChannelError,
    Offer,
    Parcel,
    Ticket,
    cost,
    item_of,
    lost,
    pack_greeting,
    pack_leave,
    pack_open,
    pack_taken,
    unpack,
    unpack_one,
)
from serve_app.protocol import Item, Job

logger = logging.getLogger("ray.serve.ddtree.ingress")
# Bytes of one stream that may be on their way or wait for their client.
WINDOW = 256 * 1024
CONNECT_WITHIN_S = 5.0
# How long an address that did not answer is left alone.
RETRY_AFTER_S = 30.0
# The call has ended, and what it left on the channel is still to come.
REST_WITHIN_S = 10.0


class Inlet:
    """One stream. Items come out in their order, whichever way each of them came."""

    def __init__(self, ticket: Ticket, inlets: Inlets) -> None:
        self.ticket = ticket
        self.line: _Line | None = None
        self._inlets = inlets
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Item] = deque()
        self._pieces = bytearray()
        self._early: dict[int, Item] = {}
        self._next = 0
        self._total: int | None = None
        self._parcels = 0
        self._moved = False
        self._failure: BaseException | None = None
        self._taken = self._held = 0
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        # Why the stream began where it did, one of `metrics.CHANNEL_WAYS`.
        self.way = "channel"

    # -- arriving ----------------------------------------------------------------------------------------------------

    def arrived(self, line: _Line, number: int, item: Item) -> None:
        """Over the channel."""
        self.line = line
        self._add(number, item)

    def piece(self, line: _Line, piece: bytes, last: bool) -> None:
        """Over the channel: a part of an item's entry. Raises ChannelError."""
        if len(self._pieces) + len(piece) > MAX_ITEM:
            raise ChannelError("the item is too long")
        self._pieces += piece
        if last:
            entry, self._pieces = unpack_one(self._pieces), bytearray()
            self.arrived(line, entry[2], item_of(entry))

    def taken_over(self, line: _Line) -> None:
        """The replica takes the stream, which was opened over the channel; all of it comes there."""
        self.line, self._moved, self.way = line, True, "opened"

    def ended(self, line: _Line, total: int) -> None:
        """Over the channel: how many items there are in all."""
        self.line, self._total = line, total
        self._wake()

    def parcel(self, parcel: Parcel) -> None:
        """On the handle call."""
        if parcel.item is None:
            self._moved, self._total = True, parcel.number
            self._wake()
            return
        if parcel.number < 0:
            self.fail(parcel.item.error or lost())
            return
        if not self._parcels and not parcel.moved:
            self.way = self._inlets.consider(parcel.offer)
        self._parcels += 1
        self._moved = self._moved or parcel.moved
        self._add(parcel.number, parcel.item, taken=True)

    def call_ended(self) -> None:
        """The handle call is over, without an error. If everything came on it that is the end; else what is missing
        comes over the channel, soon."""
        if not self._moved:
            self._total = self._parcels
            self._wake()
        elif not self.complete:
            self._patience = self._loop.call_later(REST_WITHIN_S, self.fail, lost())

    def fail(self, error: BaseException) -> None:
        """What has arrived still comes out, then this."""
        if self._failure is None and not self.complete:
            self._failure = error
            self._wake()

    @property
    def complete(self) -> bool:
        """Every item has arrived."""
        return self._total is not None and self._next >= self._total

    def _add(self, number: int, item: Item, taken: bool = False) -> None:
        size = cost(item)
        self._held += size
        if number == self._next and not self._early:
            self._ready.append(item)
            self._next += 1
        else:
            self._early[number] = item
            while (following := self._early.pop(self._next, None)) is not None:
                self._ready.append(following)
                self._next += 1
        if taken:
            # It is nothing that the channel's window counts.
            self._taken -= size
        if self._ready:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def room(self) -> None:
        """Until the client has taken enough that the handle call may bring more. A client that waits does not wait for
        this: what it needs next may be on the call, while what the channel brought fills the window."""
        while self._full():
            self._room = self._loop.create_future()
            await self._room

    def _full(self) -> bool:
        return bool(self._ready) and self._held > self.ticket.window

    # -- leaving -----------------------------------------------------------------------------------------------------

    async def next(self) -> Item | None:
        """The next item; None after the last. Raises what the stream failed with."""
        while not self._ready:
            if self.complete:
                return None
            if self._failure is not None:
                raise self._failure
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._ready.popleft()
        size = cost(item)
        self._taken += size
        self._held -= size
        if self._room is not None and not self._room.done() and not self._full():
            self._room.set_result(None)
        if self._taken >= self.ticket.window // 2 and self.line is not None:
            self.line.send(pack_taken(self.ticket.stream, self._taken))
            self._taken = 0
        return item

    def close(self) -> None:
        """Nobody reads any more."""
        if self._patience is not None:
            self._patience.cancel()
        self._inlets.forget(self.ticket.stream)


class Opened:
    """A stream that was opened over the channel, until it ends.

    Attributes:
        takes: whether the replica takes it, and how many calls that has now; None where that is never said.
        over: why it counts no more: empty where it ended by itself, the name of what the replica raised, "lost" or
            "left". Its last item may have come before.
    """

    def __init__(self, line: _Line, stream: int) -> None:
        loop = asyncio.get_running_loop()
        self.takes: asyncio.Future[tuple[bool, int] | None] = loop.create_future()
        self.over: asyncio.Future[str] = loop.create_future()
        self._line, self._stream = line, stream

    def said(self, accepted: bool, ongoing: int) -> None:
        if not self.takes.done():
            self.takes.set_result((accepted, ongoing))

    def end(self, why: str) -> None:
        if not self.takes.done():
            self.takes.set_result(None)
        if not self.over.done():
            self.over.set_result(why)

    def leave(self) -> None:
        """Nobody waits for it any more."""
        if self._line.forget(self._stream):
            self._line.send(pack_leave(self._stream))
        self.end("left")


class _Line(Framed):
    """The connection to one replica."""

    def __init__(self, inlets: Inlets, offer: Offer) -> None:
        super().__init__(MAX_MESSAGE, MAX_MESSAGE)
        self._inlets, self._offer = inlets, offer
        self._opened: dict[int, Opened] = {}
        self.greeted: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(pack_greeting(MAGIC, self._offer.token, self._inlets.id))

    def message(self, body: bytes) -> None:
        entries = unpack(body)
        if not self.greeted.done():
            self.greeted.set_result(None)
            entries = entries[1:]
        for entry in entries:
            self._entry(entry)

    def _entry(self, entry: list[Any]) -> None:
        try:
            kind, stream, number = entry[:3]
        except ValueError:
            raise ChannelError("not an entry") from None
        if not (isinstance(kind, int) and isinstance(stream, int) and isinstance(number, int)):
            raise ChannelError("not an entry")
        inlet = self._inlets.inlet(stream)
        if kind == ITEM:
            if inlet is not None:  # else its client left
                inlet.arrived(self, number, item_of(entry))
        elif kind == END:
            if inlet is not None:
                inlet.ended(self, number)
        elif kind == TAKES and len(entry) == 4:
            self._takes(stream, inlet, number, bool(entry[3]))
        elif kind == OVER and len(entry) == 4:
            self._close(stream, str(entry[3]))
        elif kind == PART and len(entry) == 4 and isinstance(entry[3], bytes):
            if inlet is not None:
                inlet.piece(self, entry[3], bool(number))
        else:
            raise ChannelError("no such entry")

    def open(self, ticket: Ticket, about: About, job: Job) -> Opened | None:
        """Ask the replica to take a stream. None where that cannot be said in a message, or not any more."""
        try:
            entry = pack_open(ticket, about, pack_job(job))
        except (ValueError, TypeError, OverflowError):
            return None
        if self.closed or len(entry) > MAX_MESSAGE - ROOM:
            return None
        opened = self._opened[ticket.stream] = Opened(self, ticket.stream)
        self.send(entry)
        return opened

    def forget(self, stream: int) -> bool:
        """Whether it was open."""
        return self._opened.pop(stream, None) is not None

    def _takes(self, stream: int, inlet: Inlet | None, ongoing: int, accepted: bool) -> None:
        opened = self._opened.get(stream)
        if opened is None:
            return  # its client left
        if not accepted:
            del self._opened[stream]
        elif inlet is not None:
            inlet.taken_over(self)
        opened.said(accepted, ongoing)

    def _close(self, stream: int, why: str) -> None:
        if (opened := self._opened.pop(stream, None)) is not None:
            opened.end(why)

    def ended(self) -> None:
        opened, self._opened = self._opened, {}
        for one in opened.values():
            one.end("lost")
        if not self.greeted.done():
            self.greeted.cancel()
        self._inlets.gone(self, self._offer)


class Inlets:
    """All streams and connections of an ingress process, which `of` finds again by their id."""

    _known: ClassVar[weakref.WeakValueDictionary[str, Inlets]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self._known[self.id] = self
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._streams: dict[int, Inlet] = {}
        self._lines: dict[Offer, _Line | asyncio.Task[None]] = {}
        self._by_name: dict[str, _Line] = {}
        self._left_alone: dict[Offer, float] = {}

    def open(self) -> Inlet:
        ticket = Ticket(self.id, next(self._numbers), WINDOW)
        inlet = self._streams[ticket.stream] = Inlet(ticket, self)
        return inlet

    @classmethod
    def of(cls, ticket: Ticket) -> Inlets | None:
        """Those of a ticket, on the event loop that runs."""
        found = cls._known.get(ticket.ingress)
        return found if found is not None and found._loop is asyncio.get_running_loop() else None

    def line_to(self, replica: str) -> _Line | None:
        """The connection over which that replica takes streams, if there is one."""
        return self._by_name.get(replica)

    def inlet(self, stream: int) -> Inlet | None:
        return self._streams.get(stream)

    def forget(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def consider(self, offer: Offer | None) -> str:
        """A stream begins on its handle call. Connects, where that may help; says why the stream is where it is."""
        if offer is None:
            return "no_offer"
        if offer not in self._lines:
            if time.monotonic() < self._left_alone.get(offer, 0.0):
                return "unreachable"
            self._lines[offer] = asyncio.create_task(self._connect(offer))
        return "connecting"

    async def _connect(self, offer: Offer) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                _, line = await loop.create_connection(lambda: _Line(self, offer), offer.host, offer.port)
                try:
                    await line.greeted
                except BaseException:
                    line.close(ChannelError("no greeting"))
                    raise
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            self._lines.pop(offer, None)
            now = time.monotonic()
            # Replicas come and go; what is over needs no memory.
            self._left_alone = {known: until for known, until in self._left_alone.items() if until > now}
            self._left_alone[offer] = now + RETRY_AFTER_S
            logger.warning("no channel to %s:%d: %s", offer.host, offer.port, type(error).__name__)
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise
        else:
            if line.closed:
                self._lines.pop(offer, None)
            else:
                self._lines[offer] = line
                if offer.opens:
                    self._by_name[offer.opens] = line

    def gone(self, line: _Line, offer: Offer) -> None:
        """A connection is over, and with it what was on its way."""
        if self._lines.get(offer) is line:
            del self._lines[offer]
            self._by_name.pop(offer.opens, None)
        for inlet in list(self._streams.values()):
            if inlet.line is line:
                inlet.fail(lost())

    def close(self) -> None:
        for line in list(self._lines.values()):
            if isinstance(line, _Line):
                line.close()
            else:
                line.cancel()
