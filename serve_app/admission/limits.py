"""Token buckets, and a gate that lets a bounded number in, interactive requests before batch ones.

What this module does not do: know keys, requests or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

from serve_app.errors import Overloaded

Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")
LONGEST_RETRY_S = 60.0


class TokenBucket:
    """Holds at most one minute's allowance and refills steadily. What is taken may exceed what is there: costs that are
    known only afterwards are paid back by waiting.

    Args:
        per_minute: the allowance. clock: seconds, monotonic.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._most, self._clock = per_minute / 60, per_minute, clock
        self._level, self._at = per_minute, clock()

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there (or the bucket is full, where it is less); 0 if it is."""
        self._refill()
        return max(0.0, (min(amount, self._most) - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Negative amounts are given back."""
        self._refill()
        self._level = min(self._most, self._level - amount)


class Gate:
    """At most `slots` are inside, at most `max_queued` wait. Interactive ones go first, each class in its order. Where
    the queue is full an interactive request takes the place of the youngest waiting batch request."""

    def __init__(self, slots: int, max_queued: int) -> None:
        self._slots, self._max_queued = slots, max_queued
        self._inside, self._mean_s = 0, 1.0
        self._waiting: dict[Priority, deque[asyncio.Future[None]]] = {name: deque() for name in PRIORITIES}

    def waiting(self, priority: Priority) -> int:
        return len(self._waiting[priority])

    @contextlib.asynccontextmanager
    async def slot(self, priority: Priority) -> AsyncIterator[None]:
        """Raises Overloaded where the queue is full, or when pushed out of it."""
        await self._enter(priority)
        began = time.monotonic()
        try:
            yield
        finally:
            self._mean_s += 0.1 * (time.monotonic() - began - self._mean_s)
            self._leave()

    async def _enter(self, priority: Priority) -> None:
        if self._inside < self._slots:
            self._inside += 1
            return
        self._make_room(priority)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[priority].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The turn may have come in the same instant; then it is passed on.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()
            elif turn in self._waiting[priority]:
                self._waiting[priority].remove(turn)
            raise

    def _make_room(self, priority: Priority) -> None:
        if sum(map(len, self._waiting.values())) >= self._max_queued:
            self._forget_who_left()
        if sum(map(len, self._waiting.values())) < self._max_queued:
            return
        if priority != "interactive" or not self._waiting["batch"]:
            raise self._full()
        self._waiting["batch"].pop().set_exception(self._full())

    def _forget_who_left(self) -> None:
        """Some were cancelled in this turn of the event loop, and will say so in the next."""
        for name, turns in self._waiting.items():
            self._waiting[name] = deque(turn for turn in turns if not turn.done())

    def _full(self) -> Overloaded:
        ahead = 1 + sum(map(len, self._waiting.values()))
        retry_s = min(LONGEST_RETRY_S, max(1.0, self._mean_s * ahead / self._slots))
        return Overloaded("All queues are full; try again later.", retry_after=retry_s)

    def _leave(self) -> None:
        self._inside -= 1
        for name in PRIORITIES:
            while self._waiting[name] and self._inside < self._slots:
                turn = self._waiting[name].popleft()
                if not turn.done():
                    self._inside += 1
                    turn.set_result(None)
