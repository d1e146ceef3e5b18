"""Which calls end when a replica is no longer listed."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from serve_app.router.calls import Calls
from tests.direct import until


class Actor:
    """Answers, is silent or dead, one after the other; the last for ever."""

    def __init__(self, *states: Any) -> None:
        self.states = list(states)
        self.asked = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        if state == "silent":
            await asyncio.Event().wait()
        return 1


def make(*names: str) -> tuple[Calls, list[asyncio.Future[None]]]:
    loop = asyncio.get_running_loop()
    calls, futures = Calls(loop, 0.01, 0.05), [loop.create_future() for _ in names]
    for name, future in zip(names, futures, strict=True):
        calls.sent(name, future)
    return calls, futures


async def test_calls_of_a_dead_replica_are_cancelled_and_no_others() -> None:
    calls, (one, two, other) = make("a", "a", "b")
    calls.lost("a")
    await until(lambda: calls.of("a") == 0)
    assert (one.cancelled(), two.cancelled(), other.done()) == (True, True, False)
    assert (calls.of("a"), calls.of("b")) == (0, 1)


async def test_a_replica_that_leaves_finishes_its_calls() -> None:
    calls, (call,) = make("a")
    actor: Any = Actor(1)
    calls.watch("a", actor)
    await until(lambda: actor.asked > 2)
    assert not call.done()
    call.set_result(None)
    # Nobody asks any more.
    await until(lambda: not calls._watches)


async def test_calls_of_a_replica_that_fell_silent_end_once_it_is_dead() -> None:
    calls, (call,) = make("a")
    actor: Any = Actor("silent", ActorUnavailableError("gone", b"x" * 16), ActorDiedError())
    calls.watch("a", actor)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, 60)
    assert actor.asked == 3


async def test_a_replica_is_watched_once_however_often_it_leaves() -> None:
    calls, (call,) = make("a")
    actors: list[Any] = [Actor(1), Actor(1)]
    for actor in actors:
        calls.watch("a", actor)
    await until(lambda: actors[0].asked > 2)
    assert actors[1].asked == 0
    call.set_result(None)
    await until(lambda: not calls._watches)


async def test_a_replica_without_calls_is_not_watched() -> None:
    calls, _ = make()
    actor: Any = Actor(ActorDiedError())
    calls.watch("a", actor)
    await asyncio.sleep(0.05)
    assert actor.asked == 0
