"""Bodies, and answers taken apart."""

import json
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert len(response.headers.get_list("x-request-id")) == 1
    return error


def events_of(response: httpx.Response) -> list[Any]:
    events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
