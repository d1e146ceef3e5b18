"""Generations that skip FastAPI's layers against the same through them."""

from typing import Any

import httpx
import pytest

from serve_app.ingress.routes import GENERATIONS, create_app
from tests.conftest import chat
from tests.direct import make_gateway

CHAT, COMPLETIONS = GENERATIONS
METHODS = ("GET", "PUT", "HEAD", "OPTIONS")


async def told(direct: bool, method: str, path: str, **request: Any) -> Any:
    """What differs between any two requests is left out."""
    gateway = await make_gateway()
    app = create_app(gateway, direct=direct)
    transport = httpx.ASGITransport(app, root_path=request.pop("root_path", ""))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.request(method, path, headers={"x-request-id": "one"}, **request)
    if answer.headers["content-type"].startswith("text/event-stream"):
        said: Any = [event.partition(b'"choices"')[2] for event in answer.content.split(b"\n\n")]
    else:
        said = {**answer.json(), "id": 0, "created": 0} if answer.content else None
    counted = [
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in gateway.registry.collect()
        for sample in family.samples
        if sample.name in ("gateway_requests_total", "gateway_rejected_total") and sample.value
    ]
    await gateway.backend.replica._watchdog.stop()  # type: ignore[attr-defined]
    return answer.status_code, {**answer.headers, "content-length": 0}, said, counted


@pytest.mark.parametrize(
    ("method", "path", "request_"),
    [
        ("POST", CHAT, {"json": chat("a b c")}),
        ("POST", CHAT, {"json": chat("a b c", stream=True, stream_options={"include_usage": True})}),
        ("POST", COMPLETIONS, {"json": {"model": "fake", "prompt": "a b", "n": 2}}),
        ("POST", CHAT, {"json": chat("refuse=Overloaded")}),
        ("POST", CHAT, {"json": chat("a b fail_at=1", stream=True)}),
        ("POST", CHAT, {"json": {"model": "another"}}),
        ("POST", CHAT, {"content": b"{"}),
        ("POST", CHAT + "?x=1", {"json": chat("a")}),
        ("POST", CHAT + "/", {"json": chat("a")}),
        ("POST", CHAT.upper(), {"json": chat("a")}),
        ("POST", "/root" + CHAT, {"json": chat("a"), "root_path": "/root"}),
        *((method, CHAT, {}) for method in METHODS),
    ],
)
async def test_a_client_sees_no_difference(method: str, path: str, request_: dict[str, Any]) -> None:
    assert await told(True, method, path, **request_) == await told(False, method, path, **request_)


async def test_what_fails_unexpectedly_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.ingress.routes.read_body", lambda *_: 1 / 0)
    status, _, said, _ = await told(True, "POST", CHAT, json=chat("a"))
    assert (status, said["error"]["type"]) == (500, "server_error")


async def test_generations_are_described_with_the_other_routes() -> None:
    gateway = await make_gateway()
    assert set(GENERATIONS) < set(create_app(gateway).openapi()["paths"])
    await gateway.backend.replica._watchdog.stop()  # type: ignore[attr-defined]
