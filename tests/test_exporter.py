"""Merging the pages of several processes."""

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from serve_app.exporter import PORTS, ExporterDirectory, _close, _listen, merge, scrape
from serve_app.metrics import EngineMetrics, GatewayMetrics
from tests.conftest import free_port


def page(count: float) -> str:
    registry = CollectorRegistry()
    Counter("a_total", "A.", ("model",), registry=registry).labels('m"\\\n').inc(count)
    Histogram("b_seconds", "B.", registry=registry).observe(count)
    Gauge("c", "C: one \\ line\nand another.", registry=registry).set(count)
    return generate_latest(registry).decode()


def test_each_family_is_declared_once_and_samples_keep_their_values() -> None:
    text = merge({"x": page(1), "y": page(2)}).decode()
    assert text.count("# TYPE a_total counter") == text.count("# HELP b_seconds ") == 1
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert {(s.labels["replica"], s.labels["model"], s.value) for s in families["a"].samples} == {
        ("x", 'm"\\\n', 1.0),
        ("y", 'm"\\\n', 2.0),
    }
    assert families["c"].documentation == "C: one \\ line\nand another."


def test_merging_one_page_changes_only_the_label() -> None:
    (original, merged) = ({(s.name, s.value) for f in text_string_to_metric_families(text) for s in f.samples}
                          for text in (page(3), merge({"x": page(3)}).decode()))  # fmt: skip
    assert {entry for entry in original if not entry[0].endswith("_created")} == merged


def test_nothing_to_merge_is_an_empty_page() -> None:
    assert merge({}) == b""


@pytest.fixture
def served_page() -> Iterator[str]:
    registry = CollectorRegistry()
    Gauge("one", "One.", registry=registry).set(1)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_a_silent_process_costs_its_page_and_the_timeout_only(served_page: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
    texts = await scrape({"good": served_page, "silent": url, "gone": "http://127.0.0.1:1/metrics"}, 0.3)
    server.close()
    assert list(texts) == ["good"] and "one 1.0" in texts["good"]


async def test_a_process_without_heartbeats_is_forgotten() -> None:
    directory = ExporterDirectory(heartbeat_s=0.05)
    await directory.heartbeat("a", "u")
    assert await directory.living() == {"a": "u"}
    await asyncio.sleep(0.3)
    assert await directory.living() == {}


async def test_a_process_that_leaves_is_forgotten_at_once() -> None:
    directory = ExporterDirectory(heartbeat_s=9)
    await directory.heartbeat("a", "u")
    await directory.leave("a")
    await directory.leave("never there")
    assert await directory.living() == {}


def test_the_products_series_survive_merging() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    EngineMetrics(registry, "m", 8, ["no_cuda"])
    text = generate_latest(registry).decode()
    names = {f.name for f in text_string_to_metric_families(text) if not f.name.endswith("_created")}
    assert {f.name for f in text_string_to_metric_families(merge({"x": text}).decode())} == names


def test_processes_of_one_node_share_a_configured_port_range() -> None:
    first = free_port()
    servers = [_listen("127.0.0.1", first, CollectorRegistry()) for _ in range(2)]
    try:
        ports = [server.server_port for server, _ in servers]
        assert ports[0] == first < ports[1] < first + PORTS
    finally:
        for server, thread in servers:
            _close(server, thread)
