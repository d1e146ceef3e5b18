"""One client process's connections to the server, and a chat completion streamed through them.

What this module does not do: decide when to ask (`closed_loop` does), or run in several processes (`clients` does).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

from deploy.gpu_e2e.closed_loop import Timing


class Connection(asyncio.Protocol):
    """A client's connection, one request at a time; lines of an answer are given on as they come, with their time.

    Bare, because a client's own work would count as the server's: aiohttp takes 0.7 ms to hand over a first token.
    """

    def __init__(self) -> None:
        self.status, self.open = 0, True
        self._line: Callable[[bytes, float], None] = _ignore
        self._tail, self._now = b"", 0.0
        self._ended: asyncio.Future[None] | None = None

    @classmethod
    async def to(cls, host: str, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    async def ask(self, request: bytes, line: Callable[[bytes, float], None]) -> None:
        """Until the answer's end, or the connection's; `status` is its status, and `line` gets its body's lines.

        Raises what `line` raises.
        """
        self._line, self._tail, self.status = line, b"", 0
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        self._transport.close()

    # -- asyncio's and the parser's calls ---

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except Exception as error:  # of `line`, or of an answer that is no HTTP
            self._end(error.__context__ or error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._end(None)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        *lines, self._tail = (self._tail + body).split(b"\n")
        for line in lines:
            self._line(line, self._now)

    def on_message_complete(self) -> None:
        self.open = self.open and self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self._ended is not None and not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)


def _ignore(line: bytes, now: float) -> None: ...


class Pool:
    """Connections to one server: as many as are in use at once.

    Args:
        url: `http://host:port`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._idle: list[Connection] = []

    async def connect(self, count: int) -> None:
        """So many idle ones, each of which has been answered once."""
        made = [await self._take() for _ in range(count)]
        request = f"GET /health HTTP/1.1\r\nhost: {self._host}\r\n\r\n".encode()
        await asyncio.gather(*(connection.ask(request, _ignore) for connection in made))
        self._idle += made

    async def post(self, path: str, body: bytes, line: Callable[[bytes, float], None]) -> int:
        """The answer's status; `line` gets its lines. Raises what `line` raises."""
        connection = await self._take()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        await connection.ask(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body, line)
        self._idle.append(connection)
        return connection.status

    async def _take(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        return await Connection.to(self._host, self._port)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def http_stream(pool: Pool, model: str, questions: Sequence[str], tokens: int) -> Callable[[int], Any]:
    """Chat completions through HTTP.

    The callable raises RuntimeError for an answer that is no whole 200.
    """

    async def one(number: int) -> Timing:
        question = questions[number % len(questions)]
        body = {
            "model": model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        timing = Timing(number, time.perf_counter())
        texts, others, done = [], [], False

        def line(data: bytes, now: float) -> None:
            nonlocal done
            if not data.startswith(b"data: "):
                others.append(data)
                return
            if data.startswith(b"data: [DONE]"):
                done = True
                return
            event = orjson.loads(data[6:])
            if "error" in event:
                raise RuntimeError(f"error frame: {event['error']}")
            if event.get("usage"):
                timing.tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    timing.stamps.append(now)
                    texts.append(text)

        status = await pool.post("/v1/chat/completions", orjson.dumps(body), line)
        timing.end = time.perf_counter()
        if status != 200:
            raise RuntimeError(f"status {status}: {b' '.join(others)[:300].decode(errors='replace')}")
        if not done or not timing.stamps:
            raise RuntimeError("the stream was cut")
        timing.text = "".join(texts)
        return timing

    return one
