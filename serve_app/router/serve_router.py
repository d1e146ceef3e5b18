"""Ray Serve's request router over `fleet`: runs in every process that holds a handle of the replicas.

What this module does not do: generate, or decide anything by itself that `fleet` could.
"""

from __future__ import annotations

import random
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.protocol import Job
from serve_app.router.calls import Calls, NotedReplica
from serve_app.router.fleet import Fleet
from serve_app.router.prefixes import PrefixTable, beginning, blocks_of, common_blocks, home_key
from serve_app.router.scoring import Policy

SUSPECT_RETRY = 5
KEPT = "_ddtree_blocks"
# About.
CHARS_PER_TOKEN = 4


class PrefixRouter(RequestRouter):
    """Prefix affinity under a load bound. A replica that has not said within `suspect_s` whether it takes a request
    gets no more until it has, or a trial every `SUSPECT_RETRY` times as long; one whose own watchdog reports a failure
    gets none, nor does a job come again to one that lost it or has no engine."""

    def initialize_state(  # type: ignore[override]
        self, max_blocks: int = 65536, block_chars: int = 256, suspect_s: float = 2.0, slack: float = 0.5
    ) -> None:
        self._block_chars, self._suspect_s = block_chars, suspect_s
        self._fleet = Fleet(Policy(slack=slack), PrefixTable(max_blocks))
        self._calls = Calls(self._event_loop)
        self._by_name: dict[str, RunningReplica] = {}
        self._ill: set[str] = set()
        # Since when each replica owes an answer, the longest first.
        self._asked: dict[str, float] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best one; then, should it be full, all that are well, of which Serve takes the least loaded."""
        if pending_request is not None:
            # Else the base class asks again without a pause while everybody is full.
            pending_request.routing_context.should_backoff = True
        if len(self._by_name) == 1:
            return [candidate_replicas, candidate_replicas]
        now = time.monotonic()
        self._fleet.expire(now)
        job = _job(pending_request)
        unwell = self._unwell(job, now)
        if job is None or pending_request is None:
            # Calls that are no jobs go anywhere.
            best = self._fleet.choose((), 0, str(now), unwell)
        else:
            blocks, common, start = self._parts(job, pending_request)
            best = self._fleet.choose(blocks, common, home_key(job.requests[0], job.session), unwell, start)
        return [[self._by_name[best]], _without(candidate_replicas, unwell)]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Serve's first choice, without the queue and the task that Serve gives each request, where that needs not ask
        or wait: nobody waits already, and the chosen ones are known to have room. Ray has no documented place for this;
        one that does not call it does as Serve does."""
        if not is_retry and self.curr_replicas and not self.num_pending_requests:
            first, *_ = await self.choose_replicas(list(self.curr_replicas.values()), pending_request)
            replica = self._least_loaded(first)
            if replica is not None:
                self._record_queue_wait_time(pending_request)
                return replica
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def _least_loaded(self, replicas: list[RunningReplica]) -> RunningReplica | None:
        """As Serve takes it. None where it is full, or where Serve would ask one for its load."""
        loads = [self.replica_queue_len_cache.get(replica.replica_id) for replica in replicas]
        known = [(load, place) for place, load in enumerate(loads) if load is not None]
        if len(known) < len(replicas) or not known:
            return None
        load, place = min(known)
        return replicas[place] if load < replicas[place].max_ongoing_requests else None

    def _unwell(self, job: Job | None, now: float) -> set[str]:
        return self._ill | self._suspects(now) | (job.shunned if job is not None else frozenset())

    def _parts(self, job: Job, pending_request: PendingRequest) -> tuple[list[int], int, str]:
        """Of the job's prompt: blocks, how many of them are common, its beginning. Kept with the request, which ends
        with it: a choice may be repeated, and is remembered once it is accepted."""
        request = job.requests[0]
        if len(self._by_name) < 2:
            return [], 0, beginning(request)
        kept: dict[str, Any] = vars(pending_request)
        if KEPT not in kept:
            cut = blocks_of(request, self._block_chars), common_blocks(request, self._block_chars)
            kept[KEPT] = *cut, beginning(request)
        parts: tuple[list[int], int, str] = kept[KEPT]
        return parts

    def _suspects(self, now: float) -> set[str]:
        suspects = set()
        for name, since in list(self._asked.items()):
            if now - since <= self._suspect_s:
                break
            if now - since > SUSPECT_RETRY * self._suspect_s:
                # Perhaps the one who asked has left, and no answer will come.
                del self._asked[name]
            else:
                suspects.add(name)
        return suspects

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        now, name = time.monotonic(), replica_id.unique_id
        self._asked.setdefault(name, now)
        self._fleet.set_load(name, self._fleet.load(name) + 1, now)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._asked.pop(replica_id.unique_id, None)
        self._fleet.set_load(replica_id.unique_id, num_ongoing_requests, time.monotonic())

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        super().decrement_queue_len_cache(replica_id)
        name = replica_id.unique_id
        self._fleet.set_load(name, max(0, self._fleet.load(name) - 1), time.monotonic())

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        job = _job(pending_request)
        if job is not None:
            blocks, common, start = self._parts(job, pending_request)
            self._fleet.sent(blocks, common, replica_id.unique_id, start)

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return NotedReplica(replica_info, self._calls.sent)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = self._by_name
        super().update_replicas(replicas)
        self._adopt()
        for name in before.keys() - self._by_name.keys():
            self._calls.watch(name, before[name])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._adopt()
        self._calls.lost(replica_id.unique_id)

    def _adopt(self) -> None:
        self._by_name = {replica_id.unique_id: replica for replica_id, replica in self.curr_replicas.items()}
        stats = {name: replica.routing_stats or {} for name, replica in self._by_name.items()}
        self._ill = {name for name, said in stats.items() if not said.get("healthy", True)}
        self._asked = {name: since for name, since in self._asked.items() if name in self._by_name}
        # The smallest of those that say.
        tokens = min((said["kv_tokens"] for said in stats.values() if said.get("kv_tokens")), default=0)
        self._fleet.become(list(self._by_name), tokens * CHARS_PER_TOKEN / self._block_chars)


class TwoChoicesRouter(PrefixRouter):
    """Power of two choices among the replicas that are well, as `PrefixRouter` knows them. Serve's own would choose
    again a replica that a job has met without an engine, and it hands a choice to whichever request waits longest."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Two at random, of which Serve takes the less loaded; then all that are well."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        well = _without(candidate_replicas, self._unwell(_job(pending_request), time.monotonic()))
        return [random.sample(well, min(2, len(well))), well]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """What it was is not remembered."""


def _without(replicas: list[RunningReplica], unwell: set[str]) -> list[RunningReplica]:
    """All of them where none is well."""
    well = [r for r in replicas if r.replica_id.unique_id not in unwell] if unwell else replicas
    return well or replicas


def _job(pending: PendingRequest | None) -> Job | None:
    return next((arg for arg in pending.args if isinstance(arg, Job)), None) if pending is not None else None
