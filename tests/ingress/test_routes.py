"""Routes over a replica in the same process."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app.ingress.routes import create_app
from serve_app.protocol import Item, Job
from tests.conftest import chat
from tests.direct import direct_client, make_gateway

CHAT = "/v1/chat/completions"


def envelope(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-should-retry"] in ("true", "false")
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("POST", "/v1/responses", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/fake/x", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("POST", CHAT + "/", 404, "not_found"),
    ],
)
async def test_wrong_routes_and_methods_get_the_envelope(method: str, path: str, status: int, code: str) -> None:
    async with direct_client() as client:
        response = await client.request(method, path)
    assert (response.status_code, envelope(response)["code"]) == (status, code)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        *((path, "GET, HEAD") for path in ("/health", "/ready", "/openapi.json")),
        *((path, "GET") for path in ("/version", "/metrics", "/v1/models", "/v1/models/fake")),
        *((path, "POST") for path in (CHAT, "/tokenize")),
    ],
)
@pytest.mark.parametrize("method", ["OPTIONS", "DELETE"])
async def test_a_wrong_method_is_told_all_that_the_path_offers(method: str, path: str, methods: str) -> None:
    async with direct_client() as client:
        response = await client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, methods)


async def test_an_unknown_path_is_told_with_where_the_routes_are() -> None:
    async with direct_client() as client:
        said = [envelope(await client.get(path))["message"] for path in ("/chat/completions", "/%0Aa%00" + "b" * 9999)]
    known = "The API is under /v1; GET /openapi.json lists it."
    assert said[0] == f"There is no such route: /chat/completions. {known}"
    assert said[1] == f"There is no such route: /\ufffda\ufffd{'b' * 96}…. {known}"


async def test_the_document_is_there_under_a_prefix_too() -> None:
    app = create_app(await make_gateway())
    for prefix, servers in (("", None), ("/one", [{"url": "/one"}])):
        transport = httpx.ASGITransport(app, root_path=prefix)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.get(f"{prefix}/openapi.json")
            assert (await client.head(f"{prefix}/openapi.json")).status_code == 200
        assert "/v1/models" in answer.json()["paths"] and answer.json().get("servers") == servers


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON;charset=UTF-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=latin-1", 415),
        (None, 415),
    ],
)
async def test_bodies_are_json_in_utf8(content_type: str | None, status: int) -> None:
    headers = {"content-type": content_type} if content_type else {}
    async with direct_client() as client:
        response = await client.post(CHAT, content=json.dumps(chat("a")).encode(), headers=headers)
    assert response.status_code == status
    if status != 200:
        envelope(response)


async def test_a_compressed_body_is_refused() -> None:
    async with direct_client() as client:
        response = await client.post(CHAT, json=chat("a"), headers={"content-encoding": "gzip"})
    assert response.status_code == 415


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused_before_it_is_read(declared: bool) -> None:
    gateway = await make_gateway({"ingress": {"max_body_bytes": 1024}})
    sent = 0

    async def body() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b"x" * 1000

    headers = {"content-type": "application/json"} | ({"content-length": "100000"} if declared else {})
    async with direct_client(gateway) as client:
        response = await client.post(CHAT, content=body(), headers=headers)
    assert (response.status_code, envelope(response)["code"]) == (413, "request_too_large")
    assert sent <= 3


@pytest.mark.parametrize("model", ["nope", "fake:adapter", "FAKE", "fake/", " fake"])
async def test_only_the_configured_model_exists(model: str) -> None:
    async with direct_client() as client:
        response = await client.post(CHAT, json={**chat("a"), "model": model})
    assert (response.status_code, envelope(response)["code"], envelope(response)["param"]) == (
        404, "model_not_found", "model",
    )  # fmt: skip
    assert f"The model {model} does not exist" in envelope(response)["message"]


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2:3", True), ("x" * 129, False), ("a b", False), ("é", False)])
async def test_a_sane_request_id_is_kept(given: str, kept: bool) -> None:
    async with direct_client() as client:
        response = await client.get("/health", headers={"x-request-id": given.encode()})
    assert (response.headers.get_list("x-request-id") == [given]) == kept


@pytest.mark.parametrize(
    "error", ["InvalidRequest", "ContextLengthExceeded", "Unsupported", "Overloaded", "RateLimited"]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_by_the_engine_is_one_envelope_with_its_own_status(error: str, stream: bool) -> None:
    from serve_app import errors

    async with direct_client() as client:
        response = await client.post(CHAT, json=chat(f"refuse={error}", stream=stream))
    cls = getattr(errors, error)
    assert (response.status_code, envelope(response)["code"]) == (cls.status, cls.code)


async def test_a_failure_in_mid_stream_is_an_error_frame_and_done() -> None:
    async with direct_client() as client:
        response = await client.post(CHAT, json=chat("a b fail_at=1", stream=True))
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200 and events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "engine_error"
    assert sum("error" in event for event in events) == 1


async def test_an_unexpected_fault_in_mid_stream_is_an_error_frame_without_details() -> None:
    gateway = await make_gateway()
    generate = gateway.backend.generate

    async def broken(job: Job) -> AsyncIterator[Item]:
        async for item in generate(job):
            yield item
            raise ArithmeticError("secret")

    gateway.backend.generate = broken  # type: ignore[method-assign]
    async with direct_client(gateway) as client:
        response = await client.post(CHAT, json=chat("a b", stream=True))
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "internal_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_out_of_time_is_answered_and_not_to_be_retried(stream: bool) -> None:
    async with direct_client() as client:
        response = await client.post(
            CHAT, json=chat("stall=9 a", stream=stream), headers={"x-request-timeout-seconds": "0.1"}
        )
    assert (response.status_code, envelope(response)["code"]) == (504, "deadline_exceeded")
    assert response.headers["x-should-retry"] == "false"


async def test_a_stream_out_of_time_ends_with_an_error_frame() -> None:
    async with direct_client() as client:
        response = await client.post(
            CHAT, json=chat("a delay=0.1 repeat=500", stream=True), headers={"x-request-timeout-seconds": "2"}
        )
    assert '"code":"deadline_exceeded"' in response.text and response.text.endswith("data: [DONE]\n\n")


async def test_a_client_may_ask_for_less_time_but_not_for_more() -> None:
    gateway = await make_gateway({"ingress": {"request_timeout_s": 0.1}})
    async with direct_client(gateway) as client:
        response = await client.post(CHAT, json=chat("stall=9 a"), headers={"x-request-timeout-seconds": "60"})
    assert response.status_code == 504


async def test_models_are_listed_with_their_context() -> None:
    async with direct_client() as client:
        listed, one = (await client.get("/v1/models")).json(), (await client.get("/v1/models/fake")).json()
    assert listed == {"object": "list", "data": [one]}
    assert one == {"id": "fake", "object": "model", "created": 1, "owned_by": "ddtree-serve", "max_model_len": 4096}


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with direct_client() as client:
        tokens = (await client.post("/tokenize", json={"prompt": "hé"})).json()
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert tokens == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 4096}
    assert text == {"prompt": "hé"}


async def test_tokenize_takes_messages() -> None:
    async with direct_client() as client:
        answer = await client.post("/tokenize", json={"model": "fake", "messages": [{"role": "user", "content": "a"}]})
    assert answer.json()["count"] == 1


@pytest.mark.parametrize("tokens", [[1000], [-1], ["a"], [2**40]])
async def test_detokenize_refuses_what_is_no_token(tokens: list[Any]) -> None:
    async with direct_client() as client:
        response = await client.post("/detokenize", json={"tokens": tokens})
    assert (response.status_code, envelope(response)["param"]) == (400, "tokens[0]")


async def test_ready_follows_the_engine_and_health_does_not() -> None:
    gateway = await make_gateway({"ingress": {"ready_max_age_s": 0.01, "ready_timeout_s": 2}})
    async with direct_client(gateway) as client:
        assert (await client.get("/ready")).status_code == 200
        await client.post(CHAT, json=chat("stuck=1 a"))
        await asyncio.sleep(0.05)
        ready = await client.get("/ready")
        assert (ready.status_code, envelope(ready)["code"]) == (503, "not_ready")
        assert (await client.get("/health")).status_code == 200


async def test_load_balancers_may_probe_with_head() -> None:
    async with direct_client() as client:
        answers = [await client.head(path) for path in ("/health", "/ready")]
    assert [(answer.status_code, answer.content) for answer in answers] == [(200, b""), (200, b"")]


async def test_an_unexpected_fault_is_an_envelope_without_details() -> None:
    gateway = await make_gateway()
    gateway.backend.info = None  # type: ignore[assignment, method-assign]
    async with direct_client(gateway) as client:
        response = await client.get("/v1/models")
    assert (response.status_code, envelope(response)["code"]) == (500, "internal_error")
    assert "NoneType" not in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_takes_back_what_earlier_tokens_proved(stream: bool) -> None:
    gateway = await make_gateway({"ingress": {"ready_max_age_s": 60}})
    async with direct_client(gateway) as client:
        await client.post(CHAT, json=chat("a"))
        assert gateway.last_token_at is not None
        await client.post(CHAT, json=chat("a b fail_at=1", stream=stream))
        assert gateway.last_token_at is None


async def test_a_timeout_forwarded_by_the_edge_is_obeyed() -> None:
    async with direct_client() as client:
        headers = {"x-ddtree-timeout-seconds": "0.1"}
        response = await client.post(CHAT, json=chat("stall=9 a"), headers=headers)
    assert (response.status_code, envelope(response)["code"]) == (504, "deadline_exceeded")
