"""Fixtures: a Ray cluster of this test session's own, and Serve applications on it behind a real socket."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import serve_app.engines.local  # noqa: F401  # how OpenMP's threads wait, which must be said before torch is loaded
from load_tests.target import free_port
from serve_app import proxy
from serve_app.launch import SERVE_SWITCHES

ROOT = Path(__file__).resolve().parent.parent
RAY_STARTS = 3
# `make test-full`: what takes minutes on two cores.
FULL = os.environ.get("FULL_TESTS") == "1"
# Which proxy of Serve's stands in front of the applications; test_haproxy runs others again with "haproxy".
PROXY: proxy.Wanted = os.environ.get("TEST_PROXY", "serve")  # type: ignore[assignment]
full_only = pytest.mark.skipif(not FULL, reason="part of make test-full")
FAKE_ENGINE = "tests.fake_engine:FakeEngine"
# For applications under test: a page of /metrics waits for a busy process, and a heartbeat may be late.
METRICS = {"heartbeat_s": 2, "scrape_timeout_s": 10, "host": "127.0.0.1"}
# What a condition that comes true at once may take on a busy machine.
SOON_S = 60.0

if importlib.util.find_spec("hypothesis") is not None:  # what runs on a GPU machine does without
    from hypothesis import HealthCheck, settings

    # A limit on an example's time would test the machine, and which examples come is no matter of luck; new ones are
    # looked for by `make test-full`.
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("shared_machine", **patient, derandomize=not FULL)
    settings.load_profile("shared_machine")

# Where there is no GPU, kernels run in Triton's interpreter. It must be asked for before Triton is loaded, by whichever
# test: functions of Triton's own that were made for a GPU cannot be interpreted.
if importlib.util.find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts the tests in the background has them ignore it, and what they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs no cluster first: once started it lives to the end of the session, and takes its share of the CPU."""
    items.sort(key=lambda item: "serve_port" in getattr(item, "fixturenames", ()))


@dataclass(frozen=True)
class Served:
    """A running application. `url` has no trailing slash; `processes`: how many are on its /metrics when all are."""

    name: str
    url: str
    model: str
    processes: int

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].split("/")[0])


def require_sglang() -> None:
    """Skips where SGLang is not installed; an installed one that cannot be imported is a failure."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: make test-sglang")


@pytest.fixture(scope="session")
def serve_port() -> Iterator[int]:
    """Port of Serve's proxy on a fresh local cluster with its own directory."""
    # One mode for every process, or those started later are refused.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # As the launcher runs it, but that a replica on a busy machine may say later whether it has room: a request would
    # go elsewhere, and tests ask where requests go.
    os.environ.update(SERVE_SWITCHES)
    os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "2"
    # Short: paths of unix sockets are limited to about 100 characters.
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ.update(proxy.switches(proxy.choose(PROXY, os.environ), 600))
    if PROXY == "haproxy":
        sockets = tempfile.mkdtemp(prefix="hp-", dir="/tmp")
        os.environ.update(proxy.local_switches(sockets, "127.0.0.1"))
    try:
        start_ray(directory)
        from ray import serve

        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()
    finally:
        stop_ray(directory)
        if PROXY == "haproxy":
            shutil.rmtree(sockets, ignore_errors=True)


def start_ray(directory: str) -> None:
    """A local cluster. Ray gives a node 30 s to register, which a busy machine can miss, so try again."""
    import ray

    for attempt in range(1, RAY_STARTS + 1):
        try:
            ray.init(
                address="local", _temp_dir=directory, include_dashboard=False, num_cpus=16, num_gpus=0,
                object_store_memory=128 * 1024 * 1024, log_to_driver=False,
            )  # fmt: skip
            return
        except Exception:
            ray.shutdown()
            if attempt == RAY_STARTS:
                raise


