"""An answer outlives its replica: when that is lost, the job goes to another one, behind the tokens already sent.

A job of which nothing was sent yet starts anew; that covers every answer that does not stream. How often is bounded,
because the request itself may be what ends replicas. A replica whose engine had died before took nothing of the job:
until Serve has replaced it, each job that meets it goes on to others at once. Nor does one whose engine is full refuse
for the others.

What this module does not do: choose the replica (a job names those to avoid), or notice that one hangs (Serve's health
checks end those).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from serve_app.config import IngressConfig
from serve_app.engines.base import GenerateRequest, ModelInfo
from serve_app.errors import (
    EngineFailed,
    EngineGone,
    NoReplicas,
    NotReady,
    Overloaded,
    ReplicaLost,
    ServeError,
    Unsupported,
)
from serve_app.ingress.backend import Backend
from serve_app.metrics import GatewayMetrics
from serve_app.protocol import Item, Job, Progress, merge

logger = logging.getLogger("ray.serve.ddtree.ingress")
# What a lost replica and one that was told to go leave behind.
LOST_CODES = ("replica_lost", "aborted")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
# How many others a job is shown that a full engine refused: one may be full alone, since routers count requests, and
# engines choices. Few, because when all are full each costs one more refusal.
OTHERS_IF_FULL = 2
# How often a job may come again to an engine that is gone: Serve's own router does not ask what a job has met, and may
# find another all the same.
MET_AGAIN = 3


def may_resume(job: Job, info: ModelInfo, policy: IngressConfig) -> bool:
    """Whether a job of which tokens were sent may go on elsewhere. Fresh randomness continues an unseeded sample as
    well as the old would have; a seed promises one text, which the engine must be able to keep."""
    sampling = job.requests[0].sampling
    if policy.resume == "never" or info.continues == "none" or _has_grammar(job.requests[0]):
        return False  # a grammar knows nothing of what was sent
    if sampling.temperature == 0:
        return True
    return policy.resume == "all" and (sampling.seed is None or info.continues == "seeded")


def _has_grammar(request: GenerateRequest) -> bool:
    """Whether one surely holds its answer: to a schema, to calls, or to a tool's arguments."""
    strict = any(tool["function"].get("strict") for tool in request.tools or ())
    return request.sampling.json_schema is not None or strict or (bool(request.tools) and request.tool_choice != "auto")


@dataclass(frozen=True)
class Failover:
    """Runs jobs over `backend`, across lost replicas. `replicas`: how many there may be at most."""

    backend: Backend
    policy: IngressConfig
    metrics: GatewayMetrics
    replicas: int

    async def items(self, job: Job, info: ModelInfo) -> AsyncIterator[Item]:
        """The job's items, whichever replicas they come from. While the others are full a resumed job waits: its
        client already has a part of the answer. The reader's deadline bounds everything.

        Raises:
            NotReady (`replica_lost`, `aborted`) where the job may not go on, the engine cannot, or no replica is left;
            EngineFailed (`replica_lost`, not to be retried) where it lost more replicas than policy allows; EngineGone
            where no replica that it met had an engine; whatever the backend raises otherwise.
        """
        parts: list[Progress] = []
        lost, full, met_again, wait_s, begun = 0, 0, 0, 0.0, False
        loss: ServeError | None = None
        shunned: set[str] = set()
        others = min(OTHERS_IF_FULL, self.replicas - 1)
        while True:
            known = frozenset(shunned)
            sent = merge(job.choices, parts) if parts else ()
            again = replace(job, sent=sent, shunned=known) if sent or known else job
            try:
                # Closed with this iterator: the replica shall not generate on until somebody collects garbage.
                async with contextlib.aclosing(_attempt(self.backend, again, shunned)) as items:  # type: ignore[type-var]
                    async for item in items:
                        if wait_s:
                            self.metrics.resumes.labels("resumed").inc()
                            wait_s = 0.0
                        parts.extend(item.progress)
                        if begun and not item.data and item.error is None:
                            continue  # that generation has begun is known
                        begun = True
                        yield item
                return
            except ServeError as error:
                pause_s = 0.0
                if error.code in LOST_CODES:
                    loss, lost, wait_s = error, lost + 1, FIRST_WAIT_S
                    self._go_on(error, lost, not parts or may_resume(job, info, self.policy))
                    logger.warning("request %s lost its replica (%s), resuming: %d", job.id, error.code, lost)
                elif loss is not None and isinstance(error, (NoReplicas, Unsupported)):
                    # Nobody is left, or its engine cannot go on behind such an answer: the client sees the loss.
                    self.metrics.resumes.labels("refused").inc()
                    raise loss from None
                elif isinstance(error, EngineGone) and shunned > known:
                    logger.warning("request %s met a replica whose engine is gone", job.id)
                    continue
                elif isinstance(error, Overloaded) and shunned > known and full < others:
                    full += 1
                    continue
                elif lost and isinstance(error, (Overloaded, NotReady)):
                    wait_s = min(max(2 * wait_s, FIRST_WAIT_S), LONGEST_WAIT_S)
                elif isinstance(error, EngineGone) and met_again < MET_AGAIN:
                    pause_s, met_again = FIRST_WAIT_S * 2**met_again, met_again + 1
                else:
                    raise
            await asyncio.sleep(wait_s or pause_s)

    def _go_on(self, error: ServeError, lost: int, resumable: bool) -> None:
        """Raises unless the job may be tried once more."""
        if self.policy.resume == "never" or not resumable:
            self.metrics.resumes.labels("refused").inc()
            raise error
        if lost > self.policy.max_resumes:
            self.metrics.resumes.labels("exhausted").inc()
            if lost == 1:
                raise error
            # Its own fault, perhaps: another try could end as many replicas again.
            raise EngineFailed("Every replica that worked on this request was lost.", code="replica_lost")


async def _attempt(backend: Backend, job: Job, shunned: set[str]) -> AsyncIterator[Item]:
    """Items of one replica. A lost replica, or engine, or a full one, is raised also where the replica could still say
    so itself, and its name is added to `shunned`."""
    begun = False
    async with contextlib.aclosing(backend.generate(job)) as items:  # type: ignore[type-var]
        async for item in items:
            error = item.error
            if isinstance(error, EngineGone) and begun:
                error = ReplicaLost(error.message, retry_after=error.retry_after)  # of another prompt it had taken some
            if error is not None:
                elsewhere = error.code in LOST_CODES or isinstance(error, EngineGone)
                elsewhere = elsewhere or (isinstance(error, Overloaded) and not begun)
                if elsewhere and item.replica:
                    shunned.add(item.replica)
                if elsewhere or job.sent:
                    raise error
            begun = True
            yield item
