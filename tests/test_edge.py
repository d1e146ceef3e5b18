"""The layer in Serve's proxy, over applications that fail as the proxy does."""

import json
from typing import Any

import pytest

from serve_app.edge import FORWARDED_TIMEOUT_HEADER, UNWATCHED_HEADER, Edge, clean_headers, middlewares

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
TEXT = [(b"content-type", b"text/plain")]


def start(status: int, headers: Any) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def through(*messages: dict[str, Any], error: Exception | None = None, path: str = "/v1/x") -> tuple[Any, bytes]:
    """The start message and the whole body of an application that sends `messages`, then raises `error`."""

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody reads")

    headers = [(b"x-request-id", b"mine")]
    await Edge(proxy)({"type": "http", "path": path, "headers": headers}, receive, send)  # type: ignore[arg-type]
    assert [m["type"] for m in sent] == ["http.response.start", *["http.response.body"] * (len(sent) - 1)]
    assert [m.get("more_body", False) for m in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return sent[0], b"".join(m["body"] for m in sent[1:])


@pytest.mark.parametrize(
    ("proxy", "status", "code", "retry"),
    [(408, 504, "deadline_exceeded", "false"), (503, 503, "overloaded", "true"), (404, 503, "not_ready", "true"),
     (500, 500, "internal_error", "false")],
)  # fmt: skip
async def test_plain_text_of_the_proxy_becomes_an_envelope(proxy: int, status: int, code: str, retry: str) -> None:
    first, data = await through(start(proxy, TEXT), body(b"Request ", True), body(b"timed out", False))
    headers = dict(first["headers"])
    assert (first["status"], json.loads(data)["error"]["code"]) == (status, code)
    assert (headers[b"x-should-retry"], headers[b"x-request-id"]) == (retry.encode(), b"mine")


async def test_no_answer_at_all_is_a_lost_replica() -> None:
    first, data = await through()
    assert (first["status"], json.loads(data)["error"]["code"]) == (503, "replica_lost")


async def test_a_proxy_that_raises_is_an_envelope() -> None:
    first, data = await through(error=UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "secret"))
    assert (first["status"], json.loads(data)["error"]["code"]) == (500, "internal_error")
    assert b"secret" not in data


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("error", [None, RuntimeError()])
async def test_a_stream_that_breaks_off_ends_with_an_error_frame(ended: bool, error: Exception | None) -> None:
    last = [body(b"", False)] if ended else []
    _, data = await through(start(200, SSE), body(b'data: {"a":1}\n\nda', True), *last, error=error)
    *_, failure, done, rest = data.decode().split("\n\n")
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert (done, rest) == ("data: [DONE]", "")


@pytest.mark.parametrize("cut", range(1, 14))
async def test_a_complete_stream_passes_unchanged(cut: int) -> None:
    whole = b'data: {"a":1}\n\ndata: [DONE]\n\n'
    parts = [body(whole[:-cut], True), body(whole[-cut:], True), body(b"", False)]
    assert (await through(start(200, SSE), *parts))[1] == whole


@pytest.mark.parametrize(
    ("status", "headers"), [(200, TEXT), (404, [(b"content-type", b"application/json")])]
)  # fmt: skip
async def test_answers_of_the_application_pass_unchanged(status: int, headers: Any) -> None:
    first, data = await through(start(status, headers), body(b"x", False))
    assert (first["status"], data) == (status, b"x")


async def test_serves_own_routes_pass_unchanged() -> None:
    assert (await through(start(503, TEXT), body(b"draining", False), path="/-/healthz"))[1] == b"draining"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/-/healthz"])
@pytest.mark.parametrize("extensions", [None, {}, {"websocket.http.response": {}}])
async def test_a_websocket_is_refused_before_serve_sees_it(path: str, extensions: Any) -> None:
    async def proxy(*_: Any) -> None:
        raise AssertionError("Serve's health check has no answer for one")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": [(b"x-request-id", b"mine")]}
    scope |= {} if extensions is None else {"extensions": extensions}
    await Edge(proxy)(scope, send, send)  # type: ignore[arg-type]
    if not extensions:
        assert sent == [{"type": "websocket.close"}]
        return
    assert [message["type"].removeprefix("websocket.http.response.") for message in sent] == ["start", "body"]
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"x-request-id"]) == (404, b"mine")
    assert json.loads(sent[1]["body"])["error"]["code"] == "not_found"


@pytest.mark.parametrize("given", [b"\xe9\xff", b"a" * 129, b"a b", b"", "é".encode()])
def test_a_request_id_that_is_not_sane_is_replaced(given: bytes) -> None:
    headers, request_id = clean_headers([(b"x-request-id", given)])
    assert headers == [(b"x-request-id", request_id.encode())]
    assert len(request_id) == 32


def test_a_clients_timeout_is_kept_from_serve() -> None:
    headers, _ = clean_headers([(b"x-request-timeout-seconds", b"1"), (b"accept", b"\xe9"), (b"x-request-id", b"i")])
    assert headers == [(FORWARDED_TIMEOUT_HEADER.encode(), b"1"), (b"x-request-id", b"i")]


@pytest.mark.parametrize("watched", [False, True])
async def test_serve_need_not_watch_a_client_that_the_application_watches(watched: bool) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])

    async def nothing(*_: Any) -> None: ...

    # A client that asks for it must not have it: behind Serve's proxy its answers would run on without it.
    for asked in ([], [(UNWATCHED_HEADER.encode(), b"?1")], [(UNWATCHED_HEADER.encode(), b"?0")]):
        seen.clear()
        await Edge(app, watched=watched)({"type": "http", "path": "/v1/x", "headers": asked}, nothing, nothing)  # type: ignore[arg-type]
        assert [value for name, value in seen if name == UNWATCHED_HEADER.encode()] == [b"?1"] * watched


def test_serves_proxy_goes_on_watching() -> None:
    (made,) = middlewares()
    assert made.kwargs == {"watched": False}
