"""A backend whose handle is a replica of this process, and the replica's sockets seen from outside."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from ray import ActorID
from ray.serve._private.common import RequestMetadata
from ray.serve.exceptions import RequestCancelledError

from serve_app.channel import About, Outlets, Parcel, Ticket
from serve_app.channel.wire import HEADER, MAGIC, join, pack_greeting, unpack
from serve_app.ingress.backend import ChannelBackend
from serve_app.metrics import GatewayMetrics
from serve_app.protocol import Item, Job
from serve_app.replica import Replica
from serve_app.router.opening import ChannelResult, open_over_channel
from tests.conftest import SOON_S
from tests.direct import counted, make_replica, until


class Call:
    """A streaming call; `brought` is what came on it beside its end."""

    def __init__(self, parcels: AsyncIterator[Parcel]) -> None:
        self.brought: list[Parcel] = []
        self.messages = 0
        self.failure: Exception | None = None
        self.cancelled = False
        self._queue: asyncio.Queue[Parcel | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(parcels))

    async def _run(self, parcels: Any) -> None:
        try:
            async for parcel in parcels:
                self.messages += 1
                if parcel.item is not None:
                    self.brought.append(parcel)
                self._queue.put_nowait(parcel)
        finally:
            await parcels.aclose()
            self._queue.put_nowait(None)

    def cancel(self) -> None:
        self.cancelled = True
        self._task.cancel()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self._task.cancel()

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Parcel:
        try:
            parcel = await self._queue.get()
        except asyncio.CancelledError:
            if self.cancelled:  # as Serve's does
                raise RequestCancelledError("a call") from None
            raise
        if parcel is None:
            raise self.failure or StopAsyncIteration
        return parcel


class OpenedCall:
    """A streaming call that went over the channel, as Serve's handle and router treat it."""

    def __init__(self, result: ChannelResult) -> None:
        self.result = result
        self.brought: list[Parcel] = []
        self.cancelled = self._accepted = False

    def cancel(self) -> None:
        self.cancelled = True
        self.result.cancel()

    def __aiter__(self) -> "OpenedCall":
        return self

    async def __anext__(self) -> Parcel:
        if not self._accepted:
            self._accepted = (await self.result.get_rejection_response()).accepted
        return await self.result.__anext__()


class Handle:
    """As much of a deployment handle as a backend uses to generate."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.calls: list[Any] = []

    def options(self, **options: Any) -> "Handle":
        return self

    @property
    def stream(self) -> "Handle":
        return self

    def remote(self, job: Job, ticket: Ticket) -> Any:
        result = open_over_channel(pending(job, ticket), REPLICA)
        call = Call(self._replica.stream(job, ticket)) if result is None else OpenedCall(result)
        self.calls.append(call)
        return call


REPLICA: Any = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"), actor_id=ActorID(b"a" * 16))


def pending(job: Job, ticket: Ticket, **fields: Any) -> Any:
    """A call that waits for a replica, as Serve's router has it."""
    metadata = RequestMetadata("id", "internal", route="/v1", app_name="app", _on_separate_loop=False)
    return SimpleNamespace(**{"args": [job, ticket], "kwargs": {}, "metadata": metadata, **fields})


class Loopback:
    """`backend` over `replica`, which listens on this machine unless told not to."""

    backend: ChannelBackend
    replica: Replica
    handle: Handle

    @classmethod
    async def start(cls, *, listen: bool = True, opens: bool = False) -> "Loopback":
        """`opens`: whether streams are opened over the channel; else by calls, which the channel relieves."""
        self = cls()
        self.replica = await make_replica()
        self.entered: list[About] = []
        self.capacity = 1000
        self.finish: asyncio.Event | None = None
        if listen:
            await self.replica._outlets.open("127.0.0.1", "r", self._enter if opens else None)
        self.handle = Handle(self.replica)
        self.registry = CollectorRegistry()
        self.backend = ChannelBackend(self.handle, self.handle, GatewayMetrics(self.registry))  # type: ignore[arg-type]
        return self

    async def _enter(self, about: About, job: Job, ticket: Ticket) -> AsyncIterator[Any]:
        self.entered.append(about)
        accepted = len(self.entered) <= self.capacity
        yield accepted, len(self.entered)
        if not accepted:
            await asyncio.sleep(0.01)  # whatever it still does
        else:
            async with aclosing(self.replica.stream(job, ticket)) as parcels:  # type: ignore[type-var]
                async for parcel in parcels:
                    yield parcel
        if self.finish is not None:
            await self.finish.wait()

    def count(self, series: str) -> float:
        """One of the replica's."""
        return counted(self.replica, series)

    def ways(self) -> dict[str, float]:
        """How often streams began in each way."""
        samples = next(f for f in self.registry.collect() if f.name == "gateway_channel_streams").samples
        return {s.labels["way"]: s.value for s in samples if s.name.endswith("_total") and s.value}

    async def connected(self) -> None:
        """Both ends know it."""
        await until(lambda: bool(self.replica._outlets._lines) and not self.connecting())

    def connecting(self) -> bool:
        assert self.backend._inlets is not None
        return any(isinstance(line, asyncio.Task) for line in self.backend._inlets._lines.values())

    async def stop(self) -> None:
        if self.backend._inlets is not None:
            self.backend._inlets.close()
        await self.replica._outlets.close()
        await self.replica._watchdog.stop()


async def collect(items: AsyncIterator[Item]) -> list[Item]:
    async with asyncio.timeout(SOON_S):
        return [item async for item in items]


async def given(items: Sequence[Item], gate: asyncio.Event | None = None) -> AsyncIterator[Item]:
    """Those items, the first at once and the others when the gate opens."""
    for number, item in enumerate(items):
        if number == 1 and gate is not None:
            await gate.wait()
        yield item


class Peer:
    """A connection to a replica, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def connect(cls, outlets: Outlets, *, greet: bool = True) -> "Peer":
        self = cls()
        assert outlets.offer is not None
        self.reader, self.writer = await asyncio.open_connection(outlets.offer.host, outlets.offer.port)
        if greet:
            self.say(pack_greeting(MAGIC, outlets.offer.token, "peer"))
            await self.message()
        return self

    def say(self, entry: bytes) -> None:
        self.writer.write(join([entry]))

    async def message(self) -> list[Any]:
        """The entries of the next message."""
        async with asyncio.timeout(SOON_S):
            (length,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            return unpack(await self.reader.readexactly(length))

    def close(self) -> None:
        self.writer.transport.abort()

    async def dropped(self) -> bool:
        async with asyncio.timeout(SOON_S):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True
