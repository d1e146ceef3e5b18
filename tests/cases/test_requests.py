"""What people reported against other gateways, through a real socket: requests that are refused, and fields.

Each test names the symptom; the URL is where it was reported. Engines are fake, everything before them is real.
"""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.cases.wire import CALL, CHAT, USER, error_of
from tests.conftest import chat


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


def test_tools_are_refused_rather_than_ignored(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        official.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
