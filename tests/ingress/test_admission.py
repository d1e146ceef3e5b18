"""Keys, rates and queues as a client meets them."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from serve_app.admission.keys import scrypt_hash, sha256_hash
from serve_app.ingress.generation import Gateway
from tests.conftest import chat
from tests.direct import direct_client, make_gateway

CHAT = "/v1/chat/completions"
KEYS: list[dict[str, Any]] = [
    {"name": "any", "hash": sha256_hash("key-any")},
    {"name": "slow", "hash": scrypt_hash("key-slow")},
    {"name": "other", "hash": sha256_hash("key-other"), "models": ["another"]},
    {"name": "few", "hash": sha256_hash("key-few"), "requests_per_minute": 2},
    {"name": "short", "hash": sha256_hash("key-short"), "tokens_per_minute": 20},
    {"name": "single", "hash": sha256_hash("key-single"), "max_concurrent": 1},
    {"name": "batch", "hash": sha256_hash("key-batch"), "priority": "batch"},
]


async def gateway(**admission: Any) -> Gateway:
    return await make_gateway({"admission": {"keys": KEYS, **admission}})


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **headers}


async def ask(client: httpx.AsyncClient, key: str, script: str = "a", **fields: Any) -> httpx.Response:
    return await client.post(CHAT, json=chat(script, **fields), headers=bearer(key))


def value(of: Gateway, name: str, **labels: str) -> float:
    return of.registry.get_sample_value(name, labels) or 0


@pytest.mark.parametrize("key", ["key-any", "key-slow"])
async def test_a_known_key_is_let_in(key: str) -> None:
    async with direct_client(await gateway()) as client:
        assert (await ask(client, key)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": ""}, {"authorization": "Bearer"}, bearer("wrong"), bearer("KEY-ANY"),
     {"authorization": "Basic key-any"}, {"authorization": "key-any"}, {"x-api-key": "key-any"}],
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", CHAT), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/models"),
     ("GET", "/v1/models/fake"), ("GET", "/server_info")],
)  # fmt: skip
async def test_strangers_get_401_on_every_route_of_the_api(headers: dict[str, str], method: str, path: str) -> None:
    async with direct_client(await gateway()) as client:
        response = await client.request(method, path, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert response.headers["x-should-retry"] == "false"


async def test_a_refusal_does_not_show_the_key() -> None:
    async with direct_client(await gateway()) as client:
        assert "wrong-key" not in (await ask(client, "wrong-key")).text


async def test_health_and_metrics_need_no_key() -> None:
    async with direct_client(await gateway()) as client:
        statuses = [(await client.get(path)).status_code for path in ("/health", "/ready", "/metrics", "/version")]
    assert statuses == [200] * 4


async def test_without_keys_any_or_none_is_let_in() -> None:
    async with direct_client() as client:
        assert [(await client.post(CHAT, json=chat("a"), headers=h)).status_code for h in ({}, bearer("x"))] == [
            200,
            200,
        ]


async def test_a_model_that_a_key_may_not_use_does_not_exist() -> None:
    async with direct_client(await gateway()) as client:
        answers = [
            await ask(client, "key-other"),
            await client.get("/v1/models/fake", headers=bearer("key-other")),
            await client.post("/tokenize", json={"prompt": "a"}, headers=bearer("key-other")),
        ]
        listed = await client.get("/v1/models", headers=bearer("key-other"))
    assert [(a.status_code, a.json()["error"]["code"]) for a in answers] == [(404, "model_not_found")] * 3
    assert listed.json()["data"] == []


async def test_a_request_rate_is_kept_and_says_when_to_come_again() -> None:
    async with direct_client(await gateway()) as client:
        statuses = [await ask(client, "key-few") for _ in range(3)]
        others = await ask(client, "key-any")
    assert [r.status_code for r in statuses] == [200, 200, 429] and others.status_code == 200
    refused = statuses[-1]
    assert refused.json()["error"]["type"] == "rate_limit_error" and refused.headers["x-should-retry"] == "true"
    assert 25 <= int(refused.headers["retry-after"]) <= 30


@pytest.mark.parametrize("stream", [True, False])
async def test_a_token_rate_counts_prompt_and_answer(stream: bool) -> None:
    of = await gateway()
    async with direct_client(of) as client:
        first = await ask(client, "key-short", "a b c d e f repeat=5", stream=stream)
        second = await ask(client, "key-short")
    assert (first.status_code, second.status_code) == (200, 429)
    used = [value(of, "gateway_key_tokens_total", key="short", kind=kind) for kind in ("prompt", "completion")]
    assert used == [7, 30]


async def test_a_token_rate_is_charged_what_was_used() -> None:
    of = await gateway()
    async with direct_client(of) as client:
        await ask(client, "key-short", "a b", n=2)
    bucket = of.admission._callers["short"].tokens
    assert bucket is not None and bucket._level == pytest.approx(20 - 2 - 4, abs=0.5)


@pytest.mark.parametrize("script", ["a refuse=Overloaded", "a refuse=ContextLengthExceeded", "a fail_at=0"])
async def test_what_the_engine_did_not_take_is_not_charged(script: str) -> None:
    of = await gateway()
    bucket = of.admission._callers["short"].tokens
    assert bucket is not None
    async with direct_client(of) as client:
        refused = await ask(client, "key-short", script, user="u" * 400)  # the body alone is more than the allowance
    assert refused.status_code in (400, 500, 503) and bucket._level == pytest.approx(20)


async def test_a_keys_concurrency_is_bounded() -> None:
    async with direct_client(await gateway()) as client:
        running = asyncio.create_task(ask(client, "key-single", "a stall=0.3"))
        await asyncio.sleep(0.1)
        refused, other = await ask(client, "key-single"), await ask(client, "key-any")
        await running
        after = await ask(client, "key-single")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_exceeded")
    assert (other.status_code, after.status_code) == (200, 200)


async def test_beyond_the_queue_requests_are_refused_as_overload() -> None:
    of = await gateway(max_concurrent=1, max_queued=1)
    async with direct_client(of) as client:
        tasks = [asyncio.create_task(ask(client, "key-any", "a stall=0.3")) for _ in range(2)]
        await asyncio.sleep(0.1)
        waiting = value(of, "gateway_waiting_requests", priority="interactive")
        refused = await ask(client, "key-any")
        answers = await asyncio.gather(*tasks)
    assert waiting == 1 and [a.status_code for a in answers] == [200, 200]
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1 and value(of, "gateway_rejected_total", reason="overload") == 1


@pytest.mark.parametrize(
    ("key", "headers"),
    [("key-batch", {}), ("key-any", {"x-priority": "batch"}), ("key-batch", {"x-priority": "interactive"})],
)
async def test_interactive_requests_overtake_batch_ones(key: str, headers: dict[str, str]) -> None:
    async with direct_client(await gateway(max_concurrent=1)) as client:
        done: list[str] = []

        async def run(name: str, who: str, more: dict[str, str]) -> None:
            await client.post(CHAT, json=chat("a stall=0.1"), headers=bearer(who, **more))
            done.append(name)

        tasks = []
        for name, who, more in (("first", "key-any", {}), ("batch", key, headers), ("interactive", "key-any", {})):
            tasks.append(asyncio.create_task(run(name, who, more)))
            await asyncio.sleep(0.03)
        await asyncio.gather(*tasks)
    assert done == ["first", "interactive", "batch"]


async def test_a_priority_that_does_not_exist_is_refused_by_name() -> None:
    async with direct_client() as client:
        response = await client.post(CHAT, json=chat("a"), headers={"x-priority": "highest"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-priority")


async def test_a_request_whose_time_is_up_while_it_waits_gives_its_place_back() -> None:
    of = await gateway(max_concurrent=1)
    async with direct_client(of) as client:
        running = asyncio.create_task(ask(client, "key-any", "a stall=0.5"))
        await asyncio.sleep(0.05)
        headers = bearer("key-any", **{"x-request-timeout-seconds": "0.2"})
        late = await client.post(CHAT, json=chat("a"), headers=headers)
        assert value(of, "gateway_waiting_requests", priority="interactive") == 0
        await running
    assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")


async def test_a_failed_stream_leaves_its_slot() -> None:
    of = await gateway(max_concurrent=1)
    async with direct_client(of) as client:
        broken = await ask(client, "key-any", "a b fail_at=1 delay=0.01", stream=True)
        assert json.loads(broken.text.split("\n\n")[-3].removeprefix("data: "))["error"]
        assert (await ask(client, "key-any")).status_code == 200


ADMIN = (
    "/admin", "/reset", "/flush_cache", "/start_profile", "/stop_profile", "/shutdown", "/abort_request", "/pause",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/get_server_info", "/docs", "/redoc",
    "/collective_rpc", "/sleep", "/wake_up",
)  # fmt: skip


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_there_is_no_administrative_route(path: str, method: str) -> None:
    async with direct_client() as client:
        assert (await client.request(method, path)).status_code == 404
