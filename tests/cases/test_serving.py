"""What people reported of other gateways under load and in failure, on this one through a real socket.

Further cases of the kind: `test_lifecycle` (dead and stuck engines, restart loops), `test_failover`, `test_rolling` (no
503 after scaling), `test_placement` (placement groups, drained nodes).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.conftest import FAKE_ENGINE, METRICS, Hold, Served, chat, eventually, metric, replica_pids

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def crowded(serve_app_factory: Callable[..., Served]) -> Served:
    """Four may generate, one may wait; impatient health checks."""
    config = {
        "model": {"id": "fake"},
        "replica": {
            "num_cpus": 0.1, "max_ongoing_requests": 4, "health_check_period_s": 0.5, "stuck_after_s": 1,
            "warmup_grace_s": 0,
        },
        "admission": {"max_concurrent": 4, "max_queued": 1},
        "metrics": METRICS,
    }  # fmt: skip
    return serve_app_factory("crowded", config, FAKE_ENGINE)


@pytest.fixture
def official(crowded: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{crowded.url}/v1", api_key="none", max_retries=2, timeout=60) as client:
        yield client


def post(served: Served, script: str, **fields: object) -> httpx.Response:
    return httpx.post(served.url + CHAT, json=chat(script, **fields), timeout=120, trust_env=False)


# https://github.com/ray-project/ray/issues/51145
@pytest.mark.parametrize("stream", [True, False])
def test_too_many_at_once_is_an_envelope_that_says_when_to_come_again(
    crowded: Served, stream: bool, hold: Hold
) -> None:
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(post, crowded, f"a b {hold}", stream=stream) for _ in range(10)]
        try:
            # Those that were let in say nothing before all others have their answers.
            eventually(lambda: sum(one.done() for one in asked) == 5)
        finally:
            hold.release()
        answers = [one.result() for one in asked]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert [answer.status_code for answer in answers].count(200) == 5
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1 and answer.headers["x-should-retry"] == "true"


# A burst that fits must not be refused because it has not been assigned yet.
def test_a_burst_that_fits_is_served(crowded: Served) -> None:
    for _ in range(3):
        with ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(lambda _: post(crowded, "a stall=0.2"), range(5)))
        assert [answer.status_code for answer in answers] == [200] * 5


# The official client repeats a 408 twice: three generations.
def test_a_request_whose_time_is_up_is_generated_once(crowded: Served, official: openai.OpenAI) -> None:
    def asked() -> float:
        return metric(crowded, "gateway_requests_total", status="504")

    before, submits = asked(), metric(crowded, "fake_submits_total")
    with pytest.raises(openai.APIStatusError) as caught:
        official.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "a stall=600"}],
            extra_headers={"x-request-timeout-seconds": "1"},
        )  # fmt: skip
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    eventually(lambda: asked() == before + 1)
    # None where a busy machine took all its time to bring it to the engine.
    assert metric(crowded, "fake_submits_total") <= submits + 1


# https://github.com/rllm-org/rllm/issues/926
def test_a_first_request_that_takes_long_does_not_end_its_replica(crowded: Served) -> None:
    before = replica_pids("crowded", "engine")
    assert post(crowded, "a stall=8").status_code == 200
    assert replica_pids("crowded", "engine") == before


# https://github.com/ray-project/ray/issues/61263
def test_a_replica_whose_engine_is_dead_is_not_ready_and_replaced(crowded: Served) -> None:
    before = replica_pids("crowded", "engine")
    post(crowded, "a dead=1")
    eventually(lambda: bool(replica_pids("crowded", "engine")) and replica_pids("crowded", "engine") != before, 120)
    eventually(lambda: post(crowded, "a").status_code == 200, 120)
