"""Publishing the series of every process, and gathering them into one page.

Each process serves its own registry on its own port (`Exporter`) and keeps telling the `ExporterDirectory` where.
A Prometheus finds them all by `targets`; `scrape` reads all pages that are alive now, so that any ingress can answer
/metrics for the whole deployment. The series of a removed replica go away with its heartbeats.

What this module does not do: declare series (see `metrics`), or merge pages (see `exposition`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import ray
from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server
from prometheus_client.exposition import choose_encoder
from ray import serve

from serve_app.config import MetricsConfig
from serve_app.errors import ConfigError
from serve_app.metrics import ProcessMetrics
from serve_app.multiprocess import EngineFiles

logger = logging.getLogger("ray.serve.ddtree.metrics")
MISSED_HEARTBEATS = 3
# Processes of one node that may export from a fixed port on.
PORTS = 64
# How long a connection to an exporter may say nothing.
IDLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Page:
    """Where one process exports, and the labels that say which process it is. `seen`: monotonic, of its last word."""

    url: str
    labels: Mapping[str, str] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)


class ExporterDirectory:
    """Where the living exporters are. In memory: after a restart the next heartbeats fill it again."""

    def __init__(self, heartbeat_s: float) -> None:
        self._lifetime_s = MISSED_HEARTBEATS * heartbeat_s
        # Until everybody had time to report, the list is not known to be whole.
        self._whole_at = time.monotonic() + 2 * heartbeat_s
        self._seen: dict[str, Page] = {}

    async def heartbeat(self, replica: str, url: str, labels: Mapping[str, str] | None = None) -> None:
        self._seen[replica] = Page(url, labels or {})

    async def leave(self, replica: str) -> None:
        self._seen.pop(replica, None)

    async def living(self) -> dict[str, str]:
        """replica → URL of its page."""
        return {name: page.url for name, page in self._living().items()}

    async def targets(self) -> list[dict[str, Any]] | None:
        """The living exporters in the format of Prometheus's HTTP service discovery; None while more may report."""
        if time.monotonic() < self._whole_at:
            return None
        return [target(name, page) for name, page in sorted(self._living().items())]

    def _living(self) -> dict[str, Page]:
        oldest = time.monotonic() - self._lifetime_s
        self._seen = {name: page for name, page in self._seen.items() if page.seen >= oldest}
        return self._seen


def target(replica: str, page: Page) -> dict[str, Any]:
    """One entry of the service discovery: an address, and the labels of whatever is scraped from it."""
    where = urlsplit(page.url)
    labels = {**page.labels, "replica": replica, "__metrics_path__": where.path}
    return {"targets": [where.netloc], "labels": labels}


class Exporter:
    """Serves a registry over HTTP from a thread and keeps the directory informed from the running event loop.

    Must be made inside a Serve replica, whose id names it. `directory` is a handle of `ExporterDirectory`; `model` is
    what the process serves.
    """

    def __init__(self, registry: CollectorRegistry, config: MetricsConfig, directory: Any, model: str) -> None:
        self._directory, self._config = directory, config
        # A second series for each counter and histogram, which nothing here reads.
        disable_created_metrics()
        ProcessMetrics(registry)
        registry.register(EngineFiles())
        node = ray.util.get_node_ip_address()
        host = node if config.host == "auto" else config.host
        self._server, self._thread = _listen(host, config.port, registry)
        context = serve.get_replica_context()
        self.name = f"{context.deployment}#{context.replica_tag}"
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        self._labels = {"deployment": context.deployment, "node": node, "model": model}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        beats = keep_alive(self._directory, self._config.heartbeat_s, self.name, self.url, self._labels)
        self._task = asyncio.create_task(beats)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._directory.leave.remote(self.name), self._config.heartbeat_s)
        # shutdown() waits for the server's loop, up to half a second.
        await asyncio.to_thread(_close, self._server, self._thread)


async def keep_alive(directory: Any, heartbeat_s: float, *said: Any) -> None:
    """Tell a handle of the directory again and again, until cancelled. `said`: arguments of its `heartbeat`."""
    while True:
        try:
            # A directory whose machine fell silent never answers; another has taken its place.
            await asyncio.wait_for(directory.heartbeat.remote(*said), MISSED_HEARTBEATS * heartbeat_s)
        except Exception as error:
            # A missing directory costs the page of this process, never the process.
            logger.warning("cannot reach the exporter directory: %s", type(error).__name__)
        await asyncio.sleep(heartbeat_s)


def _listen(host: str, port: int, registry: CollectorRegistry) -> tuple[Any, threading.Thread]:
    """Serve `registry` on `port`, or on the next free one: processes of one node share the configuration."""
    for candidate in range(port, min(port + PORTS, 65536)) if port else (0,):
        try:
            server, thread = start_http_server(candidate, addr=host, registry=registry)
        except OSError as error:
            failure = error
        else:
            _harden(server)
            return server, thread
    raise ConfigError(f"cannot listen on {host} from port {port} on: {failure}", param="metrics.port") from failure


def _harden(server: Any) -> None:
    """What prometheus_client's server takes on trust: the address is open to whoever reaches the node."""
    application = server.get_app()

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        try:
            choose_encoder(environ.get("HTTP_ACCEPT", ""))
        except Exception:  # a version that is no number; text is what everybody reads
            environ.pop("HTTP_ACCEPT")
        return application(environ, start_response)

    class Bounded(server.RequestHandlerClass):
        timeout = IDLE_S  # each connection holds a thread and a descriptor

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # silent or gone: nothing to say, and nobody to tell
                super().handle()

    server.set_app(answer)
    server.RequestHandlerClass = Bounded


def _close(server: Any, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


async def scrape(pages: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """The pages (replica → URL) that answer within `timeout_s`, read in parallel: replica → text."""
    texts = await asyncio.gather(*(_fetch(url, timeout_s) for url in pages.values()))
    return {name: text for name, text in zip(pages, texts, strict=True) if text is not None}


async def _fetch(url: str, timeout_s: float) -> str | None:
    """A GET in HTTP/1.0, where the end of the connection is the end of the page."""
    where = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            try:
                writer.write(f"GET {where.path} HTTP/1.0\r\nHost: {where.netloc}\r\n\r\n".encode())
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        logger.warning("cannot read %s: %s", url, type(error).__name__)
        return None
    return body.decode() if head.split(b" ", 2)[1:2] == [b"200"] else None
