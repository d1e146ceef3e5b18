"""Aborts, overload, faults, health and shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from serve_app.config import Config
from serve_app.engines.base import Chunk, GenerateRequest
from serve_app.engines.local.engine import LocalEngine
from serve_app.errors import EngineFailed, EngineGone, InvalidRequest, Overloaded, ReplicaLost
from serve_app.watchdog import Stuck, prove
from tests.engines.local.helpers import collect, request, running

Make = Callable[..., Config]
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


async def drained(engine: LocalEngine) -> None:
    """Until nothing runs or waits; pytest's timeout bounds it."""
    while (stats := engine.stats()).running or stats.queued:
        await asyncio.sleep(0.005)
    assert engine.stats().kv_tokens_used == 0


async def test_the_first_token_does_not_wait_for_the_first_tree(make_config: Make) -> None:
    async with running(make_config()) as engine:
        assert engine._parts is not None
        runner, read = engine._parts.runner, threading.Event()
        verify = runner.verify

        def held(*arguments: Any) -> Any:
            assert read.wait(60), "the first token was not handed over"
            return verify(*arguments)

        runner.verify = held  # type: ignore[method-assign]
        stream = engine.submit(request("x", **LONG))
        first = await anext(stream)
        assert len(first.token_ids) == 1
        read.set()
        async for _ in stream:
            pass


async def test_abort_ends_the_stream_and_frees_the_slot(make_config: Make) -> None:
    async with running(make_config()) as engine:
        wanted = request("hi", **LONG)
        chunks: list[Chunk] = []
        async for chunk in engine.submit(wanted):
            if not chunks:
                assert await engine.abort(wanted.request_id)
            chunks.append(chunk)
        assert chunks[-1].finish_reason == "abort"
        assert chunks[-1].usage is not None
        await drained(engine)
        assert not await engine.abort(wanted.request_id)


async def test_a_queued_request_can_be_aborted(make_config: Make) -> None:
    async with running(make_config(engine={"max_running": 1})) as engine:
        first = asyncio.create_task(collect(engine, request("a", **LONG)))
        wanted = request("b", **LONG)
        second = asyncio.create_task(collect(engine, wanted))
        while not await engine.abort(wanted.request_id):
            await asyncio.sleep(0.001)
        assert (await second).last.finish_reason == "abort"
        assert (await first).last.finish_reason == "length"


async def test_a_prefilling_request_can_be_aborted(make_config: Make) -> None:
    async with running(make_config(engine={"prefill_chunk": 16})) as engine:
        wanted = request("x" * 240, max_tokens=5)
        task = asyncio.create_task(collect(engine, wanted))
        while not await engine.abort(wanted.request_id):
            await asyncio.sleep(0)
        await task
        await drained(engine)


async def test_closing_the_iterator_aborts(make_config: Make) -> None:
    async with running(make_config()) as engine:
        stream = engine.submit(request("hi", **LONG))
        await anext(stream)
        await stream.aclose()
        await drained(engine)


async def test_how_requests_ended_is_counted_and_probes_are_not(make_config: Make) -> None:
    registry = CollectorRegistry()
    async with running(make_config(), registry) as engine:
        await engine.health()
        await collect(engine, request("hi", max_tokens=3, ignore_eos=True))
        stream = engine.submit(request("hi", **LONG))
        await anext(stream)
        await stream.aclose()
        await drained(engine)
        model = engine.info().id

    def ended(outcome: str) -> float | None:
        return registry.get_sample_value("ddtree_requests_total", {"model": model, "outcome": outcome})

    assert [ended(outcome) for outcome in ("stop", "length", "abort", "error")] == [0, 1, 1, 0]


async def test_cancelling_the_reader_aborts(make_config: Make) -> None:
    async with running(make_config()) as engine:
        task = asyncio.create_task(collect(engine, request("hi", **LONG)))
        while not engine.stats().running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await drained(engine)


async def test_aborting_one_leaves_the_others_alone(make_config: Make) -> None:
    async with running(make_config()) as engine:
        alone = (await collect(engine, request("keep", **LONG))).tokens
        kept = asyncio.create_task(collect(engine, request("keep", **LONG)))
        for _ in range(5):
            stream = engine.submit(request("drop", **LONG))
            await anext(stream)
            await stream.aclose()
        assert (await kept).tokens == alone


