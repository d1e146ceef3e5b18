"""Buckets against a plain account of what came in, and the gate's order."""

import asyncio
import random
from typing import Any

import pytest

from serve_app.admission.limits import Gate, Priority, TokenBucket
from serve_app.errors import Overloaded


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_is_full_at_first_and_empty_after_a_minutes_worth() -> None:
    bucket = TokenBucket(5, Clock())
    for _ in range(5):
        assert bucket.wait_s(1) == 0
        bucket.take(1)
    assert bucket.wait_s(1) == pytest.approx(12)


def test_waiting_as_long_as_it_says_is_enough() -> None:
    clock = Clock()
    bucket = TokenBucket(90, clock)
    bucket.take(400)
    clock.now += bucket.wait_s(1)
    assert bucket.wait_s(1) == pytest.approx(0, abs=1e-9)


def test_more_than_it_ever_holds_is_there_when_it_is_full() -> None:
    assert TokenBucket(5, Clock()).wait_s(1000) == 0


@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_a_plain_account(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    bucket, level = TokenBucket(60, clock), 60.0
    for _ in range(300):
        step = rng.random() * 3
        clock.now += step
        level = min(60.0, level + step)
        assert bucket.wait_s(1) == pytest.approx(max(0.0, 1 - level))
        amount = rng.choice([0.5, 1, 2, 20, -3])
        bucket.take(amount)
        level = min(60.0, level - amount)


class Crowd:
    """Requests at a gate with one slot, which the test holds at first."""

    def __init__(self, max_queued: int = 10) -> None:
        self.gate, self.served = Gate(1, max_queued), list[str]()
        self.held = asyncio.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, priority: Priority, hold: bool = False) -> None:
        async def request() -> None:
            async with self.gate.slot(priority):
                self.served.append(name)
                if hold:
                    await self.held.wait()

        self.tasks[name] = asyncio.create_task(request())
        await asyncio.sleep(0)

    async def all_done(self) -> list[Any]:
        self.held.set()
        return await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def test_interactive_requests_go_before_batch_ones_each_in_order() -> None:
    crowd = Crowd()
    await crowd.come("first", "batch", hold=True)
    for name, priority in (("b1", "batch"), ("i1", "interactive"), ("b2", "batch"), ("i2", "interactive")):
        await crowd.come(name, priority)  # type: ignore[arg-type]
    await crowd.all_done()
    assert crowd.served == ["first", "i1", "i2", "b1", "b2"]


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    crowd = Crowd(max_queued=1)
    await crowd.come("first", "interactive", hold=True)
    await crowd.come("second", "interactive")
    with pytest.raises(Overloaded) as caught:
        async with crowd.gate.slot("interactive"):
            pass
    assert caught.value.retry_after is not None and caught.value.retry_after >= 1
    await crowd.all_done()
    assert crowd.served == ["first", "second"]


async def test_in_a_full_queue_interactive_takes_the_youngest_batch_place() -> None:
    crowd = Crowd(max_queued=2)
    await crowd.come("first", "interactive", hold=True)
    await crowd.come("b1", "batch")
    await crowd.come("b2", "batch")
    await crowd.come("i1", "interactive")
    results = await crowd.all_done()
    assert crowd.served == ["first", "i1", "b1"] and isinstance(results[2], Overloaded)


async def test_who_leaves_while_waiting_frees_the_place() -> None:
    crowd = Crowd(max_queued=1)
    await crowd.come("first", "interactive", hold=True)
    await crowd.come("gone", "interactive")
    crowd.tasks["gone"].cancel()
    await asyncio.sleep(0)
    await crowd.come("next", "interactive")
    await crowd.all_done()
    assert crowd.served == ["first", "next"]


@pytest.mark.parametrize("gone", ["batch", "interactive"])
async def test_who_leaves_in_the_same_instant_has_freed_the_place(gone: Priority) -> None:
    crowd = Crowd(max_queued=1)
    await crowd.come("first", "interactive", hold=True)
    await crowd.come("gone", gone)

    async def next_one() -> None:
        crowd.tasks["gone"].cancel()  # which "gone" has not noticed yet
        async with crowd.gate.slot("interactive"):
            crowd.served.append("next")

    crowd.tasks["next"] = asyncio.create_task(next_one())
    await asyncio.sleep(0)
    _, left, came = await crowd.all_done()
    assert crowd.served == ["first", "next"] and isinstance(left, asyncio.CancelledError) and came is None


async def test_who_leaves_as_the_turn_comes_passes_it_on() -> None:
    crowd = Crowd()
    await crowd.come("first", "interactive", hold=True)
    await crowd.come("gone", "interactive")
    await crowd.come("next", "interactive")
    crowd.held.set()
    await asyncio.sleep(0)  # "first" leaves and wakes "gone", which has not run yet
    crowd.tasks["gone"].cancel()
    await crowd.all_done()
    assert crowd.served[-1] == "next"


async def test_never_more_inside_than_slots() -> None:
    gate, inside, most = Gate(3, 1000), 0, 0

    async def request(priority: Priority) -> None:
        nonlocal inside, most
        async with gate.slot(priority):
            inside += 1
            most = max(most, inside)
            try:
                await asyncio.sleep(random.random() / 1000)
            finally:
                inside -= 1

    tasks = [asyncio.create_task(request("batch" if i % 3 else "interactive")) for i in range(200)]
    for task in random.sample(tasks, 50):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3 and gate._inside == 0
