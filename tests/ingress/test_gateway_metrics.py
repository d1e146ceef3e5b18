"""What a request leaves in the gateway's series."""

import asyncio
import json
import re
from typing import Any

import pytest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from serve_app.ingress.generation import Gateway
from serve_app.ingress.routes import create_app
from tests.conftest import Hold, chat
from tests.direct import direct_client, make_gateway, until

CHAT = "/v1/chat/completions"


async def after(path: str, body: Any = None, **config: Any) -> Gateway:
    gateway = await make_gateway({"ingress": config})
    async with direct_client(gateway) as client:
        await client.request("POST" if body is not None else "GET", path, json=body)
    return gateway


@pytest.mark.parametrize(
    ("path", "body", "route", "status", "model"),
    [
        (CHAT, chat("a"), CHAT, "200", "fake"),
        (CHAT, {**chat("a"), "model": "made-up"}, CHAT, "404", "unknown"),
        (CHAT, {**chat("a"), "n": 0}, CHAT, "400", "fake"),
        (CHAT, chat("a fail_at=0"), CHAT, "500", "fake"),
        (CHAT, chat("a b fail_at=1", stream=True), CHAT, "500", "fake"),
        ("/v1/models/made-up", None, "/v1/models/{model_id:path}", "404", "unknown"),
        ("/openapi.json", None, "/openapi.json", "200", "unknown"),
        ("/made/up", None, "unmatched", "404", "unknown"),
        ("/also/made/up", None, "unmatched", "404", "unknown"),
    ],
)
async def test_labels_are_bounded(path: str, body: Any, route: str, status: str, model: str) -> None:
    gateway = await after(path, body)
    labels = {"route": route, "status": status, "model": model}
    assert gateway.registry.get_sample_value("gateway_requests_total", labels) == 1


async def test_one_interval_is_observed_per_token_after_the_first_item() -> None:
    gateway = await after(CHAT, chat("a b c d delay=0.01", stream=True))
    labels = {"model": "fake", "stream": "true"}
    assert gateway.registry.get_sample_value("gateway_itl_seconds_count", labels) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_queued_until_its_first_token(stream: bool, hold: Hold) -> None:
    gateway = await make_gateway()
    value, labels = gateway.registry.get_sample_value, {"model": "fake"}

    def state() -> tuple[float | None, ...]:
        return tuple(value(f"gateway_{name}_requests", labels) for name in ("inflight", "queued"))

    async with direct_client(gateway) as client:
        answer = asyncio.create_task(client.post(CHAT, json=chat(f"a b {hold}", stream=stream)))
        await until(lambda: state() == (1, 1))
        hold.allow(1)
        await until(lambda: state() == (1, 0))
        hold.release()
        assert (await answer).status_code == 200


async def test_ttft_waits_for_text_not_for_the_role() -> None:
    # The first byte of a character is a token without text.
    gateway = await after(CHAT, chat("bytes=c3a9 delay=0.2", stream=True))
    labels = {"model": "fake", "stream": "true"}
    assert gateway.registry.get_sample_value("gateway_ttft_seconds_sum", labels) > 0.35  # type: ignore[operator]


async def test_a_stream_that_broke_off_is_counted_and_is_no_refusal() -> None:
    gateway = await after(CHAT, chat("a b fail_at=1", stream=True))
    value = gateway.registry.get_sample_value
    assert value("gateway_stream_errors_total", {"model": "fake"}) == 1
    assert value("gateway_rejected_total", {"reason": "invalid"}) == 0


@pytest.mark.parametrize(
    ("script", "reason"),
    [("refuse=Overloaded", "overload"), ("refuse=InvalidRequest", "invalid"), ("stall=60 a", "deadline")],
)
async def test_refusals_are_counted_by_reason(script: str, reason: str) -> None:
    gateway = await after(CHAT, chat(script), request_timeout_s=2 if reason == "deadline" else 60)
    assert gateway.registry.get_sample_value("gateway_rejected_total", {"reason": reason}) == 1


async def test_only_requests_that_reached_generation_are_timed() -> None:
    gateway = await after(CHAT, {**chat("a"), "n": 0})
    assert gateway.registry.get_sample_value(
        "gateway_request_duration_seconds_count", {"model": "fake", "stream": "false"}
    ) in (None, 0)


async def test_latencies_name_a_request_of_theirs() -> None:
    gateway = await make_gateway()
    async with direct_client(gateway) as client:
        await client.post(CHAT, json=chat("a", stream=True), headers={"x-request-id": "mine"})
    page = openmetrics.generate_latest(gateway.registry).decode()
    for name in ("gateway_ttft_seconds_bucket", "gateway_request_duration_seconds_bucket"):
        assert re.search(rf'^{name}{{.*}} 1.0 # {{request_id="mine"}}', page, re.MULTILINE)


async def test_an_id_too_long_for_an_exemplar_costs_the_request_nothing() -> None:
    async with direct_client() as client:
        response = await client.post(CHAT, json=chat("a", stream=True), headers={"x-request-id": "i" * 128})
    assert response.status_code == 200 and response.text.endswith("[DONE]\n\n")


async def test_the_page_is_valid_and_each_family_is_declared_once() -> None:
    gateway = await make_gateway()
    async with direct_client(gateway) as client:
        await client.post(CHAT, json=chat("a b", stream=True))
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = [family.name for family in text_string_to_metric_families(response.text)]
    assert len(names) == len(set(names)) and "gateway_requests" in names


@pytest.mark.parametrize("broken", [False, True])
async def test_a_client_has_a_chunk_before_it_is_counted(broken: bool) -> None:
    gateway = await make_gateway()
    labels = {"model": "fake", "stream": "true"}
    counted: list[Any] = []
    body = [{"type": "http.request", "body": json.dumps(chat("a b delay=0.01", stream=True)).encode()}]

    async def receive() -> Any:
        if body:
            return body.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            counted.append(gateway.registry.get_sample_value("gateway_ttft_seconds_count", labels))
            if broken and len(counted) == 1:
                raise OSError("the connection is gone")

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "root_path": "", "http_version": "1.1",
        "scheme": "http", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await create_app(gateway)(scope, receive, send)  # type: ignore[arg-type]
    # And where sending failed all the same.
    assert counted[:2] == [None, 1.0]
