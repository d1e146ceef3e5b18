"""What people reported against other gateways, through a real socket: requests, errors, streams.

Each test names the symptom; the URL is where it was reported. Engines are fake, everything before them is real.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import Served, chat, eventually, metric

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
def official(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert len(response.headers.get_list("x-request-id")) == 1
    return error


def events_of(response: httpx.Response) -> list[Any]:
    events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


# https://github.com/ray-project/ray/issues/64833
def test_an_error_names_the_field_and_never_echoes_the_input(client: httpx.Client) -> None:
    response = client.post(CHAT, json={"model": "fake", "messages": {"role": "user", "content": "do-not-echo"}})
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"], error["code"]) == (
        400, "invalid_request_error", "messages", None,
    )  # fmt: skip
    assert "do-not-echo" not in response.text


# https://github.com/ray-project/ray/issues/64833 and SGLang's `x:y` as an adapter's name
@pytest.mark.parametrize("model", ["does-not-exist", "fake:evil"])
def test_an_unknown_model_is_an_envelope_from_the_ingress(official: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        official.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


# https://github.com/sgl-project/sglang/issues/33504
def test_too_many_tokens_is_a_nested_error_with_a_string_code(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        official.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=999999)
    assert (caught.value.code, caught.value.type) == ("context_length_exceeded", "invalid_request_error")


# https://github.com/vllm-project/production-stack/pull/1017
@pytest.mark.parametrize("body", [b'{"model":"test-model"', b"\xff", b"[]", b"[" * 2000 + b"]" * 2000, b""])
def test_a_malformed_body_is_a_400_that_keeps_the_request_id(client: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json", "x-request-id": "my-id"}
    response = client.post(CHAT, content=body, headers=headers)
    assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"
    assert response.headers["x-request-id"] == "my-id"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("text/plain", 415), ("application/json; charset=utf-8", 200), (None, 415)],
)
def test_content_types(client: httpx.Client, content_type: str | None, status: int) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = client.post(CHAT, content=json.dumps(chat("hi")).encode(), headers=headers)
    assert response.status_code == status
    if status != 200:
        error_of(response)


# https://github.com/ray-project/ray/issues/60291
@pytest.mark.parametrize(
    "turn",
    [
        [{"role": "assistant", "content": [{"type": "text", "text": "hi"}]}],
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}]},
        ],
    ],
)
def test_a_second_turn_with_content_parts_survives_the_handle(client: httpx.Client, turn: list[Any]) -> None:
    response = client.post(CHAT, json={"model": "fake", "messages": [USER, *turn, USER]})
    assert response.status_code == 200, response.text


# https://github.com/sgl-project/sglang/pull/14748
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "content": "x", "tool_call_id": "a"}],
        [USER, {"role": "system", "content": "be good"}, {"role": "user", "content": "refuse=InvalidRequest"}],
    ],
)
def test_what_the_template_refuses_is_a_400(client: httpx.Client, messages: list[Any], stream: bool) -> None:
    response = client.post(CHAT, json={"model": "fake", "messages": messages, "stream": stream})
    assert response.status_code == 400 and error_of(response)["message"]


# SGLang's _validate_request
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([], 400),
        ([{"role": "user", "content": None}], 400),
        ([USER, {"role": "assistant", "content": None}, USER], 200),
        ([{"role": "user", "content": []}], 400),
        ([{"role": "User", "content": "hi"}], 200),
    ],
)
def test_odd_messages_get_one_answer_streamed_or_not(
    client: httpx.Client, messages: list[Any], status: int, stream: bool
) -> None:
    assert client.post(CHAT, json={"model": "fake", "messages": messages, "stream": stream}).status_code == status


# https://github.com/ray-project/ray/issues/53922
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_either_limit_is_honoured(client: httpx.Client, field: str) -> None:
    answer = client.post(CHAT, json=chat("a repeat=50", **{field: 10})).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (10, "length")


# SGLang's `max_completion_tokens or max_tokens`
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "10", True])
def test_a_limit_that_is_no_positive_integer_is_refused(client: httpx.Client, field: str, value: Any) -> None:
    response = client.post(CHAT, json=chat("a", **{field: value}))
    assert (response.status_code, error_of(response)["param"]) == (400, field)


# https://github.com/sgl-project/sglang/issues/4589
def test_every_optional_field_may_be_null(client: httpx.Client) -> None:
    from serve_app.protocol import ChatRequest

    nulls = {name: None for name, field in ChatRequest.model_fields.items() if not field.is_required()}
    response = client.post(CHAT, json=chat("a b", **nulls))
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "a b"


# https://github.com/vllm-project/vllm/issues/3574
@pytest.mark.parametrize(
    ("stop", "status"), [("", 400), ([], 200), (["a", "b", "c", "d", "e"], 400), ([1], 400), (["zzz"], 200)]
)
def test_stop_strings_have_documented_limits(client: httpx.Client, stop: Any, status: int) -> None:
    assert client.post(CHAT, json=chat("hi", stop=stop)).status_code == status


# https://github.com/sgl-project/sglang/issues/17853
def test_a_route_that_is_not_offered_is_an_envelope(client: httpx.Client) -> None:
    response = client.post("/v1/responses", json={"model": "fake", "input": [USER]})
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


# https://github.com/vllm-project/aibrix/pull/2594
def test_an_engines_error_is_wrapped_once_with_its_status(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat("refuse=Overloaded"))
    assert (response.status_code, error_of(response)["message"]) == (503, "Refused by the script.")
    assert response.headers["x-should-retry"] == "true"


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


# Ray's SGLang engine: n, seed, logprobs, tools and penalties dropped; text stripped; list prompts run serially
def test_every_choice_is_answered(client: httpx.Client) -> None:
    choices = client.post(CHAT, json=chat("a b", n=3)).json()["choices"]
    assert [(c["index"], c["message"]["content"]) for c in choices] == [(i, "a b") for i in range(3)]


def test_prompts_run_side_by_side(client: httpx.Client, served: Served) -> None:
    body = {"model": "fake", "prompt": [f"stall=4 {word}" for word in "abcdefgh"]}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/v1/completions", json=body)
        eventually(lambda: metric(served, "fake_running_requests") == 8)
        assert [c["text"] for c in answer.result().json()["choices"]] == list("abcdefgh")


def test_tools_are_refused_rather_than_ignored(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        official.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")


# https://github.com/sgl-project/sglang/issues/37833 and 20623
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", ["stall=60 a", "a delay=0.05 b repeat=1000"])
def test_leaving_aborts_the_engine_at_once(served: Served, script: str, stream: bool) -> None:
    aborts, left = metric(served, "fake_aborts_total"), metric(served, "gateway_requests_total", status="499")
    body = json.dumps(chat(script, stream=stream)).encode()
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(request % (CHAT.encode(), len(body), body))
        eventually(lambda: metric(served, "fake_running_requests") == 1)
        if stream and "repeat" in script:
            assert connection.recv(100)
    # A second or so, against a minute of generation; the bound leaves room for a busy machine.
    eventually(lambda: metric(served, "fake_aborts_total") == aborts + 1)
    eventually(lambda: metric(served, "gateway_requests_total", status="499") == left + 1)
    for gauge in ("fake_running_requests", "gateway_inflight_requests", "gateway_queued_requests"):
        assert metric(served, gauge) == 0


# https://github.com/vllm-project/production-stack/pull/836
def test_the_answer_is_neither_compressed_nor_cached(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat("a", stream=True), headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in response.headers and "content-length" not in response.headers
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"


# https://github.com/vllm-project/production-stack/pull/767
def test_150_streams_run_at_once(served: Served) -> None:
    done: list[int] = []

    def one(client: httpx.Client) -> None:
        response = client.post(CHAT, json=chat("stall=3 a", stream=True))
        done.append(response.status_code)

    limits = httpx.Limits(max_connections=200)
    with httpx.Client(base_url=served.url, limits=limits, timeout=60, trust_env=False) as client:
        threads = [threading.Thread(target=one, args=(client,)) for _ in range(150)]
        for thread in threads:
            thread.start()
        eventually(lambda: metric(served, "fake_running_requests") >= 140, 20)
        for thread in threads:
            thread.join()
    assert done == [200] * 150


# https://github.com/ray-project/ray/issues/59681
def test_the_first_chunk_is_not_held_back(served: Served) -> None:
    body = chat("a delay=1.5 b", stream=True)
    with httpx.stream("POST", served.url + CHAT, json=body, timeout=30) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        first = time.monotonic()
        next(lines)
        assert time.monotonic() - first > 0.3


def test_a_deadline_of_the_client_is_ours_to_answer(official: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        official.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "stall=60 a"}],
            extra_headers={"x-request-timeout-seconds": "1"},
        )
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_body_over_the_limit_is_refused_while_it_is_sent(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        piece = b"%x\r\n%s\r\n" % (20_000, b"x" * 20_000)
        for _ in range(6):
            connection.sendall(piece)
        answer = b""
        while b"request_too_large" not in answer and (more := connection.recv(4096)):
            answer += more
    assert b" 413 " in answer.split(b"\r\n")[0] and b"request_too_large" in answer
