"""What travels on a channel, and what the handle call beside it carries.

A message is its length and a msgpack array of entries, which are arrays; the first message of either side is its
greeting. Entries of the replica are items, numbered within their stream, ends, and whether it takes a stream that was
opened here; of the ingress, streams that it opens or leaves, and what it has taken of them. msgpack makes plain data
only, so that a peer can at worst say something wrong.

What this module does not do: sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgpack

from serve_app import errors
from serve_app.engines.base import Usage
from serve_app.errors import ReplicaLost, ServeError
from serve_app.protocol import Item, Progress

MAGIC = "ddtree-channel-2"
# Bytes of one message: what a peer may send, and one that is not known yet, whose arrays within arrays cost a hundred
# times what they are long.
MAX_MESSAGE, MAX_GREETING = 8 * 1024 * 1024, 1024
# An item that fits none goes in pieces, up to this size.
PIECE, MAX_ITEM = 1024 * 1024, 256 * 1024 * 1024
# What an item counts against a stream's window beside its data.
ITEM_OVERHEAD = 64
ITEM, END, PART, TAKES, OVER = range(5)
HEADER = struct.Struct(">I")
_HEAD, _ARRAY = struct.Struct(">IBI"), 5


class ChannelError(Exception):
    """The peer does not speak the protocol."""


class LineLost(Exception):
    """A connection ended while streams were on it."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What opens a stream, beside its job: whose inlets, which of their streams, and how many bytes may be on their way
    at once."""

    ingress: str
    stream: int
    window: int


class Offer(NamedTuple):
    """Where a replica listens, and the secret that opens a connection. `opens`: the replica's name, as routers know it,
    where streams can be opened over the connection; else empty."""

    host: str
    port: int
    token: str
    opens: str = ""


class About(NamedTuple):
    """What Serve tells a replica about a call, beside its arguments."""

    request_id: str
    internal_request_id: str
    route: str = ""
    app_name: str = ""
    session_id: str = ""
    trace: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Parcel:
    """An item on the handle call. `number`: its place in the stream; negative for an error that overtakes what is on
    its way. `moved`: others come over the channel. `offer`: how to connect, in the first one. `item`: None where the
    stream ends, after as many items as `number` says."""

    number: int
    item: Item | None
    moved: bool = False
    offer: Offer | None = None


def lost() -> ReplicaLost:
    """What a lost connection is to each of its streams."""
    return ReplicaLost("The replica that worked on this request is gone.", retry_after=1)


def lost_parcel() -> Parcel:
    """How a replica says so on the call."""
    return Parcel(-1, Item(error=lost()), True)


def cost(item: Item) -> int:
    """What an item takes of its stream's window, in bytes."""
    return len(item.data) + ITEM_OVERHEAD


def pack_item(stream: int, number: int, item: Item) -> bytes:
    """One entry."""
    progress = [(p.choice, p.token_ids, p.finished, p.usage and _usage(p.usage), p.offset) for p in item.progress]
    error = None if item.error is None else _error(item.error)
    entry = ITEM, stream, number, item.data, item.tokens, item.content, progress, error, item.replica, item.last
    # An engine's numbers may be some library's.
    packed: bytes = msgpack.packb(entry, default=int)
    return packed


def pack_end(stream: int, number: int) -> bytes:
    """One entry. `number`: how many items the stream had."""
    packed: bytes = msgpack.packb((END, stream, number))
    return packed


def pack_part(stream: int, piece: bytes, last: bool) -> bytes:
    """One entry: a piece of one that fits no message."""
    packed: bytes = msgpack.packb((PART, stream, int(last), piece))
    return packed


def pack_takes(stream: int, ongoing: int, accepted: bool) -> bytes:
    """One entry: whether the replica takes a stream. `ongoing`: how many calls it has now."""
    packed: bytes = msgpack.packb((TAKES, stream, ongoing, accepted))
    return packed


def pack_over(stream: int, raised: str = "") -> bytes:
    """One entry: the call of a stream that was opened here counts no more. `raised`: the name of an exception, which
    the replica logged."""
    packed: bytes = msgpack.packb((OVER, stream, 0, raised))
    return packed


def pack_open(ticket: Ticket, about: About, job: bytes) -> bytes:
    """One entry. `job`: as `pack_job` made it, packed once more, so that one that cannot be read ends its own stream
    only."""
    packed: bytes = msgpack.packb((ticket.stream, ticket.window, about, job))
    return packed


def pack_leave(stream: int) -> bytes:
    """One entry: nobody waits for the stream any more."""
    packed: bytes = msgpack.packb((stream,))
    return packed


def pack_greeting(magic: str, token: str, ingress: str) -> bytes:
    """The ingress's first entry."""
    packed: bytes = msgpack.packb((magic, token, ingress))
    return packed


def pack_taken(stream: int, size: int) -> bytes:
    """One entry. `size`: bytes of the window that are free again."""
    packed: bytes = msgpack.packb((stream, size))
    return packed


def join(entries: Sequence[bytes]) -> bytes:
    """A message: its length, and an array of the entries."""
    size = sum(map(len, entries))
    return b"".join((_HEAD.pack(size + _ARRAY, 0xDD, len(entries)), *entries))


def about_of(packed: Sequence[Any]) -> About:
    """Raises ChannelError."""
    try:
        about = About(*packed)
    except TypeError as wrong:
        raise ChannelError(f"not a call: {wrong}") from None
    if not all(isinstance(value, str) for value in about[:-1]) or not isinstance(about.trace, (dict, type(None))):
        raise ChannelError("not a call")
    return about


def unpack(message: bytes | memoryview) -> list[Any]:
    """The entries of a message, without its length. Raises ChannelError."""
    try:
        entries = msgpack.unpackb(message)
    except Exception as error:  # whatever a stranger's bytes make it raise
        raise ChannelError(f"not msgpack: {type(error).__name__}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, list) for entry in entries):
        raise ChannelError("not an array of entries")
    return entries


def unpack_one(entry: bytes | bytearray) -> list[Any]:
    """An entry by itself. Raises ChannelError."""
    return cast(list[Any], unpack(join([bytes(entry)])[HEADER.size :])[0])


def item_of(entry: Sequence[Any]) -> Item:
    """The item of an entry that `pack_item` made. Raises ChannelError."""
    try:
        _, _, _, data, tokens, content, progress, error, replica, last = entry
        if not (isinstance(data, bytes) and isinstance(tokens, int)):
            raise TypeError
        parts = tuple(
            Progress(choice, tuple(ids), finished, usage and usage_of(usage), offset and (offset[0], offset[1]))
            for choice, ids, finished, usage, offset in progress
        )
        return Item(data, tokens, bool(content), error and _error_of(error), parts, str(replica), bool(last))
    except (TypeError, ValueError, IndexError) as wrong:
        raise ChannelError(f"not an item: {type(wrong).__name__}") from None


def _usage(usage: Usage) -> tuple[int, int, int, int | None]:
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens


def usage_of(packed: Sequence[int]) -> Usage:
    return Usage(*packed)


def _error(error: ServeError) -> tuple[Any, ...]:
    return type(error).__name__, error.message, error.param, error.code, error.retry_after


def _error_of(packed: Sequence[Any]) -> ServeError:
    name, message, param, code, retry_after = packed
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ServeError)):
        kind = ServeError
    return kind(str(message), param=param, code=code, retry_after=retry_after)
