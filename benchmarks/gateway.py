"""What the serving plane costs per streamed token, against a bare uvicorn server and the usual Ray Serve pattern.

Four servers, one after the other in one run on the same machine, around one paced engine (4 tokens a step):

  bare    uvicorn and an SSE generator in one process, one frame a step
  plain   FastAPI ingress → handle → generator under Ray Serve as it comes, one frame a token
  ours    this product behind Serve's own proxy, with the engine behind its engine seam
  haproxy the same behind Serve's HAProxy, as the launcher runs it where there is one

Cost is CPU time of all the server's processes, without what they use when idle, divided by tokens: a busy machine
lengthens waits, and changes CPU time much less. `unary` is the median time of a one-step answer.

    python benchmarks/gateway.py [--streams 1,16,64] [--steps 40] [--servers bare,plain,ours,haproxy] [--out PATH]

Prints a table and JSON on the last line. What it does not do: an engine's own work.
No `from __future__ import annotations` here: FastAPI reads annotations again in the process that Ray sent a route to.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from load_tests.processes import sample
from load_tests.target import free_port

ROOT = Path(__file__).resolve().parent.parent

STEP_S, TOKENS_PER_STEP = 0.05, 4
IDLE_S = 4.0
SERVERS = ("bare", "plain", "ours", "haproxy")
START_S = 120
PACED = {"model": {"id": "paced"}, "replica": {"num_cpus": 0.1}}
HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "paced"}


# -- servers ---------------------------------------------------------------------------------------------------------


class PacedEngine:
    """The engine seam: `max_tokens` tokens, four every 50 ms, the first at once."""

    def __init__(self, config: Any, registry: Any) -> None:
        self._last: float | None = None

    async def start(self) -> None: ...

    async def submit(self, request: Any) -> Any:
        from serve_app.engines.base import Chunk, Usage

        total = request.sampling.max_tokens
        for at in range(0, total, TOKENS_PER_STEP):
            if at:
                await asyncio.sleep(STEP_S)
            ids = tuple(range(min(TOKENS_PER_STEP, total - at)))
            self._last = time.monotonic()
            end = at + len(ids) >= total
            yield Chunk(0, ids, " word" * len(ids), None, "length" if end else None, usage=Usage(1, total))

    async def health(self) -> None: ...

    def stats(self) -> Any:
        from serve_app.engines.base import EngineStats

        age = None if self._last is None else time.monotonic() - self._last
        return EngineStats(0, 0, 256, last_token_age_s=age)

    def info(self) -> Any:
        from serve_app.engines.base import ModelInfo

        return ModelInfo("paced", 1 << 20, 1000, 1)

    async def stop(self) -> None: ...


def frame(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({**HEAD, "choices": [choice]}).encode() + b"\n\n"


def serve_bare(port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Route

    async def chat(request: Request) -> Response:
        body = await request.json()
        total = body["max_tokens"]

        async def frames() -> Any:
            for at in range(0, total, TOKENS_PER_STEP):
                if at:
                    await asyncio.sleep(STEP_S)
                yield frame(" word" * TOKENS_PER_STEP)
            yield b"data: [DONE]\n\n"

        if not body.get("stream"):
            return JSONResponse({**HEAD, "choices": [{"message": {"content": " word" * total}}]})
        return StreamingResponse(frames(), media_type="text/event-stream")

    async def ready(request: Request) -> Response:
        return JSONResponse({})

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/ready", ready)])
    uvicorn.run(app, port=port, log_level="warning")


def serve_plain(port: int) -> None:
    from fastapi import FastAPI
    from ray import serve

    app = FastAPI()

    @serve.deployment(max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.1})
    class Generator:
        async def __call__(self, total: int) -> Any:
            for at in range(0, total, TOKENS_PER_STEP):
                if at:
                    await asyncio.sleep(STEP_S)
                for _ in range(TOKENS_PER_STEP):
                    yield frame(" word")
            yield b"data: [DONE]\n\n"

        async def whole(self, total: int) -> str:
            return " word" * total

    @serve.deployment(max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.1})
    @serve.ingress(app)
    class Front:
        def __init__(self, generator: Any) -> None:
            self._generator = generator

        @app.post("/v1/chat/completions")
        async def chat(self, request: Request) -> Response:
            body = await request.json()
            if not body.get("stream"):
                text = await self._generator.whole.remote(body["max_tokens"])
                return JSONResponse({**HEAD, "choices": [{"message": {"content": text}}]})
            chunks = self._generator.options(stream=True).remote(body["max_tokens"])
            return StreamingResponse(chunks, media_type="text/event-stream")

        @app.get("/ready")
        async def ready(self) -> dict[str, str]:
            return {}

    _run_serve(Front.bind(Generator.bind()), port)  # type: ignore[attr-defined]


def serve_ours(
    port: int, wanted: Any, tree: dict[str, Any] = PACED, engine_factory: str = "benchmarks.gateway:PacedEngine"
) -> None:
    from serve_app import proxy
    from serve_app.config import load_config
    from serve_app.launch import SERVE_SWITCHES

    config = load_config(tree, use_env=False)
    os.environ.update(SERVE_SWITCHES)
    os.environ.update(proxy.switches(proxy.choose(wanted, os.environ), config.ingress.request_timeout_s))
    from serve_app.build import bind

    with tempfile.TemporaryDirectory(prefix="hp-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        os.environ.update(proxy.local_switches(directory, "127.0.0.1"))
        _run_serve(bind(config, engine_factory), port)


def _run_serve(application: Any, port: int) -> None:
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        ray.init(address="local", _temp_dir=directory, include_dashboard=False, num_cpus=8, log_to_driver=False)
        # After ray.init, which installs a handler of its own.
        told = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: told.set())
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application)
        while not told.wait(0.2):
            pass
        ray.shutdown()


# -- measuring -------------------------------------------------------------------------------------------------------


def cpu_s(root: int) -> Counter[str]:
    """CPU seconds of a process and all below it, by role."""
    used: Counter[str] = Counter()
    for one in sample(root):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The CPU clock of another process, as clock_getcpuclockid(3) makes it: nanoseconds, not ticks.
            used[one.role] += time.clock_gettime((~one.pid << 3) | 2)
    return used


async def read(client: httpx.AsyncClient, tokens: int) -> None:
    body = {"model": "paced", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": tokens}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        text = b"".join([part async for part in answer.aiter_raw()])
    assert text.count(b" word") == tokens and text.endswith(b"[DONE]\n\n"), text[-200:]


async def measure(url: str, pid: int, streams: list[int], steps: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=max(streams), max_keepalive_connections=max(streams))
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(read(client, 8) for _ in range(max(streams))))
        before = cpu_s(pid)
        await asyncio.sleep(IDLE_S)
        idle = {role: (used - before[role]) / IDLE_S for role, used in cpu_s(pid).items()}
        for count in streams:
            before, began = cpu_s(pid), time.monotonic()
            await asyncio.gather(*(read(client, steps * TOKENS_PER_STEP) for _ in range(count)))
            took = time.monotonic() - began
            tokens = count * steps * TOKENS_PER_STEP
            used = {r: (s - before[r] - idle.get(r, 0) * took) / tokens * 1e6 for r, s in cpu_s(pid).items()}
            found[f"us_per_token_{count}"] = round(sum(used.values()), 1)
            found[f"roles_{count}"] = {role: round(us, 1) for role, us in used.items() if us >= 0.5}
            found[f"slowdown_{count}"] = round(took / ((steps - 1) * STEP_S), 2)
        found["unary_p50_ms"] = round(await unary_ms(client), 2)
    return found


async def unary_ms(client: httpx.AsyncClient, repeats: int = 200) -> float:
    body = {"model": "paced", "messages": [{"role": "user", "content": "x"}], "max_tokens": TOKENS_PER_STEP}
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def run(server: str, streams: list[int], steps: int) -> dict[str, Any]:
    port = free_port()
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.gateway", "--child", server, str(port)]
    child = subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if httpx.get(url + "/ready", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server {server} did not come up")
            time.sleep(0.3)
        return asyncio.run(measure(url, child.pid, streams, steps))
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--out", type=Path, help="where to write the JSON as well")
    parser.add_argument("--child", nargs=2, metavar=("SERVER", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        server, port = options.child[0], int(options.child[1])
        if server in ("ours", "haproxy"):
            serve_ours(port, "haproxy" if server == "haproxy" else "serve")
        else:
            {"bare": serve_bare, "plain": serve_plain}[server](port)
        return
    streams = [int(count) for count in options.streams.split(",")]
    results = {}
    for server in options.servers.split(","):
        results[server] = run(server, streams, options.steps)
        row = "  ".join(f"{key} {value}" for key, value in results[server].items())
        print(f"{server:8} {row}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
