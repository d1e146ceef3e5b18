"""Replicas that die, hang, cannot start or are told to go, on applications of their own."""

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from ray import serve

from serve_app.build import bind
from serve_app.config import load_config
from tests.conftest import FAKE_ENGINE, METRICS, Served, chat, eventually, replica_pids

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def mortal(serve_app_factory: Callable[..., Served]) -> Served:
    """One ingress, one replica with quick health checks."""
    config = {
        "model": {"id": "fake"},
        "replica": {
            "num_cpus": 0.1,
            "health_check_period_s": 0.5,
            "health_check_timeout_s": 5,
            "stuck_after_s": 1,
            "warmup_grace_s": 0,
        },
        "ingress": {"ready_max_age_s": 0.1, "ready_timeout_s": 1, "max_resumes": 0},
        "metrics": METRICS,
    }
    return serve_app_factory("mortal", config, FAKE_ENGINE)


def post(served: Served, script: str, **fields: Any) -> httpx.Response:
    return httpx.post(served.url + CHAT, json=chat(script, **fields), timeout=60, trust_env=False)


def ready(served: Served) -> bool:
    return httpx.get(f"{served.url}/ready", timeout=60, trust_env=False).status_code == 200


def engines(served: Served) -> set[str]:
    text = httpx.get(f"{served.url}/metrics", timeout=60, trust_env=False).text
    return {part.split('"')[0] for part in text.split('replica="')[1:] if part.startswith("engine#")}


def test_a_replica_lost_in_mid_stream_ends_the_stream_and_is_replaced(mortal: Served) -> None:
    eventually(lambda: len(engines(mortal)) == 1)
    (lost,) = engines(mortal)
    response = post(mortal, "a b c d e delay=0.1 crash_at=3", stream=True)
    events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert response.status_code == 200 and len(events) > 2 and events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "replica_lost"
    eventually(lambda: ready(mortal), 120)
    # Its series go with it.
    eventually(lambda: len(engines(mortal)) == 1 and lost not in engines(mortal), 120)


def test_a_replica_lost_before_its_first_token_may_be_retried(mortal: Served) -> None:
    eventually(lambda: ready(mortal), 120)
    response = post(mortal, "a crash_at=0")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
    assert response.headers["x-should-retry"] == "true"
    eventually(lambda: ready(mortal), 120)


@pytest.mark.parametrize("how", ["dead", "stuck"])
def test_an_engine_that_stops_generating_is_replaced(mortal: Served, how: str) -> None:
    eventually(lambda: ready(mortal), 120)
    before = replica_pids("mortal", "engine")
    post(mortal, f"a {how}=1")
    eventually(lambda: not ready(mortal))
    assert httpx.get(f"{mortal.url}/health", timeout=60, trust_env=False).status_code == 200
    eventually(lambda: ready(mortal), 120)
    assert not before.items() & replica_pids("mortal", "engine").items()


def test_a_running_stream_is_finished_before_the_replica_goes(serve_app_factory: Callable[..., Served]) -> None:
    config = {"model": {"id": "fake"}, "replica": {"num_cpus": 0.1}}
    served = serve_app_factory("leaving", config, FAKE_ENGINE)
    deletion = threading.Thread(target=serve.delete, args=("leaving",))
    with httpx.stream(
        "POST", served.url + CHAT, json=chat("a delay=0.2 repeat=15", stream=True), timeout=60
    ) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        deletion.start()
        rest = list(lines)
    deletion.join()
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"


def test_an_engine_that_cannot_start_fails_the_deployment_with_its_reason(serve_port: int) -> None:
    config = load_config(
        {"model": {"id": "broken"}, "replica": {"num_cpus": 0.1, "max_constructor_retry_count": 1}}, use_env=False
    )
    try:
        with pytest.raises(RuntimeError):
            serve.run(bind(config, FAKE_ENGINE), name="broken", route_prefix="/broken")
        status = serve.status().applications["broken"]
        assert status.status == "DEPLOY_FAILED"
        assert "the fake engine cannot start" in status.deployments["engine"].message
    finally:
        serve.delete("broken")
