"""Starts that fail and processes that die: an error that says what happened, and no process left behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import Config
from serve_app.engines.sglang.engine import SglangEngine
from serve_app.engines.sglang.host import build_engine
from serve_app.engines.sglang.loading import prepare
from serve_app.errors import ConfigError, EngineFailed, EngineGone, ReplicaLost
from serve_app.ports import ENGINE_PORTS
from serve_app.sglang_plugin.plugin import PluginError
from tests.engines.local.conftest import write_drafter
from tests.engines.local.helpers import request
from tests.engines.sglang.conftest import ON_A_CPU

Make = Callable[..., Config]
SOON_S = 120


def changed(**server_args: Any) -> dict[str, Any]:
    return {"attention_backend": "torch_native", "server_args": {**ON_A_CPU, **server_args}}


async def test_an_argument_that_sglang_does_not_know_is_named(sglang_on_cpu: None, make_config: Make) -> None:
    engine = SglangEngine(make_config(sglang=changed(max_total_token=1)))
    with pytest.raises(ConfigError, match="max_total_tokens") as caught:
        await engine.start()
    assert caught.value.param == "sglang.server_args.max_total_token"
    with pytest.raises(EngineGone):
        await anext(engine.submit(request()))
    await engine.stop()


def test_engines_that_start_together_meet_on_different_ports(sglang_on_cpu: None, make_config: Make) -> None:
    """A port that the system handed out was another process's by the time SGLang listened there."""
    ports = {prepare(make_config())["nccl_port"] for _ in range(20)}
    assert ports <= set(ENGINE_PORTS) and len(ports) > 15


def test_a_port_that_is_asked_for_is_taken(sglang_on_cpu: None, make_config: Make) -> None:
    assert prepare(make_config(sglang=changed(nccl_port=12345)))["nccl_port"] == 12345


def test_data_parallel_ranks_choose_ports_of_their_own(sglang_on_cpu: None, make_config: Make) -> None:
    assert "nccl_port" not in prepare(make_config(sglang=changed(dp_size=2)))


@pytest.mark.parametrize(
    ("method", "said"),
    [("chain", "SGLang refuses its arguments"), ("ddtree", "device cpu: only CUDA devices have its kernels")],
)
async def test_drafts_without_a_gpu_are_refused(
    sglang_on_cpu: None, make_config: Make, tmp_path: Path, method: str, said: str
) -> None:
    model = make_config().model.model_dump() | {"drafter": str(write_drafter(tmp_path / "drafter"))}
    engine = SglangEngine(make_config(model=model, speculation={"method": method}))
    with pytest.raises(ConfigError, match=said) as caught:
        await engine.start()
    assert caught.value.param == "sglang"


@pytest.mark.parametrize("algorithm", ["DDTREE", "DFLASH"])
def test_drafts_without_the_plugin_are_refused(
    sglang_on_cpu: None, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """A checkout by itself is no plugin: SGLang finds that by its entry point. SGLang's own chain needs a hook."""

    def missing() -> None:
        raise PluginError("the DDTREE plugin did not take effect")

    monkeypatch.setattr("serve_app.sglang_plugin.plugin.assert_installed", missing)
    with pytest.raises(ConfigError, match="did not take effect; install this package") as caught:
        build_engine({"speculative_algorithm": algorithm})
    assert caught.value.param == "speculation.method"


async def test_a_scheduler_that_cannot_start_leaves_nothing(sglang_on_cpu: None, make_config: Make) -> None:
    engine = SglangEngine(make_config(sglang=changed(max_total_tokens=1)))
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
    engine = SglangEngine(make_config(), start_timeout_s=SOON_S)
    await engine.start()
    await engine.start()  # it is running: nothing happens
    (scheduler,) = multiprocessing.active_children()
    os.kill(os.getpid(), signal.SIGQUIT)  # as SGLang's children do where they fail
    chunks = engine.submit(request("x" * 100, max_tokens=None, ignore_eos=True))
    await anext(chunks)
    os.kill(scheduler.pid or 0, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(ReplicaLost):
            async for _ in chunks:
                pass
    with pytest.raises(EngineFailed, match="exit code"):
        await engine.health()
    assert engine.stats().last_token_age_s is None  # so the watchdog asks at once
    with pytest.raises(EngineGone):
        await anext(engine.submit(request()))
    # What needs no engine goes on until it is replaced.
    assert await engine.tokenize(request("x")) and engine.info().max_model_len
    await engine.stop()
    assert multiprocessing.active_children() == []
    with pytest.raises(EngineGone):
        engine.info()


async def test_a_parser_for_a_template_without_tools_is_no_start(sglang_on_cpu: None, make_config: Make) -> None:
    engine = SglangEngine(make_config(sglang={**changed(), "tool_call_parser": "qwen"}), start_timeout_s=SOON_S)
    with pytest.raises(ConfigError, match="takes no tools") as caught:
        await engine.start()
    assert caught.value.param == "sglang.tool_call_parser" and multiprocessing.active_children() == []
    await engine.stop()
