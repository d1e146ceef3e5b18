"""What people reported against other gateways, through a real socket: what a stream carries, and how it fails.

Each test names the symptom; the URL is where it was reported. Engines are fake, everything before them is real.
"""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.cases.wire import CHAT, error_of, events_of
from tests.conftest import Hold, Served, chat, metric


# https://github.com/ai-dynamo/dynamo/pull/8430
def test_a_failure_in_mid_stream_reaches_the_official_client(official: openai.OpenAI, served: Served) -> None:
    before = metric(served, "gateway_stream_errors_total")
    stream = official.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "a b c d fail_at=3"}], stream=True
    )
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert caught.value.code == "engine_error"
    assert metric(served, "gateway_stream_errors_total") == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token_chooses_the_status_line(client: httpx.Client, stream: bool) -> None:
    response = client.post(CHAT, json=chat("a fail_at=0", stream=stream))
    assert (response.status_code, error_of(response)["code"]) == (500, "engine_error")
    assert response.headers["x-should-retry"] == "false"


# https://github.com/vllm-project/vllm/pull/36379
@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {}}])
def test_usage_is_not_sent_unless_asked_for(client: httpx.Client, options: dict[str, Any]) -> None:
    events = events_of(client.post(CHAT, json=chat("a b", stream=True, **options)))
    assert not any("usage" in event for event in events)


# https://github.com/vllm-project/vllm/issues/7262
def test_usage_comes_exactly_once_and_last(client: httpx.Client) -> None:
    events = events_of(client.post(CHAT, json=chat("a b", stream=True, stream_options={"include_usage": True})))
    assert [event["usage"] is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2


def test_stream_options_need_a_stream(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat("a", stream=False, stream_options={"include_usage": True}))
    assert (response.status_code, error_of(response)["param"]) == (400, "stream_options")


# https://github.com/danielmiessler/Fabric/pull/2203
def test_characters_are_never_split(served: Served) -> None:
    text = "🌍é日本🌍"
    body = json.dumps(chat(f"bytes={text.encode().hex()} delay=0.005", stream=True))
    with httpx.stream(
        "POST", served.url + CHAT, content=body, headers={"content-type": "application/json"}, timeout=30
    ) as response:
        raw = list(response.iter_raw())
    events = b"".join(raw).split(b"\n\n")[:-2]
    decoded = [json.loads(event.decode("utf-8").removeprefix("data: ")) for event in events]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in decoded) == text


# https://github.com/vllm-project/production-stack/pull/836
def test_the_answer_is_neither_compressed_nor_cached(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat("a", stream=True), headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in response.headers and "content-length" not in response.headers
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"


# https://github.com/ray-project/ray/issues/59681
def test_the_first_chunk_is_not_held_back(served: Served, hold: Hold) -> None:
    hold.allow(1)
    with httpx.stream("POST", served.url + CHAT, json=chat(f"a b {hold}", stream=True), timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        assert '"content":"a"' in next(lines)
        # Nothing follows before this.
        hold.release()
        assert list(lines)[-1] == "data: [DONE]"
