"""What the serving plane costs per streamed token, against a bare uvicorn server and the usual Ray Serve pattern.

Four servers on the same machine, measured in turn, around one paced engine (4 tokens a step):

  bare    uvicorn and an SSE generator in one process, one frame a step
  plain   FastAPI ingress → handle → generator under Ray Serve as it comes, one frame a token
  ours    this product behind Serve's own proxy, with the engine behind its engine seam
  haproxy the same behind Serve's HAProxy, as the launcher runs it where there is one

Cost is CPU time of all the server's processes, without what they use when idle, divided by tokens: a busy machine
lengthens waits, and changes CPU time much less. `unary` is the median time of a one-step answer.

The engine has two paces, in every server alike. `own`: each stream steps by a clock of its own, so that hardly two of
them emit together. `step`: all of them emit at the same moments, as those of one batch do. The aims are meant for the
second, which is what an engine with continuous batching does; both are printed.

Servers take turns within a round, and the rounds' medians count. A ratio is taken within each round, so that what the
machine does meanwhile concerns both sides; its median, least and most over the rounds are printed.

    python -m benchmarks.gateway [--streams 1,16,64] [--steps 40] [--rounds 4] [--servers bare,plain,ours,haproxy]
                                 [--out PATH]

The first of `--streams` to be a multiple of 16 is measured in every round, the others in the first. Prints tables, and
JSON on the last line. Takes below three minutes. What it does not do: an engine's own work.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from load_tests.processes import sample
from load_tests.target import free_port

ROOT = Path(__file__).resolve().parent.parent

STEP_S, TOKENS_PER_STEP = 0.05, 4
IDLE_S, IDLE_TIMES = 4.0, 4
UNARY_REPEATS = 100
# What a request asks for by its seed, the only number that every server passes on.
PACES = ("own", "step")
# Ours against the usual pattern (at least), against the bare server (at most), and milliseconds over that.
AIMS = {"plain": 15.0, "bare": 4.0, "unary": 2.0}
SERVERS = ("bare", "plain", "ours", "haproxy")
START_S = 120
PACED = {"model": {"id": "paced"}, "replica": {"num_cpus": 0.1}}
HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "paced"}


# -- servers ---------------------------------------------------------------------------------------------------------


class Pace:
    """When the streams of a process emit."""

    def __init__(self) -> None:
        self._step: asyncio.Event | None = None
        self._due = 0.0

    async def next(self, seed: int | None) -> None:
        """Until a stream of that pace makes its next tokens."""
        if PACES[seed or 0] == "own":
            await asyncio.sleep(STEP_S)
            return
        if self._step is None:
            self._step = asyncio.Event()
            loop = asyncio.get_running_loop()
            now = loop.time()
            # A timer may fire a little early.
            self._due = self._due + STEP_S if now < self._due + STEP_S else now + STEP_S
            loop.call_at(self._due, self._over)
        await self._step.wait()

    def _over(self) -> None:
        assert self._step is not None
        self._step.set()
        self._step = None


class PacedEngine:
    """The engine seam: `max_tokens` tokens, four every 50 ms, the first at once."""

    def __init__(self, config: Any, registry: Any) -> None:
        self._last: float | None = None
        self._pace = Pace()

    async def start(self) -> None: ...

    async def submit(self, request: Any) -> Any:
        from serve_app.engines.base import Chunk, Usage

        total = request.sampling.max_tokens
        for at in range(0, total, TOKENS_PER_STEP):
            if at:
                await self._pace.next(request.sampling.seed)
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

    pace = Pace()

    async def chat(request: Request) -> Response:
        body = await request.json()
        total = body["max_tokens"]

        async def frames() -> Any:
            for at in range(0, total, TOKENS_PER_STEP):
                if at:
                    await pace.next(body.get("seed"))
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
        def __init__(self) -> None:
            self._pace = Pace()

        async def __call__(self, total: int, seed: int | None) -> Any:
            for at in range(0, total, TOKENS_PER_STEP):
                if at:
                    await self._pace.next(seed)
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
            chunks = self._generator.options(stream=True).remote(body["max_tokens"], body.get("seed"))
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


async def read(client: httpx.AsyncClient, tokens: int, pace: str = "own") -> None:
    body = {
        "model": "paced", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": tokens,
        "seed": PACES.index(pace),
    }  # fmt: skip
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        text = b"".join([part async for part in answer.aiter_raw()])
    assert text.count(b" word") == tokens and text.endswith(b"[DONE]\n\n"), text[-200:]


@dataclass
class Server:
    """One that runs. `idle`: CPU that its processes use without requests, by role."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    idle: dict[str, float] = field(default_factory=dict)

    async def streams(self, client: httpx.AsyncClient, count: int, steps: int, pace: str) -> dict[str, Any]:
        before, began = cpu_s(self.process.pid), time.monotonic()
        await asyncio.gather(*(read(client, steps * TOKENS_PER_STEP, pace) for _ in range(count)))
        took, tokens = time.monotonic() - began, count * steps * TOKENS_PER_STEP
        after = cpu_s(self.process.pid)
        used = {role: (s - before[role] - self.idle.get(role, 0) * took) / tokens * 1e6 for role, s in after.items()}
        label = f"{count}_{pace}"
        return {
            f"us_per_token_{label}": round(sum(used.values()), 1),
            f"roles_{label}": {role: round(us, 1) for role, us in used.items() if us >= 0.5},
            f"slowdown_{label}": round(took / ((steps - 1) * STEP_S), 2),
        }

    async def unary(self, client: httpx.AsyncClient) -> dict[str, Any]:
        body = {"model": "paced", "messages": [{"role": "user", "content": "x"}], "max_tokens": TOKENS_PER_STEP}
        times = []
        for _ in range(UNARY_REPEATS):
            began = time.perf_counter()
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            times.append(1000 * (time.perf_counter() - began))
        return {"unary_p50_ms": round(statistics.median(times), 2)}


