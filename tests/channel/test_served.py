"""The channel between processes of a real Serve, beside an application without it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.conftest import FAKE_ENGINE, METRICS, Served, chat, eventually, metric

CHAT = "/v1/chat/completions"
SHORT = chat("a b c d e f g h repeat=4 delay=0.01", stream=True, stream_options={"include_usage": True})


@pytest.fixture(scope="module")
def calls(serve_app_factory: Callable[..., Served]) -> Served:
    """Without the channel."""
    config = {
        "model": {"id": "fake"},
        "replica": {"num_cpus": 0.1},
        "ingress": {"channel": False},
        "metrics": METRICS,
    }
    return serve_app_factory("calls", config, FAKE_ENGINE)


def frames(served: Served, body: dict[str, Any]) -> list[bytes]:
    """Its events without what differs between any two answers."""
    answer = httpx.post(served.url + CHAT, json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200
    return [event.partition(b'"choices"')[2] for event in answer.content.split(b"\n\n")]


def began(served: Served, way: str) -> float:
    return metric(served, "gateway_channel_streams_total", way=way)


def test_streams_share_connections_and_say_the_same(served: Served, calls: Served) -> None:
    expected = frames(calls, SHORT)
    kinds = ("opened", "channel", "connecting", "unreachable")

    def burst() -> float:
        """How many of 32 streams were opened over the channel."""
        before = [began(served, way) for way in kinds]
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda _: frames(served, SHORT), range(32)))
        assert found == [expected] * 32
        grown = [began(served, way) - was for way, was in zip(kinds, before, strict=True)]
        assert sum(grown) == 32
        return grown[0]

    # Each ingress connects to each replica with the first stream between them; meanwhile others go as Serve sends them,
    # and for half a minute where the connection took too long.
    eventually(lambda: burst() == 32, 120)
    assert began(served, "no_offer") == 0


def test_without_it_nothing_takes_the_channel(calls: Served) -> None:
    frames(calls, SHORT)
    assert metric(calls, "gateway_channel_streams_total") == 0


@pytest.mark.parametrize("body", [chat("a b c"), chat("a b c", n=2), chat("a b fail_at=1"), chat("refuse=Overloaded")])
def test_whole_answers_and_errors_are_the_same(served: Served, calls: Served, body: dict[str, Any]) -> None:
    answers = [httpx.post(each.url + CHAT, json=body, timeout=60, trust_env=False) for each in (served, calls)]
    seen = [(answer.status_code, {**answer.json(), "id": 0, "created": 0}) for answer in answers]
    assert seen[0] == seen[1]


def test_a_client_that_leaves_ends_its_stream_in_the_engine(served: Served) -> None:
    aborts = metric(served, "fake_aborts_total")
    with httpx.stream(
        "POST", served.url + CHAT, json=chat("a delay=0.05 repeat=4000", stream=True), timeout=60
    ) as answer:
        next(answer.iter_bytes())
    eventually(lambda: metric(served, "fake_aborts_total") == aborts + 1)
    eventually(lambda: metric(served, "fake_running_requests") == 0)


def test_a_client_that_does_not_read_holds_up_nobody_else(served: Served) -> None:
    fat = chat("word " * 3000, stream=True, max_tokens=3000, logprobs=True, top_logprobs=20)
    with httpx.stream("POST", served.url + CHAT, json=fat, timeout=60) as answer:
        parts = answer.iter_bytes()
        size = len(next(parts))
        for _ in range(4):
            frames(served, SHORT)
        last = b""
        for part in parts:
            size, last = size + len(part), part
    assert last.endswith(b"data: [DONE]\n\n") and size > 4_000_000
