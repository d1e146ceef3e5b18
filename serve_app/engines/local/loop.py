"""The engine's own thread: runs the step loop, takes work from any thread, delivers results to asyncio loops.

What this module does not do: know requests; it runs posted functions between steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from serve_app.engines.local.step import Stepper

logger = logging.getLogger(__name__)


class StepLoop:
    """One daemon thread that steps while there is work and sleeps otherwise.

    Args:
        on_death: called in the thread, with the error, when something outside of a step's own guard raised; the
            thread then ends.

    Attributes:
        beat: monotonic time at which the last step ended.
    """

    def __init__(self, stepper: Stepper, on_death: Callable[[BaseException], None]) -> None:
        self._stepper, self._on_death = stepper, on_death
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Any], None], Any]]] = defaultdict(list)
        self._thread = threading.Thread(target=self._main, name="ddtree-step-loop", daemon=True)
        self.beat = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, work: Callable[[], None]) -> bool:
        """Run `work` in the thread before its next step. From any thread. False, and never run, once the loop ends."""
        with self._wake:
            if self._stopping:
                return False
            self._posted.append(work)
            self._wake.notify()
            return True

    def send(self, loop: asyncio.AbstractEventLoop, receive: Callable[[Any], None], item: Any) -> None:
        """From the thread: have `receive(item)` called on an event loop, one wake-up for all of a forward."""
        self._outbox[loop].append((receive, item))

    def stop(self, last: Callable[[], None]) -> None:
        """Run `last` in the thread after all that was posted, and end it. Blocks until it has ended."""
        self._refuse_posts(last)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _refuse_posts(self, last: Callable[[], None] | None = None) -> None:
        with self._wake:
            if last is not None:
                self._posted.append(last)
            self._stopping = True
            self._wake.notify()

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while self._take():
                    if not self._stepper.scheduler.idle:
                        self._stepper.step(self._deliver)
                        self.beat = time.monotonic()
                    self._deliver()
        except BaseException as error:
            logger.exception("the step loop died")
            # First: whoever posts later learns at once that nobody is there, and whoever posted before is told next.
            self._refuse_posts()
            self._on_death(error)
        finally:
            self._deliver()

    def _take(self) -> bool:
        """Run what was posted, waiting while there is nothing to do. False when the loop is to end."""
        with self._wake:
            while not self._posted and not self._stopping and self._stepper.scheduler.idle:
                self._wake.wait()
            posted, stopping = list(self._posted), self._stopping
            self._posted.clear()
        for work in posted:
            work()
        return not stopping

    def _deliver(self) -> None:
        for loop, items in list(self._outbox.items()):
            with contextlib.suppress(RuntimeError):  # that event loop is closed: nobody is left to read
                loop.call_soon_threadsafe(_hand_over, items)
        self._outbox.clear()


def _hand_over(items: list[tuple[Callable[[Any], None], Any]]) -> None:
    for receive, item in items:
        receive(item)