async def test_beyond_the_queue_is_overloaded_and_nothing_is_lost(make_config: Make) -> None:
    async with running(make_config(engine={"max_running": 1, "max_queued": 2})) as engine:
        tasks = [asyncio.create_task(collect(engine, request("x", **LONG))) for _ in range(6)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [one for one in done if isinstance(one, Overloaded)]
        assert len(refused) == 3
        assert all(one.last.finish_reason == "length" for one in done if not isinstance(one, BaseException))


async def test_an_id_in_use_is_refused(make_config: Make) -> None:
    async with running(make_config()) as engine:
        wanted = request("x", **LONG)
        stream = engine.submit(wanted)
        await anext(stream)
        with pytest.raises(InvalidRequest):
            await anext(engine.submit(wanted))
        await stream.aclose()


async def test_health_is_answered_while_every_slot_is_taken(make_config: Make) -> None:
    async with running(make_config(engine={"max_running": 1, "max_queued": 5})) as engine:
        tasks = [asyncio.create_task(collect(engine, request("x", **LONG))) for _ in range(3)]
        while not engine.stats().running:
            await asyncio.sleep(0.001)
        await engine.health()
        assert not any(task.done() for task in tasks[1:])
        await asyncio.gather(*tasks)


def break_forward(engine: LocalEngine, times: int) -> None:
    """Make the target's next forwards raise, as a device fault would: its head loses its weight."""
    parts = engine._parts
    assert parts is not None
    target = parts.runner.target
    head, left = target._head, [times]

    def broken(x: Any) -> Any:
        if left[0] <= 0:
            target._head = head
            return head(x)
        left[0] -= 1
        raise RuntimeError("device lost")

    target._head = broken  # type: ignore[assignment]


async def test_a_fault_ends_the_affected_requests_and_the_engine_goes_on(make_config: Make) -> None:
    async with running(make_config()) as engine:
        stream = engine.submit(request("x", **LONG))
        await anext(stream)
        break_forward(engine, 1)
        with pytest.raises(EngineFailed):
            async for _ in stream:
                pass
        await drained(engine)
        assert (await collect(engine, request("x"))).tokens
        await engine.health()


async def test_lasting_faults_make_it_unhealthy(make_config: Make) -> None:
    async with running(make_config()) as engine:
        break_forward(engine, 1000)
        for _ in range(3):
            with pytest.raises(EngineFailed):
                await collect(engine, request("x"))
        with pytest.raises(EngineFailed, match="3 steps failed"):
            await engine.health()


async def test_a_stuck_step_is_unhealthy_within_bounds(make_config: Make) -> None:
    engine = LocalEngine(make_config())
    await engine.start()
    assert engine._parts is not None and engine._loop is not None
    release = threading.Event()
    engine._loop.post(lambda: (release.wait(), None)[1])
    with pytest.raises(Stuck, match="no token"):
        await prove(engine, 0, 0.2)
    release.set()
    await engine.stop()


async def test_a_dead_loop_fails_everyone_and_says_so(make_config: Make) -> None:
    engine = LocalEngine(make_config())
    await engine.start()
    assert engine._loop is not None
    stream = engine.submit(request("x", **LONG))
    await anext(stream)

    def die() -> None:
        raise SystemError("gone")

    engine._loop.post(die)
    with pytest.raises(ReplicaLost):
        async for _ in stream:
            pass
    with pytest.raises(EngineFailed, match="SystemError"):
        await engine.health()
    with pytest.raises(EngineGone):
        await anext(engine.submit(request("x")))
    # What needs no engine goes on until it is replaced.
    assert await engine.detokenize(await engine.tokenize(request("x"))) and engine.info().max_model_len
    await engine.stop()


async def test_stop_aborts_everything_and_ends_the_thread(make_config: Make) -> None:
    engine = LocalEngine(make_config(engine={"max_running": 1}))
    await engine.start()
    tasks = [asyncio.create_task(collect(engine, request("x", **LONG))) for _ in range(3)]
    while engine.stats().running + engine.stats().queued < 3:
        await asyncio.sleep(0.001)
    await engine.stop()
    assert {one.last.finish_reason for one in await asyncio.gather(*tasks)} == {"abort"}
    assert not any(thread.name == "ddtree-step-loop" for thread in threading.enumerate())
    await engine.stop()
    with pytest.raises(EngineGone):
        await anext(engine.submit(request("x")))


async def test_it_can_start_again_after_a_stop(make_config: Make) -> None:
    engine = LocalEngine(make_config(), CollectorRegistry())
    for _ in range(2):
        await engine.start()
        await engine.start()
        assert (await collect(engine, request("x"))).tokens
        await engine.stop()


async def test_slots_and_tokens_are_free_after_many_mixed_requests(make_config: Make) -> None:
    async with running(make_config(engine={"max_queued": 100})) as engine:

        async def one(n: int) -> None:
            stream = engine.submit(request("y" * (n * 7 % 60 + 1), max_tokens=n % 30 + 1, temperature=n % 2))
            async for _ in stream:
                if n % 5 == 0:
                    await stream.aclose()
                    break

        await asyncio.gather(*(one(n) for n in range(60)))
        await drained(engine)
        assert engine._submissions == {}


async def test_a_request_still_rendering_when_the_engine_stops_is_refused(make_config: Make) -> None:
    engine = LocalEngine(make_config())
    await engine.start()
    assert engine._parts is not None
    prompts, entered, release = engine._parts.prompts, threading.Event(), threading.Event()
    encode = prompts.encode

    def slow(wanted: GenerateRequest, context: int | None = None) -> list[int]:
        entered.set()
        release.wait()
        return encode(wanted, context)

    prompts.encode = slow  # type: ignore[method-assign]
    task = asyncio.create_task(collect(engine, request("x")))
    await asyncio.to_thread(entered.wait)
    await engine.stop()
    release.set()
    with pytest.raises(EngineGone):
        await task
    assert engine._posted == 0 and engine._submissions == {}


async def test_a_request_posted_before_the_loop_died_is_told(make_config: Make) -> None:
    engine = LocalEngine(make_config())
    await engine.start()
    assert engine._loop is not None
    release = threading.Event()

    def die() -> None:
        release.wait()
        raise SystemError("gone")

    engine._loop.post(die)
    task = asyncio.create_task(collect(engine, request("x")))
    while not engine._posted:
        await asyncio.sleep(0.001)
    release.set()
    with pytest.raises(ReplicaLost):
        await task
    assert engine.stats().queued == 0
    await engine.stop()
