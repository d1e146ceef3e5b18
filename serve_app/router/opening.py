"""Serve's call of a stream, opened over the channel to its replica where there is one.

Serve's router chose the replica and counts the call; this is only how it travels, in place of gRPC.

What this module does not do: choose, or carry items (see `channel`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

from ray import ActorID
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import ReplicaQueueLengthInfo
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, RunningReplica

from serve_app.channel import About, Inlets, Opened, Ticket
from serve_app.protocol import Job


def open_over_channel(pending: PendingRequest, replica: RunningReplica) -> ChannelResult | None:
    """None where it must go as Serve sends it: another call than a stream's, another event loop than the channel's, no
    connection, or a job that fits no message."""
    if len(pending.args) != 2 or pending.kwargs:
        return None
    job, ticket = pending.args
    if not isinstance(job, Job) or not isinstance(ticket, Ticket) or pending.metadata._on_separate_loop:
        return None
    inlets = Inlets.of(ticket)
    line = inlets.line_to(replica.replica_id.unique_id) if inlets is not None else None
    if line is None:
        return None
    about = pending.metadata
    said = About(
        about.request_id, about.internal_request_id, about.route, about.app_name, about.session_id,
        about.tracing_context,
    )  # fmt: skip
    opened = line.open(ticket, said, job)
    return ChannelResult(opened, replica.actor_id) if opened is not None else None


class ChannelResult(ReplicaResult):
    """What Serve holds of such a call. No items come by it; it ends when the replica no longer counts it."""

    def __init__(self, opened: Opened, actor_id: ActorID) -> None:
        self._opened, self._actor_id = opened, actor_id

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        """Raises ActorUnavailableError where the replica never said whether it takes the call, so that Serve asks
        another; RayServeException where it could not read it."""
        try:
            takes = await self._opened.takes
        except asyncio.CancelledError:
            self.cancel()
            raise
        if takes is None:
            raise self._failure() or self._lost()
        accepted, ongoing = takes
        return ReplicaQueueLengthInfo(accepted=accepted, num_ongoing_requests=ongoing)

    async def __anext__(self) -> NoReturn:
        why = await self._opened.over
        if not why:
            raise StopAsyncIteration
        if why == "lost":
            raise self._lost()
        raise self._failure() or asyncio.CancelledError()

    def _failure(self) -> RayServeException | None:
        """What the replica raised of itself."""
        why = self._opened.over.result()
        if why in ("", "lost", "left", "CancelledError"):
            return None
        return RayServeException(f"The replica raised {why}.")

    def _lost(self) -> ActorUnavailableError:
        return ActorUnavailableError("The connection to the replica ended.", self._actor_id.binary())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """It is told nothing, as with gRPC: whoever reads the stream learns how it ended."""
        self._opened.over.add_done_callback(lambda _: callback(None))

    def cancel(self) -> None:
        self._opened.leave()

    async def get_async(self) -> NoReturn:
        raise self._streams_only()

    def get(self, timeout_s: float | None) -> NoReturn:
        raise self._streams_only()

    def __next__(self) -> NoReturn:
        raise self._streams_only()

    def to_object_ref(self) -> NoReturn:
        raise self._streams_only()

    async def to_object_ref_async(self) -> NoReturn:
        raise self._streams_only()

    def to_object_ref_gen(self) -> NoReturn:
        raise self._streams_only()

    @staticmethod
    def _streams_only() -> RayServeException:
        return RayServeException("A call over the channel is an asynchronous stream.")
