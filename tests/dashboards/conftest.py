"""A real Prometheus that discovers and scrapes the running application while clients use it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.monitoring.binaries import Unavailable, find
from deploy.monitoring.run import command, configuration
from tests.conftest import METRICS, Served, free_port

PATIENCE_S = 300
CHAT = "/v1/chat/completions"
QUESTIONS = ("Name three colours.", "Count from one to ten.", "What is the capital of France?")


@dataclass(frozen=True)
class Prometheus:
    """A running server. `url` has no trailing slash."""

    url: str

    def get(self, path: str, **params: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=60, trust_env=False).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def instant(self, expression: str) -> list[Any]:
        return list(self.get("query", query=expression)["result"])

    def numbers(self, expression: str, seconds: float = 30) -> list[float]:
        """Every finite value that the expression had within the last seconds."""
        now = time.time()
        series = self.get("query_range", query=expression, start=now - seconds, end=now, step="1")["result"]
        values = [float(value) for one in series for _, value in one["values"]]
        return [value for value in values if value == value and abs(value) != float("inf")]


@pytest.fixture(scope="package")
def watched(serve_app_factory: Callable[..., Served]) -> Iterator[Served]:
    """The laptop application, for these tests alone: its model takes memory."""
    from ray import serve

    config = {"replica": {"num_cpus": 0.1}, "metrics": METRICS}
    yield serve_app_factory("watched", config)
    serve.delete("watched")


@pytest.fixture(scope="package")
def prometheus(watched: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes every second, for long enough that all windows have something in them."""
    try:
        binary = find("prometheus")
    except Unavailable as error:
        pytest.skip(f"no Prometheus to test with: {error}")
    data, port = tmp_path_factory.mktemp("prometheus"), free_port()
    (data / "prometheus.yml").write_text(configuration(watched.url, "1s"))
    with (data / "log").open("w") as log:
        server = subprocess.Popen(command(binary, data, f"127.0.0.1:{port}"), stdout=log, stderr=log)
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        _until(lambda: _discovered(found), data / "log")
        with _traffic(watched):
            _until(lambda: _settled(found), data / "log")
            yield found
    finally:
        server.terminate()
        server.wait(timeout=60)


def _until(condition: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.5)


def _discovered(prometheus: Prometheus) -> bool:
    try:
        return {one["metric"]["deployment"] for one in prometheus.instant("up == 1")} == {"engine", "ingress"}
    except (httpx.HTTPError, ValueError):
        return False


def _settled(prometheus: Prometheus) -> bool:
    """Streams have been measured, one request has failed, and the slowest rules have been evaluated since."""
    wanted = (
        "model:gateway_itl_slow:ratio6h",
        "model:gateway_errors:ratio6h > 0",
        "model:ddtree_tree_nodes:rate5m > 0",
        "deriv(model:ddtree_queued_requests:sum[10m])",
    )
    return all(prometheus.instant(expression) for expression in wanted)


class _traffic:
    """Clients that stream, that do not, that ask for nonsense, that are too impatient; until the block ends."""

    def __init__(self, served: Served) -> None:
        self._served, self._over = served, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(2)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=PATIENCE_S)

    def _ask(self, client: int) -> None:
        with httpx.Client(base_url=self._served.url, timeout=60, trust_env=False) as http:
            for number in range(10_000):
                if self._over.wait(0.2):
                    return
                self._one(http, number, stream=(client + number) % 2 == 0)

    def _one(self, http: httpx.Client, number: int, stream: bool) -> None:
        message = {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}
        body = {"model": self._served.model, "messages": [message], "max_tokens": 24, "temperature": 0}
        http.post(CHAT, json={**body, "stream": stream})
        if number % 4 == 1:
            http.post(CHAT, json={**body, "max_tokens": 0})
        if number % 4 == 2:
            # Longer than this client waits: 504.
            http.post(CHAT, json={**body, "max_tokens": 400}, headers={"x-request-timeout-seconds": "0.2"})