def stop_ray(directory: str) -> None:
    import ray

    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def serve_app_factory(serve_port: int) -> Callable[..., Served]:
    """`factory(name, config, engine_factory=…, route_prefix=…)` runs an application and waits until it is healthy."""
    from ray import serve

    from serve_app.build import bind
    from serve_app.config import load_config
    from serve_app.replica import ENGINE_FACTORY

    def factory(
        name: str, config: dict[str, Any], engine_factory: str = ENGINE_FACTORY, route_prefix: str | None = None
    ) -> Served:
        tree = load_config(config, use_env=False)
        prefix = f"/{name}" if route_prefix is None else route_prefix
        serve.run(bind(tree, engine_factory), name=name, route_prefix=prefix)
        processes = tree.replica.num_replicas + tree.ingress.num_replicas
        return Served(name, f"http://127.0.0.1:{serve_port}{prefix.rstrip('/')}", tree.model.id, processes)

    return factory  # Serve's shutdown ends them all at once


@pytest.fixture(scope="session")
def served(serve_app_factory: Callable[..., Served]) -> Served:
    """The whole application on fake engines: two of each replica."""
    config = {
        "model": {"id": "fake"},
        "replica": {"num_replicas": 2, "num_cpus": 0.1},
        "ingress": {"num_replicas": 2, "max_body_bytes": 100_000},
        "metrics": METRICS,
    }
    return serve_app_factory("main", config, FAKE_ENGINE, "/")


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=SOON_S, trust_env=False) as client:
        yield client


@pytest.fixture
def official(served: Served) -> Iterator[openai.OpenAI]:
    """The official client, which repeats nothing. A module that serves something else overrides `served`."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(script: str, **fields: Any) -> dict[str, Any]:
    """A chat body whose only message is a fake engine's script."""
    return {"model": "fake", "messages": [{"role": "user", "content": script}], **fields}


def samples(served: Served) -> list[Any]:
    """Of the application's own /metrics, once all its processes are on it: one that has only just started, or answers
    too late, is missing for a moment, and its counts with it."""
    from prometheus_client.parser import text_string_to_metric_families

    end = time.monotonic() + 2 * SOON_S
    while True:
        text = httpx.get(f"{served.url}/metrics", timeout=SOON_S, trust_env=False).text
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        if len({sample.labels["replica"] for sample in found}) == served.processes:
            return found
        assert time.monotonic() < end, "not all processes are on /metrics"
        time.sleep(0.05)


def metric(served: Served, name: str, **labels: str) -> float:
    """Sum over replicas and over all labels not given."""
    return sum(s.value for s in samples(served) if s.name == name and labels.items() <= s.labels.items())


def eventually(condition: Callable[[], bool], seconds: float = SOON_S) -> None:
    """Until `condition()`; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


class Hold:
    """The other end of a script's `hold`: what a fake engine may say, decided here, whatever process it is in."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __str__(self) -> str:
        return f"hold={self._file}"

    def allow(self, tokens: int) -> None:
        """That many of each answer, from now on."""
        with self._file.open("ab") as file:
            file.truncate(tokens)

    def release(self) -> None:
        self.allow(1_000_000)


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    """`f"a b {hold}"` says nothing until it is allowed."""
    return Hold(tmp_path / "allowed")


def scenarios(module: str, names: Sequence[str], seconds: float, **env: str) -> dict[str, Any]:
    """What `python -m module NAME,…` saw on a cluster of its own, which the last line that begins with SEEN tells."""
    env = {
        **os.environ, **SERVE_SWITCHES, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0", **env,
    }  # fmt: skip
    command = [sys.executable, "-m", module, ",".join(names)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("SEEN "))
    return found


def replica_pids(app: str, deployment: str) -> dict[str, int]:
    """Process of each living replica, by the name it has on /metrics (`deployment#id`)."""
    from ray._private.state import actors

    prefix = f"SERVE_REPLICA::{app}#"
    living = [a for a in actors().values() if a["State"] == "ALIVE" and a["Name"].startswith(prefix + deployment)]
    return {actor["Name"].removeprefix(prefix): actor["Pid"] for actor in living}
