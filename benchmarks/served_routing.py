"""Routers against each other on the real stack: Ray Serve, ingresses, replicas, and engines with a prefix cache.

Each router has an application of its own on one cluster: proxy, two ingresses, replicas. At the engine seam stands one
without a model that takes real time: it computes one prompt at a time, what its bounded cache holds is free, and a
decode step grows with the batch. A closed loop of clients holds chats of growing length over a few system prompts; the
routers take turns, round by round, each time with the same chats. A round's chats are new ones.

    python -m benchmarks.served_routing [--replicas 4] [--clients 32] [--seconds 20] [--rounds 3] [--out PATH]

Prints the table of all rounds so far after each, and JSON on the last line. What it does not do: load processors; the
times are the engines', and a busy machine adds to them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.prefix_cache import BLOCK_CHARS, TOKENS_PER_BLOCK, BlockCache, words
from load_tests.target import free_port
from serve_app.engines.base import Chunk, EngineStats, GenerateRequest, ModelInfo, Usage
from serve_app.launch import SERVE_SWITCHES
from serve_app.router.prefixes import blocks_of

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "benchmarks.served_routing:CachingEngine"
PREFILL_S, PREFILL_TOKENS_S, CACHE_TOKENS = 0.01, 4000.0, 24_000
STEP_S, STEP_PER_REQUEST_S, TOKENS_PER_STEP = 0.08, 0.004, 4
SYSTEMS, SYSTEM_CHARS, THINK_S = 8, 6000, 1.0
# What comes in the first part of a round meets cold caches, and is not counted.
WARM_SHARE = 0.25
RAY_PREFIX = "benchmarks.ray_prefix_router.JobPrefixRouter"
# Name → (application, `routing.policy`, or the arguments of Ray's router).
ROUTERS: dict[str, tuple[str, str | dict[str, float]]] = {
    "power of two choices": ("pow2", "power_of_two"),
    "Ray's prefix router, defaults": ("ray", {}),
    "Ray's prefix router, threshold 10": ("ray10", {"imbalanced_threshold": 10}),
    "prefix under a load bound": ("ours", "prefix"),
}


# -- the engine ------------------------------------------------------------------------------------------------------


class CachingEngine:
    """The engine seam. An answer's first two words are the process and the milliseconds that it took here."""

    def __init__(self, config: Any, registry: Any) -> None:
        self._cache = BlockCache(CACHE_TOKENS // TOKENS_PER_BLOCK)
        self._prefill = asyncio.Lock()
        self._live, self._last = 0, time.monotonic()

    async def start(self) -> None: ...

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        total, blocks = request.sampling.max_tokens or 1, blocks_of(request, BLOCK_CHARS)
        self._live, arrived = self._live + 1, time.monotonic()
        try:
            # Locks are given in the order in which they were asked for.
            async with self._prefill:
                hit = self._cache.use(blocks)
                await asyncio.sleep(prefill_s(len(blocks) - hit))
            for at in range(0, total, TOKENS_PER_STEP):
                if at:
                    await asyncio.sleep(STEP_S + STEP_PER_REQUEST_S * self._live)
                count = min(TOKENS_PER_STEP, total - at)
                text = " word" * count
                if not at:
                    text = f"{os.getpid()} {1000 * (time.monotonic() - arrived):.1f}" + " word" * (count - 2)
                self._last, end = time.monotonic(), at + count >= total
                usage = Usage(len(blocks) * TOKENS_PER_BLOCK, total, hit * TOKENS_PER_BLOCK) if end else None
                yield Chunk(0, tuple(range(count)), text, finish_reason="length" if end else None, usage=usage)
        finally:
            self._live -= 1

    async def health(self) -> None: ...

    def stats(self) -> EngineStats:
        age = time.monotonic() - self._last
        return EngineStats(self._live, 0, 64, kv_tokens_total=CACHE_TOKENS, last_token_age_s=age)

    def info(self) -> ModelInfo:
        return ModelInfo("cached", 1 << 20, 1000, 1)

    async def abort(self, request_id: str) -> bool:
        return False

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        return blocks_of(request, BLOCK_CHARS)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return " word" * len(token_ids)

    async def stop(self) -> None: ...


def prefill_s(blocks: int) -> float:
    """Seconds to compute a prompt of which so many blocks are not cached."""
    return PREFILL_S + blocks * TOKENS_PER_BLOCK / PREFILL_TOKENS_S


# -- the clients -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: when it was asked for, began and ended (seconds of one clock), who gave it and in how many of those
    seconds the engine began, tokens of its prompt."""

    sent: float
    first: float
    ended: float
    replica: str
    engine_s: float
    prompt_tokens: int
    cached_tokens: int


async def chats(client: httpx.AsyncClient, path: str, seed: str, systems: list[str], until: float) -> list[Turn]:
    """One client: chat after chat until a time of the monotonic clock. A turn that began is finished."""
    rng, turns = random.Random(seed), list[Turn]()
    while True:
        messages = [{"role": "system", "content": rng.choice(systems)}]
        for _ in range(rng.randint(2, 6)):
            await asyncio.sleep(rng.expovariate(1 / THINK_S))
            if time.monotonic() > until:
                return turns
            messages.append({"role": "user", "content": words(rng, rng.randint(100, 1500))})
            turn, answer = await ask(client, path, messages, rng.randint(40, 120))
            turns.append(turn)
            messages.append({"role": "assistant", "content": answer})


async def ask(
    client: httpx.AsyncClient, path: str, messages: list[dict[str, str]], max_tokens: int
) -> tuple[Turn, str]:
    body = {
        "model": "cached", "messages": messages, "max_tokens": max_tokens, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    first, text, usage, sent = 0.0, "", None, time.monotonic()
    async with client.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            if text and not first:
                first = time.monotonic()
    if usage is None or usage["completion_tokens"] != max_tokens:
        raise RuntimeError(f"an answer is not whole: {text[-200:]}")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    replica, engine_ms = text.split()[:2]
    engine_s = float(engine_ms) / 1000
    return Turn(sent, first, time.monotonic(), replica, engine_s, usage["prompt_tokens"], cached), text


async def one_round(url: str, path: str, number: int, clients: int, seconds: float) -> tuple[list[Turn], float]:
    """All turns, and since when they count."""
    rng = random.Random(f"round {number}")
    systems = [words(rng, SYSTEM_CHARS) for _ in range(SYSTEMS)]
    began = time.monotonic()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        each = [chats(client, path, f"{number}.{i}", systems, began + seconds) for i in range(clients)]
        turns = [turn for one in await asyncio.gather(*each) for turn in one]
    return turns, began + WARM_SHARE * seconds


# -- the sums --------------------------------------------------------------------------------------------------------


def summary(rounds: Sequence[tuple[Sequence[Turn], float]], replicas: int) -> dict[str, float]:
    """Of (turns, since when they count) of each round: share of prompt tokens that were cached, times to first token
    as a client and as the engine sees them, and what the busiest replica had to do as a multiple of the mean, as each
    turn found it, itself included."""
    counted = [turn for turns, since in rounds for turn in turns if turn.sent >= since]
    ttfts = sorted(1000 * (turn.first - turn.sent) for turn in counted)
    engine = sorted(1000 * turn.engine_s for turn in counted)
    spread = [imbalance(turns, turn.sent, replicas) for turns, since in rounds for turn in turns if turn.sent >= since]
    return {
        "requests": len(counted),
        "hit_rate": sum(t.cached_tokens for t in counted) / sum(t.prompt_tokens for t in counted),
        "ttft_p50_ms": ttfts[len(ttfts) // 2],
        "ttft_p99_ms": ttfts[len(ttfts) * 99 // 100],
        "engine_p50_ms": engine[len(engine) // 2],
        "engine_p99_ms": engine[len(engine) * 99 // 100],
        "imbalance": statistics.mean(spread),
    }


def imbalance(turns: Sequence[Turn], now: float, replicas: int) -> float:
    """Turns under way at the busiest of so many replicas at a moment, divided by their mean."""
    loads: dict[str, int] = {}
    for turn in turns:
        if turn.sent <= now < turn.ended:
            loads[turn.replica] = loads.get(turn.replica, 0) + 1
    return max(loads.values()) * replicas / sum(loads.values())


# -- the run ---------------------------------------------------------------------------------------------------------


def deploy(name: str, replicas: int) -> None:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from serve_app.build import bind
    from serve_app.config import load_config

    application, how = ROUTERS[name]
    ours = isinstance(how, str)
    tree = {
        "model": {"id": "cached"},
        "replica": {"num_replicas": replicas, "num_cpus": 0.1},
        "ingress": {"num_replicas": 2},
        "routing": {"policy": how} if ours else {},
        "metrics": {"host": "127.0.0.1"},
    }
    router = None if ours else RequestRouterConfig(request_router_class=RAY_PREFIX, request_router_kwargs=how)
    bound = bind(load_config(tree, use_env=False), ENGINE, router=router)
    serve.run(bound, name=application, route_prefix=f"/{application}")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known after each round."""
    os.environ.update({**SERVE_SWITCHES, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"})
    os.environ["PYTHONPATH"] = str(ROOT)
    import ray
    from ray import serve

    port, rounds = free_port(), {name: list[tuple[list[Turn], float]]() for name in ROUTERS}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        ray.init(
            address="local", _temp_dir=directory, include_dashboard=False, num_cpus=32, log_to_driver=False,
            object_store_memory=128 * 1024 * 1024,
        )  # fmt: skip
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            for name in ROUTERS:
                deploy(name, options.replicas)
            for number in range(options.rounds):
                for name, (application, _) in ROUTERS.items():
                    path = f"/{application}/v1/chat/completions"
                    made = one_round(f"http://127.0.0.1:{port}", path, number, options.clients, options.seconds)
                    rounds[name].append(asyncio.run(made))
                yield {
                    "settings": {key: getattr(options, key) for key in ("replicas", "clients", "seconds", "rounds")},
                    "table": {name: summary(seen, options.replicas) for name, seen in rounds.items()},
                    "rounds": {name: [summary([r], options.replicas) for r in seen] for name, seen in rounds.items()},
                }
            serve.shutdown()
        finally:
            ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where to write the JSON as well")
    options = parser.parse_args()
    # A line for each request, else.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    results: dict[str, Any] = {}
    for results in run(options):
        show(results["table"])
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


def show(table: dict[str, dict[str, float]]) -> None:
    print(
        f"{'':36}{'requests':>9}{'hit rate':>9}{'TTFT p50':>9}{'p99 ms':>8}{'engine p50':>11}{'p99':>6}{'max/mean':>10}"
    )
    for name, row in table.items():
        print(
            f"{name:36}{row['requests']:9}{row['hit_rate']:9.2f}{row['ttft_p50_ms']:9.0f}{row['ttft_p99_ms']:8.0f}"
            f"{row['engine_p50_ms']:11.0f}{row['engine_p99_ms']:6.0f}{row['imbalance']:10.2f}"
        )


if __name__ == "__main__":
    main()
