"""What is HAProxy's own: run by test_haproxy, with TEST_PROXY=haproxy."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable

import httpx
import psutil
import pytest

from tests.conftest import FAKE_ENGINE, PROXY, Served, chat, eventually, replica_pids

CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.skipif(PROXY != "haproxy", reason="needs TEST_PROXY=haproxy")


@pytest.fixture(scope="module")
def lonely(serve_app_factory: Callable[..., Served]) -> Served:
    """One ingress to lose."""
    config = {
        "model": {"id": "fake"},
        "replica": {"num_cpus": 0.1},
        "metrics": {"heartbeat_s": 0.5, "host": "127.0.0.1"},
    }
    return serve_app_factory("lonely", config, FAKE_ENGINE)


def test_it_is_haproxy_that_listens(served: Served) -> None:
    (owner,) = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr[1] == served.port}
    assert psutil.Process(owner).name() == "haproxy"


def test_its_own_pages_are_for_this_machine_alone(served: Served) -> None:
    pid = next(c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr[1] == served.port)
    listening = {c.laddr[0] for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"}
    assert listening == {"127.0.0.1"}


def test_a_client_that_waits_too_long_is_told_in_openais_shape(served: Served) -> None:
    answer = httpx.post(
        served.url + CHAT, json=chat("a stall=30"), headers={"x-request-timeout-seconds": "0.5"}, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false" and len(answer.headers.get_list("x-request-id")) == 1


def test_odd_headers_do_no_harm(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), 10) as raw:
        raw.sendall(
            b"GET /health HTTP/1.1\r\nHost: x\r\nx-request-id: \xe9\r\nx-odd: \xff\r\nConnection: close\r\n\r\n"
        )
        raw.settimeout(10)
        assert raw.recv(65536).split()[1] in (b"200", b"400")


@pytest.fixture
def ingress(lonely: Served) -> int:
    """Its process, once it answers."""
    eventually(lambda: httpx.get(f"{lonely.url}/ready", timeout=30, trust_env=False).status_code == 200, 60)
    (pid,) = replica_pids("lonely", "ingress").values()
    return pid


def test_a_stream_whose_ingress_is_lost_is_never_taken_for_ended(lonely: Served, ingress: int) -> None:
    """HAProxy breaks it off as a connection does, for nobody is left to write an error frame; the edge writes one where
    Serve's proxy stands in until HAProxy knows an ingress that has just started."""
    body = chat("a delay=0.1 repeat=100", stream=True)
    seen = []
    with httpx.stream("POST", lonely.url + CHAT, json=body, timeout=60, trust_env=False) as answer:
        lines = answer.iter_lines()
        seen.append(next(lines))
        os.kill(ingress, signal.SIGKILL)
        try:
            seen.extend(line for line in lines if line)
        except httpx.RemoteProtocolError:
            assert "data: [DONE]" not in seen
        else:
            assert seen[-1] == "data: [DONE]"
            assert json.loads(seen[-2].removeprefix("data: "))["error"]["code"] == "replica_lost"


def test_a_whole_answer_whose_ingress_is_lost_is_an_envelope(lonely: Served, ingress: int) -> None:
    threading.Timer(1, os.kill, (ingress, signal.SIGKILL)).start()
    answer = httpx.post(lonely.url + CHAT, json=chat("a delay=0.1 repeat=100"), timeout=60, trust_env=False)
    # HAProxy's own, or the edge's where Serve's proxy stood in for an ingress that was just replaced.
    assert answer.status_code == 503 and answer.json()["error"]["code"] in ("not_ready", "replica_lost")
    assert answer.headers["x-should-retry"] == "true" and int(answer.headers["retry-after"]) >= 1
