"""Publishing the series of every process, and gathering them into one page.

Each process serves its own registry on its own port (`Exporter`) and keeps telling the `ExporterDirectory` where.
`scrape` reads all pages that are alive now and `merge` adds the label `replica`, so that any ingress can answer
/metrics for the whole deployment; the series of a removed replica go away with its heartbeats.

What this module does not do: declare series (see `metrics`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import ray
from prometheus_client import CollectorRegistry, Metric, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from serve_app.config import MetricsConfig
from serve_app.errors import ConfigError

logger = logging.getLogger("ray.serve.ddtree.metrics")
MISSED_HEARTBEATS = 3
# Processes of one node that may export from a fixed port on.
PORTS = 64


class ExporterDirectory:
    """Where the living exporters are. In memory: after a restart the next heartbeats fill it again."""

    def __init__(self, heartbeat_s: float) -> None:
        self._lifetime_s = MISSED_HEARTBEATS * heartbeat_s
        self._seen: dict[str, tuple[str, float]] = {}

    async def heartbeat(self, replica: str, url: str) -> None:
        self._seen[replica] = (url, time.monotonic())

    async def leave(self, replica: str) -> None:
        self._seen.pop(replica, None)

    async def living(self) -> dict[str, str]:
        """replica → URL of its page."""
        oldest = time.monotonic() - self._lifetime_s
        self._seen = {name: entry for name, entry in self._seen.items() if entry[1] >= oldest}
        return {name: url for name, (url, _) in self._seen.items()}


class Exporter:
    """Serves a registry over HTTP from a thread and keeps the directory informed from the running event loop.

    Must be made inside a Serve replica, whose id names it. `directory` is a handle of `ExporterDirectory`.
    """

    def __init__(self, registry: CollectorRegistry, config: MetricsConfig, directory: Any) -> None:
        self._directory, self._config = directory, config
        host = ray.util.get_node_ip_address() if config.host == "auto" else config.host
        self._server, self._thread = _listen(host, config.port, registry)
        context = serve.get_replica_context()
        self.name = f"{context.deployment}#{context.replica_tag}"
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        while True:
            try:
                await self._directory.heartbeat.remote(self.name, self.url)
            except Exception as error:
                # A missing directory costs the page of this process, never the process.
                logger.warning("cannot reach the exporter directory: %s", type(error).__name__)
            await asyncio.sleep(self._config.heartbeat_s)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._directory.leave.remote(self.name), self._config.heartbeat_s)
        # shutdown() waits for the server's loop, up to half a second.
        await asyncio.to_thread(_close, self._server, self._thread)


def _listen(host: str, port: int, registry: CollectorRegistry) -> tuple[Any, threading.Thread]:
    """Serve `registry` on `port`, or on the next free one: processes of one node share the configuration."""
    for candidate in range(port, min(port + PORTS, 65536)) if port else (0,):
        try:
            return start_http_server(candidate, addr=host, registry=registry)
        except OSError as error:
            failure = error
    raise ConfigError(f"cannot listen on {host} from port {port} on: {failure}", param="metrics.port") from failure


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


def merge(texts: Mapping[str, str]) -> bytes:
    """One exposition: each family once, every sample labelled with its replica. `_created` series are left out."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):
                continue
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    return generate_latest(_Families(families.values()))


class _Families(CollectorRegistry):
    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._merged = list(families)

    def collect(self) -> Iterable[Metric]:
        return iter(self._merged)
