"""Who exports where, and reading their pages."""

import asyncio
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from serve_app import exporter
from serve_app.exporter import PORTS, ExporterDirectory, Page, _close, _listen, keep_alive, scrape, target
from tests.conftest import free_port


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


async def test_targets_have_the_form_of_prometheus_discovery() -> None:
    directory = ExporterDirectory(heartbeat_s=0.05)
    await directory.heartbeat("engine#a", "http://10.0.0.1:9000/metrics", {"node": "10.0.0.1", "model": "m"})
    await asyncio.sleep(0.11)
    labels = {"node": "10.0.0.1", "model": "m", "replica": "engine#a", "__metrics_path__": "/metrics"}
    assert await directory.targets() == [{"targets": ["10.0.0.1:9000"], "labels": labels}]


async def test_a_directory_that_has_just_started_does_not_claim_to_know_them_all() -> None:
    directory = ExporterDirectory(heartbeat_s=9)
    await directory.heartbeat("a", "http://h:1/metrics")
    assert await directory.targets() is None


async def test_a_directory_that_never_answers_is_told_again() -> None:
    told, again = list[str](), asyncio.Event()

    class Silent:
        """A handle whose calls meet a machine that says nothing."""

        @property
        def heartbeat(self) -> "Silent":
            return self

        def remote(self, *said: str) -> asyncio.Future[None]:
            told.extend(said)
            if len(told) > 1:
                again.set()
            return asyncio.get_running_loop().create_future()

    beats = asyncio.create_task(keep_alive(Silent(), 0.01, "me"))
    await asyncio.wait_for(again.wait(), 60)
    beats.cancel()
    assert told[:2] == ["me", "me"]


def test_ipv6_addresses_keep_their_brackets() -> None:
    assert target("a", Page("http://[::1]:90/metrics"))["targets"] == ["[::1]:90"]


def test_processes_of_one_node_share_a_configured_port_range() -> None:
    first = free_port()
    servers = [_listen("127.0.0.1", first, CollectorRegistry()) for _ in range(2)]
    try:
        ports = [server.server_port for server, _ in servers]
        assert ports[0] == first < ports[1] < first + PORTS
    finally:
        for server, thread in servers:
            _close(server, thread)


@pytest.fixture
def listening() -> Iterator[str]:
    registry = CollectorRegistry()
    Gauge("one", "One.", registry=registry).set(1)
    server, thread = _listen("127.0.0.1", 0, registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    _close(server, thread)


@pytest.mark.parametrize(
    "accept",
    [
        "", ";;;,,,", "*/*", "image/png;q=0", "text/plain;version=x", "application/openmetrics-text;version=abc",
        "application/openmetrics-text;version", "application/openmetrics-text;version=1.0.0;escaping=none",
    ],
)  # fmt: skip
def test_whatever_a_client_accepts_it_gets_the_page(listening: str, accept: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(listening, headers={"Accept": accept}), timeout=60) as answer:
        assert b"one 1.0" in answer.read()


def test_a_connection_that_says_nothing_is_closed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporter, "IDLE_S", 0.1)
    server, thread = _listen("127.0.0.1", 0, CollectorRegistry())
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as silent:
            assert silent.recv(1) == b""
    finally:
        _close(server, thread)
    assert capfd.readouterr().err == ""
