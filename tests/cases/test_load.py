"""What people reported against other gateways, through a real socket: many at once, leaving, limits.

Each test names the symptom; the URL is where it was reported. Engines are fake, everything before them is real.
"""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.cases.wire import CHAT
from tests.conftest import Hold, Served, chat, eventually, metric


# Ray's SGLang engine: n, seed, logprobs, tools and penalties dropped; text stripped; list prompts run serially
def test_every_choice_is_answered(client: httpx.Client) -> None:
    choices = client.post(CHAT, json=chat("a b", n=3)).json()["choices"]
    assert [(c["index"], c["message"]["content"]) for c in choices] == [(i, "a b") for i in range(3)]


def test_prompts_run_side_by_side(client: httpx.Client, served: Served, hold: Hold) -> None:
    body = {"model": "fake", "prompt": [f"{word} {hold}" for word in "abcdefgh"]}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/v1/completions", json=body, timeout=120)
        try:
            eventually(lambda: metric(served, "fake_running_requests") == 8)
        finally:
            hold.release()
        assert [c["text"] for c in answer.result().json()["choices"]] == list("abcdefgh")


# https://github.com/sgl-project/sglang/issues/37833 and 20623
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", ["stall=600 a", "a delay=0.05 b repeat=2000"])
def test_leaving_aborts_the_engine_at_once(served: Served, script: str, stream: bool) -> None:
    aborts, left = metric(served, "fake_aborts_total"), metric(served, "gateway_requests_total", status="499")
    body = json.dumps(chat(script, stream=stream)).encode()
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(request % (CHAT.encode(), len(body), body))
        eventually(lambda: metric(served, "fake_running_requests") == 1)
        if stream and "repeat" in script:
            assert connection.recv(100)
    # A second or so, against minutes of generation; the bound leaves room for a busy machine.
    eventually(lambda: metric(served, "fake_aborts_total") == aborts + 1)
    eventually(lambda: metric(served, "gateway_requests_total", status="499") == left + 1)
    for gauge in ("fake_running_requests", "gateway_inflight_requests", "gateway_queued_requests"):
        assert metric(served, gauge) == 0


# https://github.com/vllm-project/production-stack/pull/767
def test_150_streams_run_at_once(served: Served, hold: Hold) -> None:
    done: list[int] = []

    def one(client: httpx.Client) -> None:
        response = client.post(CHAT, json=chat(f"a {hold}", stream=True))
        done.append(response.status_code)

    limits = httpx.Limits(max_connections=200)
    with httpx.Client(base_url=served.url, limits=limits, timeout=120, trust_env=False) as client:
        threads = [threading.Thread(target=one, args=(client,)) for _ in range(150)]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: metric(served, "fake_running_requests") == 150)
        finally:
            hold.release()
            for thread in threads:
                thread.join()
    assert done == [200] * 150


def test_a_deadline_of_the_client_is_ours_to_answer(official: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        official.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "stall=600 a"}],
            extra_headers={"x-request-timeout-seconds": "1"},
        )
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_body_over_the_limit_is_refused_while_it_is_sent(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
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
