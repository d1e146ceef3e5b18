"""A backend whose handle is a replica of this process, and the replica's sockets seen from outside."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from ray.serve.exceptions import RequestCancelledError

from serve_app.channel import Outlets, Parcel, Ticket
from serve_app.channel.wire import HEADER, MAGIC, join, pack_greeting, unpack
from serve_app.ingress.backend import ChannelBackend
from serve_app.metrics import GatewayMetrics
from serve_app.protocol import Item, Job
from serve_app.replica import Replica
from tests.direct import make_replica


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


class Handle:
    """As much of a deployment handle as a backend uses to generate."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.calls: list[Call] = []

    def options(self, **options: Any) -> "Handle":
        return self

    @property
    def stream(self) -> "Handle":
        return self

    def remote(self, job: Job, ticket: Ticket) -> Call:
        self.calls.append(Call(self._replica.stream(job, ticket)))
        return self.calls[-1]


class Loopback:
    """`backend` over `replica`, which listens on this machine unless told not to."""

    backend: ChannelBackend
    replica: Replica
    handle: Handle

    @classmethod
    async def start(cls, *, listen: bool = True) -> "Loopback":
        self = cls()
        self.replica = await make_replica()
        if listen:
            await self.replica._outlets.open("127.0.0.1")
        self.handle = Handle(self.replica)
        self.registry = CollectorRegistry()
        self.backend = ChannelBackend(self.handle, self.handle, GatewayMetrics(self.registry))  # type: ignore[arg-type]
        return self

    def ways(self) -> dict[str, float]:
        """How often streams began in each way."""
        samples = next(f for f in self.registry.collect() if f.name == "gateway_channel_streams").samples
        return {s.labels["way"]: s.value for s in samples if s.name.endswith("_total") and s.value}

    async def connected(self) -> None:
        async with asyncio.timeout(5):
            while not self.replica._outlets._lines:
                await asyncio.sleep(0.001)

    async def stop(self) -> None:
        if self.backend._inlets is not None:
            self.backend._inlets.close()
        await self.replica._outlets.close()
        await self.replica._watchdog.stop()


async def collect(items: AsyncIterator[Item]) -> list[Item]:
    async with asyncio.timeout(20):
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
        async with asyncio.timeout(5):
            (length,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            return unpack(await self.reader.readexactly(length))

    def close(self) -> None:
        self.writer.transport.abort()

    async def dropped(self) -> bool:
        async with asyncio.timeout(5):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True
