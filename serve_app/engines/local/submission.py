"""One submitted request as its reader sees it: a queue fed by the step loop, read by one task.

What this module does not do: generate, or decide what is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from serve_app.engines.base import Chunk
from serve_app.engines.local.sequence import Sequence
from serve_app.errors import ServeError


class Submission:
    """The choices of one request, and what they produced so far.

    Attributes:
        sequences: one per choice. loop: the reader's event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.sequences: list[Sequence] = []
        self._arrived: asyncio.Queue[Chunk | ServeError] = asyncio.Queue()

    def receive(self, item: Chunk | ServeError) -> None:
        """On the event loop: one more chunk, or the error that ends everything."""
        self._arrived.put_nowait(item)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Until every choice has finished. Raises the error that ended the request."""
        open_choices = len(self.sequences)
        while open_choices:
            item = await self._arrived.get()
            if isinstance(item, ServeError):
                raise item
            open_choices -= item.finish_reason is not None
            yield item
