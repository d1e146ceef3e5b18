"""A client that leaves, at the ASGI level: what the server in front tells the application."""

import asyncio
import json
from typing import Any

import pytest

from serve_app.ingress.routes import create_app
from tests.conftest import chat
from tests.direct import make_gateway

SCOPE = {
    "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "root_path": "",
    "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
}  # fmt: skip


async def leave(gateway: Any, script: str, *, stream: bool, cancel: bool) -> list[dict[str, Any]]:
    """Post a script and leave after 0.1 s: as a disconnect message, or by cancelling the application."""
    gone, sent = asyncio.Event(), []
    body = [{"type": "http.request", "body": json.dumps(chat(script, stream=stream)).encode()}]

    async def receive() -> Any:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    task = asyncio.create_task(create_app(gateway)(dict(SCOPE), receive, send))
    await asyncio.sleep(0.1)
    gone.set()
    if cancel:
        task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.done()
    return sent


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", ["stall=9 a", "a delay=0.02 b repeat=400"])
async def test_leaving_aborts_the_engine_and_counts_as_499(script: str, stream: bool, cancel: bool) -> None:
    gateway = await make_gateway()
    await leave(gateway, script, stream=stream, cancel=cancel)
    engine = gateway.backend.replica._registry  # type: ignore[attr-defined]
    assert engine.get_sample_value("fake_running_requests") == 0
    assert engine.get_sample_value("fake_aborts_total") == 1
    value = gateway.registry.get_sample_value
    labels = {"route": "/v1/chat/completions", "status": "499", "model": "fake"}
    assert value("gateway_requests_total", labels) == 1
    assert value("gateway_inflight_requests", {"model": "fake"}) == 0
    assert value("gateway_queued_requests", {"model": "fake"}) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_stays_and_does_not_read_is_not_waited_for_without_end(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.ingress.generation.LAST_WORDS_S", 0.01)
    gateway = await make_gateway({"ingress": {"request_timeout_s": 2}})
    body = [{"type": "http.request", "body": json.dumps(chat("a b c delay=0.01", stream=stream)).encode()}]

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    await asyncio.wait_for(create_app(gateway)(dict(SCOPE), receive, send), 30)
    labels = {"route": "/v1/chat/completions", "status": "499", "model": "fake"}
    assert gateway.registry.get_sample_value("gateway_requests_total", labels) == 1


async def test_nothing_is_sent_to_a_client_that_left_its_stream() -> None:
    gateway = await make_gateway()
    sent = await leave(gateway, "a delay=0.02 b repeat=400", stream=True, cancel=False)
    assert b"error" not in b"".join(message.get("body", b"") for message in sent)
