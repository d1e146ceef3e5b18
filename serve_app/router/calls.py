"""What a router has sent and not got back, by replica, so that a silent loss can end it.

A process that dies says so to its callers: its machine closes the connections. A machine that fails, or a network, says
nothing, and a call that only reads waits for ever. So once Serve no longer lists a replica, Ray is asked whether its
actor lives, until all its calls have ended or it is dead.

What this module does not do: find out that something is wrong; Serve's health checks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorDiedError, RayError
from ray.serve.request_router import PendingRequest, RunningReplica

from serve_app.router.opening import open_over_channel

logger = logging.getLogger("ray.serve.ddtree.ingress")
ASK_EVERY_S, ANSWER_WITHIN_S = 1.0, 5.0


class Calls:
    """Replica → its calls. Everything happens on `loop`. A watched replica is asked every `ask_every_s`, and given up
    to `answer_within_s` each time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ask_every_s: float = ASK_EVERY_S,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._loop, self._ask_every_s, self._answer_within_s = loop, ask_every_s, answer_within_s
        self._running: dict[str, set[Any]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def sent(self, name: str, call: Any) -> None:
        self._running.setdefault(name, set()).add(call)
        call.add_done_callback(lambda _: self._end_soon(name, call))

    def _end_soon(self, name: str, call: Any) -> None:
        """From whichever thread it ended on."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._ended, name, call)

    def of(self, name: str) -> int:
        return len(self._running.get(name, ()))

    def _ended(self, name: str, call: Any) -> None:
        calls = self._running.get(name, set())
        calls.discard(call)
        if not calls:
            self._running.pop(name, None)

    def lost(self, name: str) -> None:
        """It is dead: whoever waits for it shall know."""
        calls = list(self._running.get(name, ()))
        if calls:
            logger.warning("replica %s is dead and %d calls of it still waited", name, len(calls))
        for call in calls:
            call.cancel()

    def watch(self, name: str, replica: RunningReplica) -> None:
        """Serve lists it no longer: it finishes what it has, or is dead."""
        if self.of(name) and name not in self._watches:
            task = self._loop.create_task(self._until_ended(name, replica))
            self._watches[name] = task
            task.add_done_callback(lambda _: self._watches.pop(name))

    async def _until_ended(self, name: str, replica: RunningReplica) -> None:
        while self.of(name):
            try:
                answer = replica.get_queue_len(deadline_s=self._answer_within_s)
                await asyncio.wait_for(answer, self._answer_within_s)
            except ActorDiedError:
                self.lost(name)
                return
            except (RayError, TimeoutError):
                logger.debug("replica %s does not answer", name)
            await asyncio.sleep(self._ask_every_s)


class NotedReplica(RunningReplica):
    """A replica whose calls are noted as they are sent, those of streams over the channel where there is one."""

    def __init__(self, info: Any, note: Callable[[str, Any], None]) -> None:
        super().__init__(info)
        self._note = note

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> Any:
        opened = open_over_channel(pr, self) if with_rejection else None
        call = opened or super().try_send_request(pr, with_rejection)
        self._note(self.replica_id.unique_id, call)
        return call
