"""Serve's own way into a replica, for calls that did not come by Serve's transport.

A call is counted, limited, logged and measured by what Serve's actor and gRPC methods both hand it to. What this module
relies on beyond Ray's documented interface is there in Ray 2.60; where it is not, calls come as Serve sends them.

What this module does not do: transport (see `channel`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from serve_app.channel import About, Entrance, Ticket
from serve_app.protocol import Job

logger = logging.getLogger("ray.serve.ddtree.replica")
METHOD = "stream"


def own_entrance() -> Entrance | None:
    """That of the replica which this process is, with its method `stream`; None where calls must come as Serve sends
    them: outside of Serve, in another Ray, and where replicas run on an event loop of their own, which Serve's accounts
    are not for."""
    try:
        from ray._private.worker import global_worker
        from ray.serve._private.common import RequestMetadata

        serves = global_worker.actors[global_worker.actor_id]._replica_impl
        handle = serves.handle_request_with_rejection
        same_loop = serves._event_loop is asyncio.get_running_loop()
    except (ImportError, KeyError, AttributeError) as missing:
        logger.info("calls do not come over the channel: %r", missing)
        return None
    if not same_loop:
        logger.info("calls do not come over the channel: replicas run on an event loop of their own")
        return None

    async def enter(about: About, job: Job, ticket: Ticket) -> AsyncIterator[Any]:
        metadata = RequestMetadata(
            request_id=about.request_id,
            internal_request_id=about.internal_request_id,
            call_method=METHOD,
            route=about.route,
            app_name=about.app_name,
            session_id=about.session_id,
            tracing_context=about.trace,
            is_streaming=True,
            _by_reference=False,
            _on_separate_loop=False,
        )
        call = handle(metadata, job, ticket)
        try:
            verdict = await anext(call)
            yield verdict.accepted, verdict.num_ongoing_requests
            async for parcel in call:
                yield parcel
        finally:
            await call.aclose()

    return enter
