"""The outermost ASGI layer: request id, error envelope, and the metrics of every request.

Pure ASGI, because a middleware that wraps the response in another task hides the client's disconnect.

What this module does not do: decide about requests; routes fill in the `Record`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.admission import ANONYMOUS, Caller, Priority
from serve_app.edge import SANE_ID
from serve_app.errors import (
    Aborted,
    AuthenticationFailed,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    RateLimited,
    ServeError,
)
from serve_app.metrics import GatewayMetrics, exemplar
from serve_app.protocol import Origin
from serve_app.tracing import Tracer

logger = logging.getLogger("ray.serve.ddtree.ingress")
UNKNOWN_MODEL = "unknown"
UNMATCHED_ROUTE = "unmatched"
_REASONS: tuple[tuple[type[ServeError], str], ...] = (
    (AuthenticationFailed, "auth"),
    (RateLimited, "rate"),
    (Overloaded, "overload"),
    (NotReady, "overload"),
    (DeadlineExceeded, "deadline"),
)


class Disconnected(Aborted):
    """The client closed the connection."""


@dataclass
class Record:
    """What is known about the request in hand; `status` is what counts as its outcome, even after a 200 was sent."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    model: str = UNKNOWN_MODEL
    stream: bool = False
    status: int | None = None
    error: ServeError | None = None
    has_content: bool = False
    caller: Caller = ANONYMOUS
    priority: Priority = "interactive"
    body_bytes: int = 0
    session: str = ""
    tokens: int = 0
    span: Any = None
    trace: dict[str, str] = field(default_factory=dict)

    def origin(self) -> Origin:
        """What a job tells its replica about the request."""
        return Origin(self.request_id, self.trace, time.time_ns())


class RequestScope:
    """Wraps the application. `sets_request_id`: false where the server in front adds the header itself."""

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, *, sets_request_id: bool, tracer: Tracer | None = None
    ) -> None:
        self._app, self._metrics, self._sets_request_id, self._tracer = app, metrics, sets_request_id, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record = Record(given if SANE_ID.match(given) else uuid.uuid4().hex)
        if self._tracer is not None and scope["method"] == "POST":
            record.span = self._tracer.begin("POST", headers)
            record.trace = self._tracer.carry(record.span)
        scope.setdefault("state", {})["record"] = record
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = record.status or message["status"]
                if self._sets_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id, record, lambda: started)
        except asyncio.CancelledError:
            record.status = Aborted.status
            raise
        finally:
            self._observe(scope, record, started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: Record, started: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except ServeError as error:
            failure = error
        except Exception:
            logger.exception("request %s failed", record.request_id)
            failure = ServeError("The server failed on this request.")
        else:
            return
        record.error, record.status = failure, failure.status
        if not started():
            await send_error(failure, send)

    def _observe(self, scope: Scope, record: Record, started: bool) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED_ROUTE)
        status = record.status or ServeError.status
        self._metrics.requests.labels(route, str(status), record.model).inc()
        if self._tracer is not None and record.span is not None:
            about = {"request.id": record.request_id, "gen_ai.request.model": record.model}
            self._tracer.finish(record.span, "POST", route, status, about)
        seconds = round(time.monotonic() - record.started, 4)
        fields = {
            "request_id": record.request_id, "endpoint": route, "status": status, "model": record.model,
            "stream": record.stream, "tokens": record.tokens, "seconds": seconds,
        }  # fmt: skip
        if record.error is None:
            if scope["method"] == "POST":
                logger.info("request %s on %s: %d in %s s", record.request_id, route, status, seconds, extra=fields)
            return
        reason = reject_reason(record.error)
        # A probe that fails refuses nobody, and an answer that broke off had been accepted.
        if reason is not None and scope["method"] == "POST" and not (started and record.stream):
            self._metrics.rejected.labels(reason).inc()
        code, param = record.error.code, record.error.param
        why = "".join((f" {code}" if code else "", f" param={param}" if param else ""))
        said = (record.request_id, route, status, why)
        logger.info("request %s on %s: %d%s", *said, extra={**fields, "code": code, "param": param})


def reject_reason(error: ServeError) -> str | None:
    """The label of `gateway_rejected_total`; None for failures that are not refusals."""
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    return "invalid" if 400 <= error.status < 500 and not isinstance(error, Aborted) else None


@contextlib.contextmanager
def generating(metrics: GatewayMetrics, record: Record) -> Iterator[None]:
    """Counts a request as in flight, and its time whatever its outcome; requests refused before are not timed."""
    inflight = metrics.inflight.labels(record.model)
    inflight.inc()
    try:
        yield
    finally:
        inflight.dec()
        stream = "true" if record.stream else "false"
        elapsed = time.monotonic() - record.started
        metrics.duration.labels(record.model, stream).observe(elapsed, exemplar(record.request_id))


async def send_error(error: ServeError, send: Send) -> None:
    """The envelope as a whole response."""
    body = orjson.dumps(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
