"""How long clients wait for another replica when an engine stops generating.

One replica on real Ray Serve as the launcher runs it, with the default health checks, and an engine at the engine seam
that answers with its process id until it is told to break. A client asks four times a second from then on; the time
runs until an answer names another process. Ways to break:

  dead     the engine says so: every request and every proof of health fails
  stuck    the engine emits nothing more, and neither refuses nor ends anything
  frozen   the replica's process is stopped (SIGSTOP), so it does not answer Serve either

    python -m benchmarks.replacement [--how dead,stuck,frozen] [--repeats 3]

Prints a row per way and JSON on the last line. What it does not do: load a model; its time comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from load_tests.target import free_port
from serve_app.engines.base import Chunk, EngineStats, ModelInfo, Usage
from serve_app.errors import EngineFailed
from serve_app.launch import SERVE_SWITCHES

ROOT = Path(__file__).resolve().parent.parent
ASK_EVERY_S, GIVE_UP_S = 0.25, 120
WAYS = ("dead", "stuck", "frozen")


class BreakableEngine:
    """The engine seam: says its process id, until a prompt that is a way to break."""

    def __init__(self, config: Any, registry: Any) -> None:
        self._broken = ""
        self._last = time.monotonic()

    async def start(self) -> None: ...

    async def submit(self, request: Any) -> Any:
        text = request.messages[-1]["content"]
        if not self._broken:
            self._last = time.monotonic()
            yield Chunk(0, (1,), str(os.getpid()), None, "stop", usage=Usage(1, 1))
            self._broken = text if text in WAYS else ""
            return
        await self.health()

    async def health(self) -> None:
        if self._broken == "dead":
            raise EngineFailed("the engine was told to be dead")
        if self._broken:
            await asyncio.Event().wait()
        self._last = time.monotonic()

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 64, last_token_age_s=time.monotonic() - self._last)

    def info(self) -> ModelInfo:
        return ModelInfo("breakable", 1000, 1000, 1)

    async def stop(self) -> None: ...


async def ask(client: httpx.AsyncClient, text: str) -> int | None:
    """The process that answered, None where none did."""
    body = {"model": "breakable", "messages": [{"role": "user", "content": text}]}
    answer = await client.post("/v1/chat/completions", json=body)
    return int(answer.json()["choices"][0]["message"]["content"]) if answer.status_code == 200 else None


async def broken_for(client: httpx.AsyncClient, how: str) -> float:
    """Seconds from an engine's break to the first answer of another process."""
    old = await ask(client, how if how != "frozen" else "hello")
    assert old is not None
    if how == "frozen":
        os.kill(old, signal.SIGSTOP)
    began = time.monotonic()
    replaced = asyncio.Event()

    async def one() -> None:
        with contextlib.suppress(httpx.HTTPError):
            if await ask(client, "hello") not in (None, old):
                replaced.set()

    asked = set()
    try:
        while not replaced.is_set():
            assert time.monotonic() - began < GIVE_UP_S, f"nobody took the place of the {how} one"
            asked.add(asyncio.create_task(one()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(replaced.wait(), ASK_EVERY_S)
        return time.monotonic() - began
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        if how == "frozen":
            with contextlib.suppress(ProcessLookupError):
                os.kill(old, signal.SIGKILL)


async def measure(url: str, ways: list[str], repeats: int) -> dict[str, list[float]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    found: dict[str, list[float]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=GIVE_UP_S, limits=limits, trust_env=False) as client:
        for how in ways:
            found[how] = [round(await broken_for(client, how), 1) for _ in range(repeats)]
            print(f"{how:8} {found[how]} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", default=",".join(WAYS))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.environ.update(
        {**SERVE_SWITCHES, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    )
    import ray
    from ray import serve

    from serve_app.build import bind
    from serve_app.config import load_config

    # The grace for a slow warm-up is over at once, as it is for a replica that has been up for a while.
    tree = load_config({"model": {"id": "breakable"}, "replica": {"num_cpus": 0.1, "warmup_grace_s": 0}}, use_env=False)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        ray.init(address="local", _temp_dir=directory, include_dashboard=False, num_cpus=4, log_to_driver=False)
        try:
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(bind(tree, "benchmarks.replacement:BreakableEngine"))
            print(json.dumps(asyncio.run(measure(f"http://127.0.0.1:{port}", options.how.split(","), options.repeats))))
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
