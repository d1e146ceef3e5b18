"""What HTTP, the ingress and Ray Serve add to the engine: the same requests in this process and through `serve run`.

Both sides run the embedded engine with the same configuration on the same machine, one after the other in one run, so
the differences are the price of the serving plane, and on few cores of its processes competing with the engine.

    python -m benchmarks.serving_overhead [--tokens 64] [--repeats 5]

Prints a table and, on the last line, JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
from tqdm import tqdm

from load_tests.target import free_port
from serve_app.config import Config, load_config
from serve_app.engines import create_engine
from serve_app.engines.base import GenerateRequest, SamplingParams

PROMPTS = [
    "Why is the sky blue?",
    "Write three tips for learning a language.",
    "Explain what a hash table is.",
    "Tell a short story about a lighthouse.",
]
START_TIMEOUT_S = 180


@dataclass(frozen=True)
class Timing:
    """One stream, in seconds from its start: time to the first content, and to its end."""

    first: float
    end: float
    tokens: int


async def timed(events: AsyncIterator[tuple[bool, int]]) -> Timing:
    """`events` yields (has content, tokens so far)."""
    started = time.perf_counter()
    first, total = None, 0
    async for content, tokens in events:
        if content and first is None:
            first = time.perf_counter() - started
        total = tokens
    end = time.perf_counter() - started
    return Timing(first if first is not None else end, end, total)


async def measure(one: Callable[[int], Awaitable[Timing]], streams: int, repeats: int, bar: tqdm) -> dict[str, float]:
    """Medians over all streams of `repeats` rounds: TTFT and time per token after the first, in milliseconds."""
    timings: list[Timing] = []
    for round_ in range(repeats):
        timings += await asyncio.gather(*(one(round_ * streams + i) for i in range(streams)))
        bar.update()
    per_token = [(t.end - t.first) / max(1, t.tokens - 1) for t in timings]
    return {
        "ttft_ms": 1e3 * statistics.median(t.first for t in timings),
        "per_token_ms": 1e3 * statistics.median(per_token),
    }


async def in_process(config: Config, tokens: int, repeats: int, levels: list[int], bar: tqdm) -> dict[int, dict]:
    from prometheus_client import CollectorRegistry

    engine = create_engine(config, CollectorRegistry())
    await engine.start()

    async def one(number: int) -> Timing:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        message = {"role": "user", "content": PROMPTS[number % len(PROMPTS)]}
        request = GenerateRequest(f"bench-{time.monotonic_ns()}-{number}", sampling, messages=[message])

        async def events() -> AsyncIterator[tuple[bool, int]]:
            total = 0
            async for chunk in engine.submit(request):
                total += len(chunk.token_ids)
                yield bool(chunk.text), total

        return await timed(events())

    try:
        await one(0)
        return {level: await measure(one, level, repeats, bar) for level in levels}
    finally:
        await engine.stop()


async def through_http(
    base: str, model: str, tokens: int, repeats: int, levels: list[int], bar: tqdm
) -> dict[int, dict]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> Timing:
            message = {"role": "user", "content": PROMPTS[number % len(PROMPTS)]}
            body = {"model": model, "messages": [message], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}

            async def events() -> AsyncIterator[tuple[bool, int]]:
                async with session.post(f"{base}/v1/chat/completions", json=body) as answer:
                    answer.raise_for_status()
                    async for line in answer.content:
                        if not line.startswith(b"data: {"):
                            continue
                        event = json.loads(line[6:])
                        used = event.get("usage") or {}
                        delta = event["choices"][0]["delta"] if event["choices"] else {}
                        yield bool(delta.get("content")), used.get("completion_tokens", 0)

            return await timed(events())

        await one(0)
        return {level: await measure(one, level, repeats, bar) for level in levels}


async def serve_and_measure(model: str, tokens: int, repeats: int, levels: list[int], bar: tqdm) -> dict[int, dict]:
    port = free_port()
    command = [sys.executable, "-m", "serve_app.launch", "--port", str(port)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(START_TIMEOUT_S):
            while not await ready(session, base):
                if child.poll() is not None:
                    raise SystemExit("the server did not start; run `python -m serve_app.launch` to see why")
                await asyncio.sleep(0.5)
        return await through_http(base, model, tokens, repeats, levels, bar)
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(60)


async def ready(session: aiohttp.ClientSession, base: str) -> bool:
    try:
        async with session.get(f"{base}/ready") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    config = load_config()
    arguments = (options.tokens, options.repeats, options.streams)
    with tqdm(total=2 * options.repeats * len(options.streams), unit="round", file=sys.stderr) as bar:
        direct = asyncio.run(in_process(config, *arguments, bar))
        served = asyncio.run(serve_and_measure(config.model.id, *arguments, bar))
    report: dict[str, object] = {"tokens": options.tokens, "repeats": options.repeats}
    print(f"{'streams':>7} {'measure':>12} {'in process':>12} {'served':>12} {'added':>12} {'ratio':>8}")
    for level in options.streams:
        rows = {}
        for name in ("ttft_ms", "per_token_ms"):
            a, b = direct[level][name], served[level][name]
            rows[name] = {"in_process": a, "served": b, "added": b - a, "ratio": b / a}
            print(f"{level:>7} {name:>12} {a:>12.2f} {b:>12.2f} {b - a:>12.2f} {b / a:>8.2f}")
        report[str(level)] = rows
    print(json.dumps(report))


if __name__ == "__main__":
    main()
