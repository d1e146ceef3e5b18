"""When an engine counts as failed."""

import asyncio
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from serve_app.config import load_config
from serve_app.engines.base import GenerateRequest, SamplingParams, first_token
from serve_app.engines.local.engine import LocalEngine
from serve_app.engines.sglang.engine import SglangEngine
from serve_app.errors import EngineFailed
from serve_app.watchdog import Stuck, Watchdog, prove
from tests.direct import until
from tests.fake_engine import FakeEngine


def make(**replica: Any) -> tuple[Any, Watchdog]:
    """Patient, and without grace."""
    config = load_config(
        {"replica": {"stuck_after_s": 60, "warmup_grace_s": 0, "health_check_period_s": 0.1, **replica}}, use_env=False
    )
    engine = FakeEngine(config, CollectorRegistry())
    return engine, Watchdog(engine, config.replica)


async def test_an_engine_that_generates_is_well() -> None:
    _, watchdog = make()
    await watchdog.look()
    assert watchdog.failure is None


async def test_a_recent_token_is_proof_enough() -> None:
    engine, _ = make()
    request = GenerateRequest("r", SamplingParams(), prompt="a")
    assert [chunk async for chunk in engine.submit(request)]
    engine.health = None  # would fail
    await prove(engine, 60, 0.1)


async def test_an_engine_without_a_token_in_time_is_stuck() -> None:
    engine, watchdog = make(stuck_after_s=0.1)
    engine._broken = "stuck"
    await watchdog.look()
    assert isinstance(watchdog.failure, Stuck) and "0.1 s" in watchdog.failure.message


async def test_tokens_of_others_are_proof_while_its_own_waits_behind_them() -> None:
    engine, watchdog = make(stuck_after_s=0.2)

    async def behind_a_long_prompt() -> None:
        engine._last = time.monotonic()  # the other's first token
        await asyncio.Event().wait()

    engine.health = behind_a_long_prompt
    await watchdog.look()
    assert watchdog.failure is None


async def test_within_its_grace_it_may_be_slow() -> None:
    engine, watchdog = make(stuck_after_s=0.1, warmup_grace_s=60)
    engine._broken = "stuck"
    await watchdog.look()
    assert watchdog.failure is None


async def test_within_its_grace_it_may_not_be_dead() -> None:
    engine, watchdog = make(warmup_grace_s=60)
    engine._broken = "dead"
    await watchdog.look()
    assert isinstance(watchdog.failure, EngineFailed)


async def test_a_later_token_is_a_recovery() -> None:
    engine, watchdog = make()
    engine._broken = "dead"
    await watchdog.look()
    assert watchdog.failure is not None
    engine._broken = None
    await watchdog.look()
    assert watchdog.failure is None


async def test_it_looks_by_itself_until_it_is_stopped() -> None:
    engine, watchdog = make()
    engine._broken = "dead"
    watchdog.start()
    await until(lambda: watchdog.failure is not None)
    await watchdog.stop()


async def test_a_request_that_stalls_is_not_an_engine_that_does() -> None:
    engine, watchdog = make()
    request = GenerateRequest("r", SamplingParams(), prompt="a stall=60")
    reader = asyncio.create_task(anext(engine.submit(request)))
    await until(lambda: engine.stats().running == 1)
    await watchdog.look()
    assert watchdog.failure is None
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_a_start_without_a_token_in_time_is_a_failure() -> None:
    engine, _ = make()
    await first_token(engine, 60)
    engine._broken = "stuck"
    with pytest.raises(EngineFailed, match=r"no token within 0\.1 s"):
        await first_token(engine, 0.1)


@pytest.mark.parametrize(("replica", "limit"), [({}, 60), ({"stuck_after_s": 90}, 90), ({"warmup_grace_s": 600}, 600)])
def test_an_engine_may_take_as_long_for_its_first_token_as_for_those_behind_it(
    replica: dict[str, float], limit: float
) -> None:
    config = load_config({"replica": replica}, use_env=False)
    assert LocalEngine(config)._start_timeout == SglangEngine(config)._start_timeout == limit
