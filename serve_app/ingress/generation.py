"""Answering one generation: peek at the first item, choose the status line, pass the frames on, measure.

What this module does not do: validation and rendering (see `protocol`); routes (see `routes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Histogram
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.admission import BYTES_PER_TOKEN, Admission
from serve_app.config import Config
from serve_app.engines.base import ModelInfo
from serve_app.errors import EngineFailed, NotReady, ServeError
from serve_app.ingress.backend import Backend
from serve_app.ingress.failover import Failover
from serve_app.ingress.limits import bounded
from serve_app.ingress.scope import Disconnected, Record, generating
from serve_app.metrics import GatewayMetrics, exemplar, observe_gaps
from serve_app.protocol import Item, Job, error_frames
from serve_app.tracing import Tracer

logger = logging.getLogger("ray.serve.ddtree.ingress")
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

# How long the end of an answer may wait for a client that does not read, although its time is up.
LAST_WORDS_S = 10.0


@dataclass
class Gateway:
    """What the routes of one ingress process share. `name` is the process's label on /metrics."""

    config: Config
    backend: Backend
    registry: CollectorRegistry
    metrics: GatewayMetrics
    admission: Admission
    name: str = "ingress"
    tracer: Tracer | None = None
    last_token_at: float | None = None


class Generation(Response):
    """An ASGI response that runs the job. `make_job` may still raise what only the model's facts decide."""

    def __init__(
        self, gateway: Gateway, record: Record, deadline_at: float, make_job: Callable[[ModelInfo], Job]
    ) -> None:
        super().__init__()
        self._gateway, self._record, self._deadline_at, self._make_job = gateway, record, deadline_at, make_job
        self._streaming = False
        self._itl: Histogram | None = None
        self._last = record.started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        try:
            with generating(self._gateway.metrics, self._record):
                async with bounded(receive, self._deadline_at):
                    body = await self._run(send)
        except ServeError as error:
            self._doubt(error)
            if not self._streaming or isinstance(error, Disconnected):
                raise
            body = self._broken(error)
        except Exception:
            if not self._streaming:
                raise
            logger.exception("request %s failed in its stream", self._record.request_id)
            body = self._broken(ServeError("The server failed on this request."))
        # Outside the watch: the server may report a disconnect as soon as the last message is out.
        try:
            async with asyncio.timeout_at(max(self._deadline_at, time.monotonic() + LAST_WORDS_S)):
                if not self._streaming:
                    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": False})
        except TimeoutError:
            raise Disconnected("The client does not read its answer.") from None

    async def _run(self, send: Send) -> bytes:
        """Returns what is still to be sent as the last message."""
        gateway = self._gateway
        info = await gateway.backend.info()
        job = replace(self._make_job(info), session=self._record.session, origin=self._record.origin())
        async with gateway.admission.slot(self._record.caller, self._record.priority):
            return await self._generate(job, info, send)

    async def _generate(self, job: Job, info: ModelInfo, send: Send) -> bytes:
        gateway, n = self._gateway, job.requests[0].sampling.n
        config = gateway.config
        most = config.autoscaling.max_replicas or config.replica.num_replicas
        failover = Failover(gateway.backend, config.ingress, gateway.metrics, most)
        # Until the engine has counted; it stays where the client leaves before, and goes where the engine refuses.
        guess = self._record.body_bytes / BYTES_PER_TOKEN
        self._record.caller.charge(guess)
        async with contextlib.aclosing(failover.items(job, info)) as items:  # type: ignore[type-var]
            try:
                with gateway.metrics.queued.labels(job.model).track_inprogress():
                    first = await anext(items, None)
                if first is None:
                    raise EngineFailed("The engine gave no answer.")
                if first.error is not None:
                    raise first.error  # the status line can still tell it
            except ServeError:
                self._record.caller.charge(-guess)
                raise
            if not job.stream:
                return await self._whole(first, items, n)
            self._streaming = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            if first.last:
                self._seen(first, n, time.monotonic())
                return first.data
            await self._pass_on(first, n, send)
            async for item in items:
                if item.error is not None:
                    self._fail(item.error)
                    return item.data
                if item.last:
                    self._seen(item, n, time.monotonic())
                    return item.data
                await self._pass_on(item, n, send)
        return b""

    async def _pass_on(self, item: Item, n: int, send: Send) -> None:
        """The client has it before it is counted; it counts as of now, and whether or not the client is still there."""
        now = time.monotonic()
        try:
            await send({"type": "http.response.body", "body": item.data, "more_body": True})
        finally:
            self._seen(item, n, now)

    def _charge(self, item: Item, n: int) -> None:
        record, admission = self._record, self._gateway.admission
        record.caller.charge(item.tokens)
        admission.used(record.caller, "completion", item.tokens)
        for part in item.progress:
            # The choices of a prompt share it.
            if part.usage is not None and part.choice % n == 0:
                record.caller.charge(part.usage.prompt_tokens - record.body_bytes / BYTES_PER_TOKEN)
                record.body_bytes = 0
                admission.used(record.caller, "prompt", part.usage.prompt_tokens)

    async def _whole(self, last: Item, items: AsyncIterator[Item], n: int) -> bytes:
        """The body of an answer that does not stream: it comes in the last item."""
        self._seen(last, n, time.monotonic())
        async for last in items:
            if last.error is not None:
                raise last.error
            self._seen(last, n, time.monotonic())
        if not last.data:
            raise EngineFailed("The engine gave no answer.")
        return last.data

    def _seen(self, item: Item, n: int, now: float) -> None:
        """It came at `now`, of `time.monotonic`."""
        self._charge(item, n)
        self._record.tokens += item.tokens
        if item.tokens:
            self._gateway.last_token_at = now
        if not self._record.stream:
            return
        if item.content and not self._record.has_content:
            self._record.has_content = True
            metrics, labels = self._gateway.metrics, (self._record.model, "true")
            metrics.ttft.labels(*labels).observe(now - self._record.started, exemplar(self._record.request_id))
            self._itl = metrics.itl.labels(*labels)
        elif self._itl is not None and item.tokens:
            observe_gaps(self._itl, [(now - self._last, item.tokens)])
        self._last = now

    def _broken(self, error: ServeError) -> bytes:
        self._fail(error)
        return error_frames(error)

    def _doubt(self, error: ServeError) -> None:
        """After a lost replica or a failed engine, earlier tokens prove nothing to /ready."""
        if isinstance(error, (NotReady, EngineFailed)):
            self._gateway.last_token_at = None

    def _fail(self, error: ServeError) -> None:
        self._doubt(error)
        self._record.error, self._record.status = error, error.status
        self._gateway.metrics.stream_errors.labels(self._record.model).inc(exemplar=exemplar(self._record.request_id))


async def is_ready(gateway: Gateway) -> None:
    """Raises NotReady unless a token came lately, through this process or in a replica, or comes now."""
    limits = gateway.config.ingress
    last = gateway.last_token_at
    if last is not None and time.monotonic() - last <= limits.ready_max_age_s:
        return
    await gateway.backend.probe(limits.ready_max_age_s, limits.ready_timeout_s)