async def measure(servers: list[Server], streams: list[int], steps: int, rounds: int) -> list[dict[str, Any]]:
    """For each round what each server took."""
    always = next((count for count in streams if count % 16 == 0), streams[0])
    limits = httpx.Limits(max_connections=max(streams), max_keepalive_connections=max(streams))
    found: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits, trust_env=False)
            )
            for server in servers
        ]
        for client in clients:
            await asyncio.gather(*(read(client, 8) for _ in range(max(streams))))
        # The least of some: what a server still does after its start must not be taken off its cost.
        for _ in range(IDLE_TIMES):
            before = [cpu_s(server.process.pid) for server in servers]
            await asyncio.sleep(IDLE_S)
            for server, was in zip(servers, before, strict=True):
                now = cpu_s(server.process.pid)
                rates = {role: (used - was[role]) / IDLE_S for role, used in now.items()}
                server.idle = {role: min(rate, server.idle.get(role, rate)) for role, rate in rates.items()}
        for number in range(rounds):
            took: dict[str, Any] = {}
            for server, client in zip(servers, clients, strict=True):
                row = took[server.name] = await server.unary(client)
                for count in streams:
                    for pace in PACES if count > 1 else PACES[:1]:  # one stream has one pace
                        if number == 0 or count == always:
                            row.update(await server.streams(client, count, steps, pace))
                print(f"round {number + 1} {server.name:8} {row}", flush=True)
            found.append(took)
    return found


def medians(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of every number, over the rounds that have it."""
    return {
        server: {
            key: round(statistics.median(took[server][key] for took in rounds if key in took[server]), 2)
            for key, value in row.items()
            if not isinstance(value, dict)
        }
        for server, row in rounds[0].items()
    }


def ratios(rounds: list[dict[str, Any]], servers: Sequence[str]) -> dict[str, Any]:
    """What the aims are about, within each round: median, least and most."""
    found: dict[str, Any] = {}

    def note(name: str, values: list[float]) -> None:
        found[name] = [round(value, 2) for value in (statistics.median(values), min(values), max(values))]

    for ours in (name for name in ("ours", "haproxy") if name in servers):
        for key in rounds[0][ours]:
            if key.startswith("us_per_token_"):
                having = [took for took in rounds if key in took[ours]]
                label = key.removeprefix("us_per_token_")
                if "plain" in servers:
                    note(f"plain / {ours}, {label}", [took["plain"][key] / took[ours][key] for took in having])
                if "bare" in servers:
                    note(f"{ours} / bare, {label}", [took[ours][key] / took["bare"][key] for took in having])
        if "bare" in servers:
            over = [took[ours]["unary_p50_ms"] - took["bare"]["unary_p50_ms"] for took in rounds]
            note(f"{ours} - bare, unary ms", over)
    return found


@contextlib.contextmanager
def running(name: str) -> Iterator[Server]:
    """A server, which need not be up yet."""
    port = free_port()
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.gateway", "--child", name, str(port)]
    child = subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield Server(name, child, f"http://127.0.0.1:{port}")
    finally:
        end(child)


def end(process: subprocess.Popen[bytes]) -> None:
    """A process that leads a group, and all of it where it does not end by itself."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_for(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(server.url + "/ready", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server {server.name} did not come up")
        time.sleep(0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4)
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
    names = options.servers.split(",")
    with contextlib.ExitStack() as stack:
        servers = []
        for name in names:
            servers.append(stack.enter_context(running(name)))
            wait_for(servers[-1])
        rounds = asyncio.run(measure(servers, streams, options.steps, options.rounds))
    results = {"median": medians(rounds), "ratios": ratios(rounds, names), "aims": AIMS, "rounds": rounds}
    for server, row in results["median"].items():
        print(f"{server:8} " + "  ".join(f"{key} {value}" for key, value in row.items()))
    for name, (median, least, most) in results["ratios"].items():
        print(f"{name:28} {median:6.2f}  ({least:.2f} to {most:.2f})")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
