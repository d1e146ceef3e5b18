"""Ray Serve's request router over `scoring`: runs in every process that holds a handle of the replicas.

What this module does not do: generate, or decide anything by itself that `scoring` could.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.protocol import Job
from serve_app.router.prefixes import PrefixTable, blocks_of, common_blocks, home_key
from serve_app.router.scoring import Candidate, Policy, rank

SUSPECT_RETRY = 5


class PrefixRouter(RequestRouter):
    """Prefix affinity under a load bound. A replica that has not said within `suspect_s` whether it takes a request
    gets no more until it has, or a trial every `SUSPECT_RETRY` times as long; one whose own watchdog reports a failure
    gets none."""

    def initialize_state(  # type: ignore[override]
        self, max_blocks: int = 65536, block_chars: int = 256, suspect_s: float = 2.0, slack: float = 0.5
    ) -> None:
        self._table = PrefixTable(max_blocks)
        self._block_chars, self._suspect_s = block_chars, suspect_s
        self._policy = Policy(slack=slack)
        # Since when each replica owes an answer.
        self._asked: dict[ReplicaID, float] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank, the best first."""
        if pending_request is not None:
            # Else the base class asks again without a pause while everybody is full.
            pending_request.routing_context.should_backoff = True
        job = _job(pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        overlaps: dict[str, float] = {}
        if job is not None and len(by_name) > 1:
            request = job.requests[0]
            common = common_blocks(request, self._block_chars)
            overlaps = self._table.overlaps(blocks_of(request, self._block_chars), by_name, common)
        candidates = [self._candidate(name, replica, overlaps) for name, replica in by_name.items()]
        # Calls that are no jobs go anywhere.
        key = home_key(job.requests[0], job.session) if job is not None else str(time.monotonic())
        return [[by_name[name]] for name in rank(candidates, key, self._policy)]

    def _candidate(self, name: str, replica: RunningReplica, overlaps: dict[str, float]) -> Candidate:
        owes_s = time.monotonic() - self._asked.get(replica.replica_id, time.monotonic())
        if owes_s > SUSPECT_RETRY * self._suspect_s:
            # Perhaps the one who asked has left, and no answer will come.
            del self._asked[replica.replica_id]
        suspected = self._suspect_s < owes_s <= SUSPECT_RETRY * self._suspect_s
        stats: dict[str, Any] = replica.routing_stats or {}
        return Candidate(
            name=name,
            ongoing=self.replica_queue_len_cache.get(replica.replica_id) or 0,
            overlap=overlaps.get(name, 0.0),
            healthy=bool(stats.get("healthy", True)) and not suspected,
        )

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._asked.setdefault(replica_id, time.monotonic())

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._asked.pop(replica_id, None)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        job = _job(pending_request)
        if job is not None:
            self._table.sent(blocks_of(job.requests[0], self._block_chars), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        gone = set(self.curr_replicas) - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._forget(replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def _forget(self, replica_id: ReplicaID) -> None:
        self._asked.pop(replica_id, None)
        self._table.forget(replica_id.unique_id)


def _job(pending: PendingRequest | None) -> Job | None:
    return next((arg for arg in pending.args if isinstance(arg, Job)), None) if pending is not None else None
