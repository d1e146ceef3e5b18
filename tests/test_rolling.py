"""Changes of a running application under load: no request fails."""

import json
import threading
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from ray import serve

from serve_app.build import bind
from serve_app.config import load_config
from tests.conftest import FAKE_ENGINE, METRICS, chat, eventually, full_only, replica_pids

pytestmark = pytest.mark.timeout(900)
NAME = "rolling"
WORDS = "a b c d e f g h"


def deploy(replicas: int, grace_s: float = 20, scaling: dict[str, Any] | None = None, **engine: Any) -> None:
    config = {
        "autoscaling": scaling or {},
        "model": {"id": "fake"},
        "engine": engine,
        "replica": {"num_replicas": replicas, "num_cpus": 0.1, "graceful_shutdown_timeout_s": grace_s},
        "metrics": METRICS,
    }
    tree = load_config(config, use_env=False)
    serve.run(bind(tree, FAKE_ENGINE), name=NAME, route_prefix=f"/{NAME}")


class Load:
    """Clients that ask again and again, in threads; `outcomes` counts how their answers ended."""

    def __init__(self, url: str, clients: int = 10, delay: float = 0.05, stall: float = 0) -> None:
        self.url, self.script = url, f"{WORDS} delay={delay} stall={stall}"
        self.outcomes: Counter[str] = Counter()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i % 3 > 0,)) for i in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        eventually(lambda: self.outcomes.total() > 10, 120)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, stream: bool) -> None:
        while not self._stop.is_set():
            try:
                self.outcomes[self._ask(stream)] += 1
            except httpx.HTTPError as error:
                self.outcomes[repr(error)] += 1

    def _ask(self, stream: bool) -> str:
        body = chat(self.script, stream=stream, temperature=0)
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=90, trust_env=False)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:200]}"
        if not stream:
            return "whole" if answer.json()["choices"][0]["message"]["content"] == WORDS else answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        events = [json.loads(line) for line in lines[:-1]]
        if any("error" in event for event in events) or lines[-1] != "[DONE]":
            return answer.text[-300:]
        said = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
        return "whole" if said == WORDS else said


@pytest.fixture(scope="module")
def url(serve_port: int) -> Any:
    deploy(2)
    yield f"http://127.0.0.1:{serve_port}/{NAME}"
    serve.delete(NAME)


def test_another_configuration_rolls_out_without_a_failed_request(url: str) -> None:
    before = set(replica_pids(NAME, "engine").values())
    with Load(url) as load:
        deploy(2, max_queued=17)
        time.sleep(1)
    assert set(load.outcomes) == {"whole"}
    assert not before & set(replica_pids(NAME, "engine").values())


def test_scaling_up_and_down_fails_no_request(url: str) -> None:
    with Load(url) as load:
        deploy(3, max_queued=17)
        deploy(1, max_queued=17)
        eventually(lambda: len(replica_pids(NAME, "engine")) == 1, 120)
    assert set(load.outcomes) == {"whole"}


@full_only
def test_the_number_of_replicas_follows_the_load_and_fails_no_request(url: str) -> None:
    # The fake engine has 64 slots: ten requests ask for three replicas.
    scaling = {
        "max_replicas": 3, "target_busy": 0.06, "look_back_s": 3, "upscale_delay_s": 1, "downscale_delay_s": 3,
    }  # fmt: skip
    deploy(1, scaling=scaling)
    with Load(url, clients=10, delay=0.3) as load:
        eventually(lambda: len(replica_pids(NAME, "engine")) == 3, 120)
    eventually(lambda: len(replica_pids(NAME, "engine")) == 1, 120)
    assert set(load.outcomes) == {"whole"}


@full_only
def test_late_first_tokens_bring_replicas_that_idle_slots_would_not(url: str) -> None:
    scaling = {
        "max_replicas": 3, "target_busy": 1, "target_ttft_s": 0.5, "look_back_s": 3, "upscale_delay_s": 1,
        "downscale_delay_s": 3,
    }  # fmt: skip
    deploy(1, scaling=scaling)
    with Load(url, clients=6, delay=0.01, stall=1.5) as load:
        eventually(lambda: len(replica_pids(NAME, "engine")) == 3, 120)
    eventually(lambda: len(replica_pids(NAME, "engine")) == 1, 120)
    assert set(load.outcomes) == {"whole"}
