"""Bounds on one request: its body, its time, and the client's patience.

What this module does not do: parse (see `protocol`) or send.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from serve_app.edge import FORWARDED_TIMEOUT_HEADER, TIMEOUT_HEADER
from serve_app.errors import BodyTooLarge, DeadlineExceeded, UnsupportedMediaType
from serve_app.ingress.scope import Disconnected, Record


def deadline(record: Record, headers: Headers, limit_s: float) -> float:
    """Monotonic time at which the request must have been answered.

    Where `edge` is not in front, Serve's proxy obeys the client's header, with a plain-text answer; a tenth less lets
    ours come first.
    """
    forwarded = headers.get(FORWARDED_TIMEOUT_HEADER)
    try:
        wanted = float(headers.get(TIMEOUT_HEADER, "")) * 0.9 if forwarded is None else float(forwarded)
    except ValueError:
        wanted = 0.0
    return record.started + (min(limit_s, wanted) if wanted > 0 else limit_s)


async def read_body(request: Request, limit: int, deadline_at: float) -> bytes:
    """The body, at most `limit` bytes of it read.

    Raises:
        UnsupportedMediaType, BodyTooLarge, Disconnected, DeadlineExceeded.
    """
    _check_type(request.headers)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise BodyTooLarge(f"The request body may have at most {limit} bytes.")
    parts, size = [], 0
    try:
        async with asyncio.timeout_at(deadline_at):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected("The client closed the connection.")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise BodyTooLarge(f"The request body may have at most {limit} bytes.")
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise DeadlineExceeded("The request body did not arrive in time.") from None


def _check_type(headers: Headers) -> None:
    media, *parameters = [part.strip().lower() for part in headers.get("content-type", "").split(";")]
    charsets = [p.partition("=")[2].strip('" ') for p in parameters if p.startswith("charset")]
    if media != "application/json" or any(c not in ("utf-8", "utf8", "us-ascii") for c in charsets):
        raise UnsupportedMediaType("Send the body as Content-Type: application/json, in UTF-8.")
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("Send the body without a Content-Encoding.")


@contextlib.asynccontextmanager
async def bounded(receive: Receive, deadline_at: float) -> AsyncIterator[None]:
    """Runs its body until the client is gone or the time is up; the body must have been read.

    One watcher for the whole answer, and cancellation as in `asyncio.timeout`: nothing is paid per chunk.

    Raises:
        Disconnected, DeadlineExceeded.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        async with asyncio.timeout_at(deadline_at):
            yield
    except TimeoutError:
        raise DeadlineExceeded("The request was not answered within its time.") from None
    except asyncio.CancelledError:
        # Serve may cancel as well: then the cancellation is not ours to swallow.
        if gone and task.uncancel() == 0:
            raise Disconnected("The client closed the connection.") from None
        raise
    finally:
        watcher.cancel()
