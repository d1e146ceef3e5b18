"""One submitted request between two event loops: its reader's, and SGLang's, where its choices are fed.

What this module does not do: know what SGLang answers (`choice`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from serve_app.engines.base import Chunk
from serve_app.engines.sglang.choice import Choice
from serve_app.engines.sglang.host import Host
from serve_app.errors import ReplicaLost, ServeError


class Submission:
    """The choices of one request.

    Args:
        loop: the reader's. choices: how many there will be.

    Attributes:
        open: choices that have not ended. loop: the reader's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, choices: int) -> None:
        self.open, self.loop = choices, loop
        self._arrived: deque[Chunk | ServeError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._work: list[tuple[Host, Choice]] = []

    def add(self, host: Host, choice: Choice) -> None:
        """One of its choices, which SGLang's loop will feed."""
        self._work.append((host, choice))

    def send(self, item: Chunk | ServeError) -> None:
        """From any thread: one more chunk, or the error that ends everything."""
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed
            self.loop.call_soon_threadsafe(self.arrive, item)

    def arrive(self, item: Chunk | ServeError) -> None:
        """`send`, on the reader's loop."""
        self._arrived.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def lose(self) -> None:
        """From any thread: SGLang is gone, and what it generates with it."""
        self.send(ReplicaLost("The engine died while it worked on this request.", retry_after=1))

    def end_all(self) -> None:
        """Ask for the end of every choice; each still sends its last chunk."""
        for host, choice in self._work:
            host.post(_end, host, self, choice)

    def leave(self) -> None:
        """The reader is gone: nothing more is sent, and SGLang shall not work on it."""
        for host, choice in self._work:
            host.post(_leave, host, choice)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Until every choice has ended. Raises the error that ended the request."""
        while self.open:
            while not self._arrived:
                self._waiter = self.loop.create_future()
                await self._waiter
            item = self._arrived.popleft()
            if isinstance(item, ServeError):
                raise item
            self.open -= item.finish_reason is not None
            yield item


class Courier:
    """On SGLang's loop: gathers what one step made, so that each reader's loop is woken once for all of it."""

    def __init__(self) -> None:
        self._gathered: dict[asyncio.AbstractEventLoop, list[tuple[Submission, Chunk | ServeError]]] = {}

    def put(self, submission: Submission, item: Chunk | ServeError) -> None:
        self._gathered.setdefault(submission.loop, []).append((submission, item))

    def go(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for loop, items in gathered.items():
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(_hand_over, items)


def _hand_over(items: list[tuple[Submission, Chunk | ServeError]]) -> None:
    for submission, item in items:
        submission.arrive(item)


def _end(host: Host, submission: Submission, choice: Choice) -> None:
    """On SGLang's loop. The reader has its answer at once, whatever the scheduler is busy with."""
    if not choice.over:
        submission.send(choice.aborted())
        host.manager.abort_request(choice.rid)


def _leave(host: Host, choice: Choice) -> None:
    if not choice.over:
        choice.over = True
        host.manager.abort_request(choice.rid)
