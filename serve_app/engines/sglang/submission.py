"""One submitted request between two event loops: its reader's, and SGLang's, where each choice has a task.

What this module does not do: know what SGLang answers (`choice`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from serve_app.engines.base import Chunk
from serve_app.engines.sglang.choice import Choice
from serve_app.engines.sglang.host import Host
from serve_app.errors import EngineFailed, ReplicaLost, ServeError


class Submission:
    """The choices of one request.

    Args:
        loop: the reader's. choices: how many there will be.

    Attributes:
        open: choices that have not ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, choices: int) -> None:
        self.open = choices
        self._loop = loop
        self._arrived: asyncio.Queue[Chunk | ServeError] = asyncio.Queue()
        self._work: list[tuple[Host, Choice]] = []

    def run(self, host: Host, choice: Choice, task: Future[Any]) -> None:
        """`task` is the choice's, on SGLang's loop."""
        self._work.append((host, choice))
        task.add_done_callback(self._ended)

    def _ended(self, task: Future[Any]) -> None:
        """A task that was cancelled or failed said nothing to the reader."""
        if task.cancelled():
            self.lose()
        elif (error := task.exception()) is not None:
            failure = EngineFailed("The engine failed while it worked on this request.")
            failure.__cause__ = error
            self.send(failure)

    def send(self, item: Chunk | ServeError) -> None:
        """From any thread: one more chunk, or the error that ends everything."""
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, item)

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
            item = await self._arrived.get()
            if isinstance(item, ServeError):
                raise item
            self.open -= item.finish_reason is not None
            yield item


def _end(host: Host, submission: Submission, choice: Choice) -> None:
    """On SGLang's loop. The reader has its answer at once, whatever the scheduler is busy with."""
    if not choice.over:
        submission.send(choice.aborted())
        host.manager.abort_request(choice.rid)


def _leave(host: Host, choice: Choice) -> None:
    if not choice.over:
        choice.over = True
        host.manager.abort_request(choice.rid)
