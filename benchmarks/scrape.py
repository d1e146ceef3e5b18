"""How long a scrape takes: one exporter alone, and the ingress's /metrics over 64 exporters.

    python -m benchmarks.scrape [--exporters 64]

The exporters run in one other process on this machine, so the merged time includes their work; on a cluster it is
spread over the nodes. The last line is JSON, times in milliseconds, medians.

What this program does not do: run Ray (the directory of exporters is given).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

from prometheus_client import CollectorRegistry, start_http_server

from serve_app.exporter import scrape
from serve_app.exposition import merge
from serve_app.graph_batch import FallbackReason
from serve_app.metrics import EngineMetrics

REPEATS = 15


def serve_exporters(count: int, pipe: Connection) -> None:
    """Exporters with every series of an engine, until the pipe closes. Sends their ports."""
    ports = []
    for _ in range(count):
        registry = CollectorRegistry()
        EngineMetrics(registry, "model", 16, [reason.value for reason in FallbackReason])
        server, _thread = start_http_server(0, "127.0.0.1", registry)
        ports.append(server.server_port)
    pipe.send(ports)
    pipe.recv()


async def measure(ports: list[int]) -> dict[str, float]:
    pages = {f"engine#{number}": f"http://127.0.0.1:{port}/metrics" for number, port in enumerate(ports)}
    one, every, merging, size = [], [], [], 0
    for _ in range(REPEATS):
        started = time.perf_counter()
        await scrape(dict(list(pages.items())[:1]), 5)
        one.append(time.perf_counter() - started)
        started = time.perf_counter()
        texts = await scrape(pages, 5)
        fetched = time.perf_counter()
        size = merge(texts).count(b"\n")
        every.append(time.perf_counter() - started)
        merging.append(time.perf_counter() - fetched)
    assert len(texts) == len(pages), "an exporter did not answer"
    times = {"one_exporter_ms": one, "all_ms": every, "merge_ms": merging}
    return {**{name: round(1000 * statistics.median(took), 1) for name, took in times.items()}, "lines": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exporters", type=int, default=64)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    count = parser.parse_args().exporters
    process = multiprocessing.get_context("spawn").Process(target=serve_exporters, args=(count, theirs), daemon=True)
    process.start()
    try:
        print(json.dumps({"exporters": count, **asyncio.run(measure(ours.recv()))}))
    finally:
        ours.send(None)
        process.join(5)


if __name__ == "__main__":
    main()
