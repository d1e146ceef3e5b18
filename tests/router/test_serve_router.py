"""What the router does between Serve and `fleet`, without a cluster."""

import asyncio
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.protocol import Job
from serve_app.router.serve_router import PrefixRouter, TwoChoicesRouter

DEPLOYMENT = DeploymentID("engine", "test")


class Message(Mapping[str, Any]):
    """A chat message that counts how often its text is read."""

    def __init__(self, text: str) -> None:
        self._fields, self.reads = {"role": "user", "content": text}, 0

    def __getitem__(self, key: str) -> str:
        self.reads += key == "content"
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def replica(name: str) -> Any:
    async def get_queue_len(*, deadline_s: float) -> int:
        return 0

    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT), routing_stats={}, max_ongoing_requests=8, get_queue_len=get_queue_len
    )


def router(*names: str, kind: type[PrefixRouter] = PrefixRouter) -> PrefixRouter:
    made = kind(DEPLOYMENT, DeploymentHandleSource.REPLICA, event_loop=asyncio.get_running_loop())
    made.initialize_state()
    made.update_replicas([replica(name) for name in names])
    return made


def request(*messages: Mapping[str, Any], shunned: frozenset[str] = frozenset(), id: str = "r") -> PendingRequest:
    prompt = GenerateRequest("r", SamplingParams(), messages=messages)
    job = Job("id", 0, "fake", True, True, False, (prompt,), shunned=shunned)
    return PendingRequest(args=[job], kwargs={}, metadata=RequestMetadata(id, id))


async def chosen(made: PrefixRouter, pending: PendingRequest) -> ReplicaID:
    (best,), _ = await made.choose_replicas(list(made.curr_replicas.values()), pending)
    return best.replica_id


async def test_a_prompt_is_cut_once_however_often_its_replica_is_chosen() -> None:
    made, message = router("a", "b"), Message("word " * 500)
    pending = request(message)
    await chosen(made, pending)
    first = message.reads
    replica_id = await chosen(made, pending)
    again = message.reads - first
    made.on_request_routed(pending, replica_id, None)
    # A choice also reads the text for its home; what is remembered is what was cut before.
    assert (again, message.reads - first - again) == (1, 0)


async def test_a_prompt_is_remembered_where_it_went() -> None:
    made, text = router("a", "b", "c"), "word " * 500
    for name in "abc":
        made.on_request_routed(request(Message(name + text)), ReplicaID(name, DEPLOYMENT), None)
    assert [(await chosen(made, request(Message(name + text)))).unique_id for name in "abc"] == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [PrefixRouter, TwoChoicesRouter])
async def test_a_job_comes_no_more_to_a_replica_that_it_has_met_without_an_engine(kind: type[PrefixRouter]) -> None:
    made, message = router("a", "b", "c", kind=kind), Message("word")
    met: frozenset[str] = frozenset()
    for _ in range(3):
        offered = set()
        for _ in range(50):
            groups = await made.choose_replicas(list(made.curr_replicas.values()), request(message, shunned=met))
            offered |= {replica.replica_id.unique_id for group in groups for replica in group}
        assert not met & offered
        met |= {min(offered)}
    # Where there is no other, a try beats none.
    assert await made.choose_replicas(list(made.curr_replicas.values()), request(message, shunned=met))


async def test_two_choices_are_two_and_any() -> None:
    made, message = router("a", "b", "c", "d", kind=TwoChoicesRouter), Message("word")
    candidates = list(made.curr_replicas.values())
    firsts = [(await made.choose_replicas(candidates, request(message)))[0] for _ in range(200)]
    assert {len(first) for first in firsts} == {2}
    assert {replica.replica_id.unique_id for first in firsts for replica in first} == set("abcd")


async def test_a_replica_with_room_is_chosen_without_a_task() -> None:
    made = router("a", "b")
    for name in "ab":
        made.on_new_queue_len_info(ReplicaID(name, DEPLOYMENT), 0)
    got = await made._choose_replica_for_request(request(Message("word")))
    assert got.replica_id.unique_id in "ab"
    assert (made.curr_num_routing_tasks, made.num_pending_requests) == (0, 0)


async def test_a_request_does_not_overtake_those_that_wait() -> None:
    made, a = router("a"), ReplicaID("a", DEPLOYMENT)
    lengths = [8]

    async def get_queue_len(*, deadline_s: float) -> int:
        return lengths[0]

    made.curr_replicas[a].get_queue_len = get_queue_len  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        one = asyncio.create_task(made._choose_replica_for_request(request(Message("word"), id="one")))
        while not made.num_pending_requests:
            await asyncio.sleep(0)
        made.on_new_queue_len_info(a, 0)
        other = asyncio.create_task(made._choose_replica_for_request(request(Message("word"), id="other")))
        await asyncio.sleep(0)
        assert made.num_pending_requests == 2
        lengths[0] = 0
        assert {replica.replica_id for replica in await asyncio.gather(one, other)} == {a}


async def test_where_all_are_full_a_request_waits_as_with_serve() -> None:
    made = router("a")
    lengths, a = [8, 8, 8, 0], ReplicaID("a", DEPLOYMENT)

    async def get_queue_len(*, deadline_s: float) -> int:
        return lengths.pop(0)

    made.curr_replicas[a].get_queue_len = get_queue_len  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        assert (await made._choose_replica_for_request(request(Message("word")))).replica_id == a
    assert not lengths
