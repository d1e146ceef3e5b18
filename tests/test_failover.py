"""kill -9 of a replica's process while streams run, on real Serve with three replicas."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.conftest import FAKE_ENGINE, FULL, METRICS, Hold, Served, chat, eventually, full_only, metric, replica_pids

STREAMS = 200 if FULL else 50
WORDS = "a b c d e f g h i j"
REPEAT = 6


@pytest.fixture(scope="module")
def three(serve_app_factory: Callable[..., Served]) -> Served:
    config = {
        "model": {"id": "fake"},
        "replica": {"num_replicas": 3, "num_cpus": 0.1, "health_check_period_s": 1, "health_check_timeout_s": 5},
        "metrics": METRICS,
    }
    return serve_app_factory("three", config, FAKE_ENGINE)


def pids(served: Served) -> dict[int, float]:
    """Process of each living engine → its running requests."""
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{served.url}/metrics", timeout=60, trust_env=False).text
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in ("fake_pid", "fake_running_requests"):
                found.setdefault(sample.labels["replica"], {})[sample.name] = sample.value
    return {int(values["fake_pid"]): values["fake_running_requests"] for values in found.values()}


async def read(client: httpx.AsyncClient, url: str, stream: bool, seen: asyncio.Semaphore, hold: Hold) -> Any:
    """What one client got: its text, usage and error."""
    body = chat(f"{WORDS} repeat={REPEAT} delay=0.05 {hold}", temperature=0, stream=stream)
    if not stream:
        answer = (await client.post(url, json=body)).json()
        return answer["choices"][0]["message"]["content"], answer["usage"], 1
    text, usage, ends = "", None, 0
    body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", url, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line:
                continue
            assert ends == 0, "something came after [DONE]"
            if line == "data: [DONE]":
                ends += 1
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content", "")
            seen.release()
    return text, usage, ends


async def kill_under_load(
    served: Served, stream: bool, hold: Hold, how: signal.Signals = signal.SIGKILL
) -> tuple[list[Any], int]:
    """All answers, and the process that was signalled while they ran: none ends before that."""
    seen = asyncio.Semaphore(0)
    hold.allow(len(WORDS.split()) * REPEAT - 5)
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as client:
        url = f"{served.url}/v1/chat/completions"
        readers = [asyncio.create_task(read(client, url, stream, seen, hold)) for _ in range(STREAMS)]
        if stream:
            for _ in range(STREAMS * 5):
                await seen.acquire()
        else:
            await asyncio.to_thread(eventually, lambda: sum(pids(served).values()) == STREAMS)
        running = await asyncio.to_thread(pids, served)
        victim = max(running, key=lambda pid: running[pid])
        assert running[victim] > 0
        os.kill(victim, how)
        hold.release()
        async with asyncio.timeout(120):
            return list(await asyncio.gather(*readers)), victim


@pytest.mark.parametrize("stream", [True, False])
async def test_no_answer_is_lost_with_its_replica(three: Served, stream: bool, hold: Hold) -> None:
    await asyncio.to_thread(eventually, lambda: len(pids(three)) == 3, 120)
    ok = {"route": "/v1/chat/completions", "status": "200"}

    def answered() -> float:
        return metric(three, "gateway_requests_total", **ok)

    before = answered()
    resumed = metric(three, "gateway_resumes_total", outcome="resumed")
    answers, _ = await kill_under_load(three, stream, hold)
    words = " ".join([WORDS] * REPEAT)
    tokens = len(words.split())
    usage = {"prompt_tokens": 13, "completion_tokens": tokens, "total_tokens": 13 + tokens}
    assert [text for text, _, _ in answers] == [words] * STREAMS
    assert [{k: u[k] for k in usage} for _, u, _ in answers] == [usage] * STREAMS
    assert [ends for _, _, ends in answers] == [1] * STREAMS
    # A request is counted a moment after its answer has left.
    await asyncio.to_thread(eventually, lambda: answered() == before + STREAMS)
    assert metric(three, "gateway_resumes_total", outcome="resumed") > resumed
    assert metric(three, "gateway_resumes_total", outcome="exhausted") == 0
    assert metric(three, "gateway_inflight_requests") == 0
    await asyncio.to_thread(eventually, lambda: sum(pids(three).values()) == 0)


def test_a_request_that_ends_its_replicas_ends_a_bounded_number(three: Served) -> None:
    eventually(lambda: len(pids(three)) == 3, 120)
    before = set(pids(three))
    answer = httpx.post(
        f"{three.url}/v1/chat/completions", json=chat("a b crash_at=1 delay=0.05"), timeout=120, trust_env=False
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "replica_lost")
    assert answer.headers["x-should-retry"] == "false"
    eventually(lambda: len(set(pids(three)) - before) == 3, 120)


@pytest.fixture(scope="module", params=["prefix", "power_of_two"])
def unnoticed(serve_app_factory: Callable[..., Served], request: pytest.FixtureRequest) -> Served:
    """Two replicas whose engines nobody looks at for as long as the tests last."""
    config = {
        "model": {"id": "fake"},
        "routing": {"policy": request.param},
        "replica": {"num_replicas": 2, "num_cpus": 0.1, "health_check_period_s": 3000},
        "metrics": METRICS,
    }
    return serve_app_factory(f"unnoticed-{request.param}", config, FAKE_ENGINE)


def end_an_engine(served: Served, client: httpx.Client) -> None:
    """Of the replica that gets this answer; the other one finishes it."""
    body = chat("a b c gone_at=2 delay=0.05", stream=True, temperature=0)
    text = client.post(f"{served.url}/v1/chat/completions", json=body).text
    assert '"error"' not in text and text.endswith("data: [DONE]\n\n")


def test_until_a_dead_engine_is_noticed_others_serve_what_meets_it(unnoticed: Served) -> None:
    before = replica_pids(unnoticed.name, "engine")
    url = f"{unnoticed.url}/v1/chat/completions"
    with httpx.Client(timeout=60, trust_env=False) as client:
        end_an_engine(unnoticed, client)
        answers = [
            # By its session each has a home; of forty some have it where the engine is gone.
            client.post(url, json=chat("a b", stream=number % 2 == 0), headers={"x-session-id": str(number)})
            for number in range(40)
        ]
        tokenized = [
            client.post(f"{unnoticed.url}/tokenize", json={"model": "fake", "prompt": "ab"}) for _ in range(10)
        ]
    assert [answer.status_code for answer in answers + tokenized] == [200] * 50
    assert not any('"error"' in answer.text for answer in answers)
    assert metric(unnoticed, "gateway_resumes_total", outcome="resumed") == 1
    assert replica_pids(unnoticed.name, "engine") == before, "they were replaced, which is not what this is about"


def test_without_any_engine_the_client_is_told_to_come_again(unnoticed: Served) -> None:
    url = f"{unnoticed.url}/v1/chat/completions"
    with httpx.Client(timeout=60, trust_env=False) as client:
        # It takes the last engine with it, and waits for another one as long as it may.
        last = client.post(url, json=chat("a gone_at=0"), headers={"x-request-timeout-seconds": "5"})
        answers = [client.post(url, json=chat("a b", stream=stream)) for stream in (True, False)]
    assert last.status_code == 504
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "not_ready")
        assert int(answer.headers["retry-after"]) >= 1 and answer.headers["x-should-retry"] == "true"


@full_only
async def test_a_replica_that_freezes_is_replaced_and_its_streams_go_on(three: Served, hold: Hold) -> None:
    await asyncio.to_thread(eventually, lambda: len(pids(three)) == 3, 120)
    answers, frozen = await kill_under_load(three, True, hold, signal.SIGSTOP)
    try:
        words = " ".join([WORDS] * REPEAT)
        assert [text for text, _, _ in answers] == [words] * STREAMS
        await asyncio.to_thread(eventually, lambda: len(pids(three)) == 3 and frozen not in pids(three), 120)
        await asyncio.to_thread(eventually, lambda: not os.path.exists(f"/proc/{frozen}"), 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGKILL)
