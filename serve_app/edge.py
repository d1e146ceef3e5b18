"""The outermost ASGI layer, inside Serve's HTTP proxy: what Serve answers by itself takes OpenAI's shape too.

The proxy reads some headers before the application does, and where no ingress answers (queues full, time up, process
lost) it says so in plain text, or ends a stream as if it were complete. Serve finds this module by its variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, see `launch`.

What this module does not do: touch what the application answered, other than to end a stream that broke off.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable

import orjson
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import DeadlineExceeded, NotReady, Overloaded, ReplicaLost, RouteNotFound, ServeError
from serve_app.protocol import DONE, error_frames

logger = logging.getLogger("ray.serve.ddtree.edge")
SANE_ID = re.compile(r"^[A-Za-z0-9._:/+=@-]{1,128}$")
REQUEST_ID_HEADER = "x-request-id"
TIMEOUT_HEADER = "x-request-timeout-seconds"
# The client's timeout under a name that Serve does not obey, so that the application's answer comes first.
FORWARDED_TIMEOUT_HEADER = "x-ddtree-timeout-seconds"
# Serve's: that nobody need watch for the client's leaving.
UNWATCHED_HEADER = "x-request-disconnect-disabled"
SERVES_OWN = frozenset(("/-/healthz", "/-/routes"))
RawHeaders = list[tuple[bytes, bytes]]


def middlewares() -> list[Middleware]:
    """What Serve's HTTP servers ask for: its proxy, and those of the ingress processes themselves."""
    return [Middleware(Edge, watched=_in_a_replica())]


def _in_a_replica() -> bool:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


class Edge:
    """See the module. Serve's own routes pass untouched.

    Args:
        watched: the application is in this process, and sees for itself whether its client leaves. Serve then does not
            as well, which would cost each request two tasks and a queue before its body is read.
    """

    def __init__(self, app: ASGIApp, *, watched: bool = False) -> None:
        self._app, self._watched = app, watched

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _refuse_websocket(scope, send)
            return
        if scope["type"] != "http" or scope["path"] in SERVES_OWN:
            await self._app(scope, receive, send)
            return
        headers, request_id = clean_headers(scope["headers"])
        if self._watched:
            headers.append((UNWATCHED_HEADER.encode(), b"?1"))
        answer = _Answer(send, request_id)
        try:
            await self._app({**scope, "headers": headers}, receive, answer.send)
        except Exception:
            logger.exception("request %s failed in the proxy", request_id)
            answer.failure = answer.failure or ServeError("The server failed on this request.")
        await answer.finish()


def clean_headers(raw: Iterable[tuple[bytes, bytes]]) -> tuple[RawHeaders, str]:
    """Headers that Serve can read, and the request id: the client's own if it is sane, else a new one."""
    kept: RawHeaders = []
    request_id = ""
    for name, value in raw:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            continue  # Serve decodes as it goes, and fails
        if name == REQUEST_ID_HEADER.encode():
            request_id = request_id or (text if SANE_ID.match(text) else "")
        elif name == TIMEOUT_HEADER.encode():
            kept.append((FORWARDED_TIMEOUT_HEADER.encode(), value))
        elif name != UNWATCHED_HEADER.encode():  # not the client's to say: its answers would run on without it
            kept.append((name, value))
    request_id = request_id or uuid.uuid4().hex
    return [*kept, (REQUEST_ID_HEADER.encode(), request_id.encode())], request_id


class _Answer:
    """One answer on its way out. `failure`: what is said in its place, if it has not begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._request_id = send, request_id
        self._started = self._ended = self._stream = False
        self._tail = b""
        self.failure: ServeError | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"text/plain")
            if message["status"] >= 400 and kind.startswith(b"text/plain"):
                self.failure = _failure(message["status"])
                return
            self._started, self._stream = True, kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            if not self._started:
                return
            self._ended = not message.get("more_body", False)
            if self._stream:
                self._tail = (self._tail + message.get("body", b""))[-len(DONE) :]
                if self._ended and self._tail != DONE:
                    message = {**message, "body": message.get("body", b"") + _broken_off()}
        await self._send(message)

    async def finish(self) -> None:
        """Say what the proxy left unsaid. A client that left does not hear it."""
        if not self._started:
            await _whole(self._send, self.failure or _lost(), self._request_id)
        elif self._stream and not self._ended:
            await self._send({"type": "http.response.body", "body": _broken_off(), "more_body": False})


async def _whole(send: Send, error: ServeError, request_id: str, kind: str = "http.response") -> None:
    body = orjson.dumps(error.body())
    headers = {
        "content-type": "application/json", "content-length": str(len(body)),
        REQUEST_ID_HEADER: request_id, **error.headers(),
    }  # fmt: skip
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": f"{kind}.start", "status": error.status, "headers": raw})
    await send({"type": f"{kind}.body", "body": body})


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """The application has none, and Serve's own routes fail on one."""
    kind = "websocket.http.response"
    if kind not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})  # the server says no in its own way
        return
    error = RouteNotFound("There are no WebSockets here; an answer may stream as server-sent events.")
    await _whole(send, error, clean_headers(scope["headers"])[1], kind)


def _failure(status: int) -> ServeError:
    """What a plain-text status of the proxy means to a client."""
    if status == 408:
        return DeadlineExceeded("The request was not answered within its time.")
    if status in (429, 503):
        return Overloaded("All queues are full; try again later.", retry_after=1)
    if status == 404:
        # The application takes every path: Serve has none yet, or no more.
        return NotReady("The service is not up.", retry_after=1)
    return ServeError("The server failed on this request.")


def _lost() -> ServeError:
    return ReplicaLost("The process that worked on this request is gone.", retry_after=1)


def _broken_off() -> bytes:
    # A frame that was cut short must not swallow the next.
    return b"\n\n" + error_frames(_lost())
