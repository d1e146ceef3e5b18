"""What the routes need from behind the HTTP layer, and its implementation over Ray Serve handles.

Tokens take the way of `serve_app.channel`, or that of the handle call alone. Only errors of `serve_app.errors` come out
of either.

What this module does not do: HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

import grpc
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from serve_app.channel import Inlet, Inlets
from serve_app.channel.wire import lost
from serve_app.engines.base import GenerateRequest, ModelInfo
from serve_app.errors import EngineFailed, NoReplicas, NotReady, Overloaded, ServeError
from serve_app.metrics import GatewayMetrics
from serve_app.protocol import Item, Job

logger = logging.getLogger("ray.serve.ddtree.ingress")
PROBE_ATTEMPTS = 2


class Backend(Protocol):
    def generate(self, job: Job) -> AsyncIterator[Item]:
        """Items of a job; closing the iterator, or cancelling its reader, aborts it in the engine."""

    async def info(self) -> ModelInfo: ...

    async def probe(self, max_age_s: float, timeout_s: float) -> None:
        """Raises NotReady unless a replica generated within `max_age_s`, or does now."""

    async def tokenize(self, request: GenerateRequest) -> list[int]: ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...

    async def pages(self) -> dict[str, str]:
        """Exporters that live now: replica → URL."""

    async def targets(self) -> list[dict[str, Any]]:
        """Those exporters for Prometheus's service discovery. Raises NotReady while some may not have reported yet."""


class HandleBackend:
    """Replicas behind a deployment handle, exporters behind another.

    Args:
        patience_s: how long a request waits for the first answer of a replica, which may be loading still.
    """

    def __init__(self, replicas: DeploymentHandle, exporters: DeploymentHandle, patience_s: float = 5) -> None:
        self._replicas, self._exporters, self._patience_s = replicas, exporters, patience_s
        # Whatever travels can be imported at the other end, so plain pickle does, in a third of the time.
        self._streaming = replicas.options(stream=True, request_serialization="pickle", response_serialization="pickle")
        self._info: ModelInfo | None = None
        self._asking: asyncio.Task[None] | None = None

    async def generate(self, job: Job) -> AsyncIterator[Item]:
        stream: Any = self._streaming.generate.remote(job)
        finished = False
        try:
            with _ray_errors():
                async for item in stream:
                    # The call ends by itself, a little later.
                    finished = item.last
                    yield item
            finished = True
        finally:
            if not finished:
                stream.cancel()

    async def info(self) -> ModelInfo:
        # Fixed for the life of the deployment: another model is another version of it, with new ingresses.
        until = asyncio.get_running_loop().time() + self._patience_s
        while self._info is None:
            # One question for all who wait: each would take a place in a replica from a generation, or wait behind one.
            if self._asking is None or self._asking.done():
                # In no request's context: Serve would end the call with the request that happened to begin it.
                self._asking = asyncio.create_task(self._ask(), context=contextvars.Context())
                self._asking.add_done_callback(_retrieve)
            try:
                async with asyncio.timeout_at(until):
                    await asyncio.shield(self._asking)
            except TimeoutError:
                message = "No replica has said yet what it serves: it is loading, or full."
                raise NotReady(message, retry_after=self._patience_s) from None
        return self._info

    async def _ask(self) -> None:
        """Given up, for another question, before those who wait are: a replica that hangs says nothing until Serve
        ends it, and by then the router suspects it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s / PROBE_ATTEMPTS):
                with _ray_errors():
                    self._info = await self._replicas.info.remote()

    async def probe(self, max_age_s: float, timeout_s: float) -> None:
        reply: Any = None
        for _ in range(PROBE_ATTEMPTS):
            # The handle picks a replica; a second try is likely to meet another than a broken one.
            with contextlib.suppress(TimeoutError, ServeError), _ray_errors():
                call = self._replicas.probe.remote(max_age_s, timeout_s / PROBE_ATTEMPTS)
                reply = await asyncio.wait_for(call, timeout_s / PROBE_ATTEMPTS + 0.5)
                if reply.error is None:
                    return
        raise (reply.error if reply is not None else NotReady("No replica answers."))

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        result: list[int] = await self._call(self._replicas.tokenize.remote(request))
        return result

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        result: str = await self._call(self._replicas.detokenize.remote(list(token_ids)))
        return result

    async def pages(self) -> dict[str, str]:
        with _ray_errors():
            result: dict[str, str] = await self._exporters.living.remote()
        return result

    async def targets(self) -> list[dict[str, Any]]:
        with _ray_errors():
            result: list[dict[str, Any]] | None = await self._exporters.targets.remote()
        if result is None:
            # Prometheus keeps the list it has, which is better than a part of the next one.
            raise NotReady("The exporters are still reporting.", retry_after=1)
        return result

    async def _call(self, response: Any) -> Any:
        with _ray_errors():
            reply = await response
        if reply.error is not None:
            raise reply.error
        return reply.value


class ChannelBackend(HandleBackend):
    """The same, with the items of all streams from a replica on one connection. The call is what Serve counts, what
    tells of a loss and what cancels; it brings the items itself where there is no connection."""

    def __init__(
        self, replicas: DeploymentHandle, exporters: DeploymentHandle, metrics: GatewayMetrics, patience_s: float = 5
    ) -> None:
        super().__init__(replicas, exporters, patience_s)
        self._open = self._streaming.stream
        self._metrics = metrics
        self._inlets: Inlets | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(self, job: Job) -> AsyncIterator[Item]:
        if self._inlets is None:
            self._inlets = Inlets()
        inlet = self._inlets.open()
        call: Any = self._open.remote(job, inlet.ticket)
        reader = asyncio.create_task(_read(call, inlet))
        self._calls.add(reader)
        reader.add_done_callback(self._calls.discard)
        finished = counted = False
        try:
            while (item := await inlet.next()) is not None:
                if not counted:
                    counted = True
                    self._metrics.channel_streams.labels(inlet.way).inc()
                # The call ends by itself, a little later.
                finished = item.last
                yield item
            finished = True
        finally:
            inlet.close()
            if not finished:
                reader.cancel()
                call.cancel()


def _retrieve(task: asyncio.Task[None]) -> None:
    """Else asyncio complains of a failure that met nobody who waited."""
    if not task.cancelled():
        task.exception()


async def _read(call: Any, inlet: Inlet) -> None:
    """What comes on a stream's handle call."""
    try:
        with _ray_errors():
            async for parcel in call:
                inlet.parcel(parcel)
                await inlet.room()
    except Exception as error:
        inlet.fail(error)
    else:
        inlet.call_ended()


@contextlib.contextmanager
def _ray_errors() -> Iterator[None]:
    try:
        yield
    except BackPressureError:
        raise Overloaded("All queues are full; try again later.", retry_after=1) from None
    except RayActorError:
        raise lost() from None
    except DeploymentUnavailableError:
        raise NoReplicas("The service has no replica.", retry_after=1) from None
    except (asyncio.CancelledError, RequestCancelledError):
        # Where replicas speak gRPC, a cancellation at their end arrives as this too; only this task's own is passed on.
        # Where the call is cancelled as well, Serve gives the task's own the second name.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise asyncio.CancelledError from None
        raise lost() from None
    except (RayError, RayServeException, grpc.RpcError) as error:
        logger.error("replica call failed", exc_info=error)
        raise EngineFailed("The replica failed while it worked on this request.") from None
