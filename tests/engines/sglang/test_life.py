"""Starts that fail and processes that die: an error that says what happened, and no process left behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.config import Config
from serve_app.engines.sglang.engine import SglangEngine
from serve_app.errors import ConfigError, EngineFailed, NotReady
from tests.engines.local.helpers import request

Make = Callable[..., Config]
SOON_S = 120


def changed(**server_args: Any) -> dict[str, Any]:
    from tests.engines.sglang.conftest import ON_A_CPU

    return {"server_args": {**ON_A_CPU, **server_args}}


@pytest.mark.parametrize(
    ("section", "param"),
    [
        (changed(max_total_token=1), "sglang.server_args.max_total_token"),
        ({"attention_backend": "none such"}, "sglang"),
    ],
)
async def test_arguments_that_sglang_refuses_are_named(
    sglang_on_cpu: None, make_config: Make, section: dict[str, Any], param: str
) -> None:
    engine = SglangEngine(make_config(sglang={**make_config().sglang.model_dump(exclude_unset=True), **section}))
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    assert caught.value.param == param
    with pytest.raises(NotReady):
        await anext(engine.submit(request()))
    await engine.stop()


async def test_trees_without_the_installed_plugin_or_a_gpu_are_refused(
    sglang_on_cpu: None, make_config: Make, tmp_path: Any
) -> None:
    from tests.engines.local.conftest import write_drafter

    drafter = write_drafter(tmp_path / "drafter")
    engine = SglangEngine(make_config(model={**make_config().model.model_dump(), "drafter": str(drafter)}))
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    assert caught.value.param in ("speculation.method", "sglang")


async def test_a_scheduler_that_cannot_start_leaves_nothing(sglang_on_cpu: None, make_config: Make) -> None:
    engine = SglangEngine(make_config(sglang={"attention_backend": "torch_native", **changed(max_total_tokens=1)}))
    with pytest.raises(EngineFailed, match="did not start"):
        await engine.start()
    assert multiprocessing.active_children() == []
    await engine.stop()


async def test_a_stop_while_it_loads_ends_the_loading(sglang_on_cpu: None, make_config: Make) -> None:
    engine = SglangEngine(make_config())
    starting = asyncio.create_task(engine.start())
    async with asyncio.timeout(SOON_S):
        while not multiprocessing.active_children():
            await asyncio.sleep(0.05)
        await engine.stop()
        with pytest.raises(EngineFailed):
            await starting
    assert multiprocessing.active_children() == []


async def test_a_dead_scheduler_is_a_dead_engine_in_a_living_process(sglang_on_cpu: None, make_config: Make) -> None:
    engine = SglangEngine(make_config(), health_timeout_s=SOON_S)
    await engine.start()
    await engine.start()  # it is running: nothing happens
    scheduler, *others = multiprocessing.active_children()
    os.kill(os.getpid(), signal.SIGQUIT)  # as SGLang's children do where they fail
    chunks = engine.submit(request("x" * 100, max_tokens=None, ignore_eos=True))
    await anext(chunks)
    os.kill(scheduler.pid or 0, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(NotReady) as caught:
            async for _ in chunks:
                pass
    assert caught.value.code == "replica_lost"
    with pytest.raises(EngineFailed, match="exit code"):
        await engine.health()
    with pytest.raises(NotReady):
        await anext(engine.submit(request()))
    await engine.stop()
    assert multiprocessing.active_children() == [] and others
    with pytest.raises(NotReady):
        engine.info()
