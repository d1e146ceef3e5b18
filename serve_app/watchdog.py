"""Proves again and again that an engine generates, apart from the requests and from whoever asks about it.

What this module does not do: end or replace anything. Serve does, once its health checks are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from serve_app.config import ReplicaConfig
from serve_app.engines.base import Engine
from serve_app.errors import EngineFailed

logger = logging.getLogger("ray.serve.ddtree.replica")


class Watchdog:
    """Generates a token whenever none came for `health_check_period_s`.

    An engine that takes longer than `stuck_after_s` has failed, except within `warmup_grace_s` of the start, when it
    may still compile; one that says itself that it is dead has failed at once. A later token is a recovery.
    """

    def __init__(self, engine: Engine, config: ReplicaConfig) -> None:
        self._engine, self._config = engine, config
        self._started = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self.failure: EngineFailed | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_check_period_s)
            await self.look()

    async def look(self) -> None:
        """One proof; its outcome is `failure`."""
        try:
            await prove(self._engine, self._config.health_check_period_s, self._config.stuck_after_s)
        except Stuck as error:
            if time.monotonic() - self._started > self._config.warmup_grace_s:
                self._fail(error)
        except Exception as error:
            self._fail(error if isinstance(error, EngineFailed) else EngineFailed(f"{type(error).__name__}: {error}"))
        else:
            self.failure = None

    def _fail(self, error: EngineFailed) -> None:
        if self.failure is None:
            logger.error("the engine does not generate: %s", error.message)
        self.failure = error


class Stuck(EngineFailed):
    """No token came in time."""


async def prove(engine: Engine, max_age_s: float, timeout_s: float) -> None:
    """Returns when a token came within `max_age_s`, or comes now within `timeout_s`. Raises Stuck, or what the engine
    raises."""
    if _generated_since(engine, time.monotonic() - max_age_s):
        return
    began = time.monotonic()
    try:
        await asyncio.wait_for(engine.health(), timeout_s)
    except TimeoutError:
        # Its own token may wait behind other prompts all this time, whose tokens prove as much.
        if not _generated_since(engine, began):
            raise Stuck(f"The engine generated no token within {timeout_s:g} s.") from None


def _generated_since(engine: Engine, moment: float) -> bool:
    age = engine.stats().last_token_age_s
    return age is not None and time.monotonic() - age >= moment
