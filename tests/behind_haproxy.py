"""What is HAProxy's own: run by test_haproxy, with TEST_PROXY=haproxy."""

import contextlib
import csv
import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import ray

from tests.conftest import FAKE_ENGINE, METRICS, PROXY, Served, chat, eventually, replica_pids

CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.skipif(PROXY != "haproxy", reason="needs TEST_PROXY=haproxy")


@pytest.fixture(scope="module")
def lonely(serve_app_factory: Callable[..., Served]) -> Served:
    """One ingress to lose."""
    config = {
        "model": {"id": "fake"},
        "replica": {"num_cpus": 0.1},
        "metrics": METRICS,
    }
    return serve_app_factory("lonely", config, FAKE_ENGINE)


def listeners(port: int) -> set[tuple[str, str]]:
    """Program and address of each socket that a process with the port listens on. After a change of its configuration
    there are two of them for a moment."""
    pids = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr[1] == port}
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            sockets = (c for c in process.net_connections("tcp") if c.status == "LISTEN")
            found |= {(process.name(), c.laddr[0]) for c in sockets}
    return found


def test_it_is_haproxy_that_listens_and_for_this_machine_alone(served: Served) -> None:
    """Its own pages, too."""
    eventually(lambda: bool(listeners(served.port)))
    assert listeners(served.port) <= {("haproxy", "127.0.0.1")}


def test_a_client_that_waits_too_long_is_told_in_openais_shape(served: Served) -> None:
    answer = httpx.post(
        served.url + CHAT, json=chat("a stall=30"), headers={"x-request-timeout-seconds": "0.5"}, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false" and len(answer.headers.get_list("x-request-id")) == 1


def test_what_has_no_path_is_told_in_openais_shape(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as sock:
        sock.sendall(b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head, _, data = b"".join(iter(lambda: sock.recv(4096), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404") and json.loads(data)["error"]["code"] == "not_found"


def test_odd_headers_do_no_harm(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), 60) as raw:
        raw.sendall(
            b"GET /health HTTP/1.1\r\nHost: x\r\nx-request-id: \xe9\r\nx-odd: \xff\r\nConnection: close\r\n\r\n"
        )
        raw.settimeout(60)
        assert raw.recv(65536).split()[1] in (b"200", b"400")


def test_an_offer_to_change_the_protocol_does_not_lose_the_body(served: Served) -> None:
    headers = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
    answer = httpx.post(served.url + CHAT, json=chat("a b"), headers=headers, timeout=60, trust_env=False)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)


@pytest.fixture
def ingress(lonely: Served) -> int:
    """Its process, once it answers."""
    eventually(lambda: httpx.get(f"{lonely.url}/ready", timeout=30, trust_env=False).status_code == 200, 120)
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


def test_requests_that_meet_a_frozen_ingress_end(serve_app_factory: Callable[..., Served]) -> None:
    """They wait until Serve has ended it, which tells their clients to ask again; others go elsewhere before that."""
    config = {
        "model": {"id": "fake"},
        "replica": {"num_cpus": 0.1},
        "ingress": {"num_replicas": 2},
        "metrics": METRICS,
    }
    served = serve_app_factory("icy", config, FAKE_ENGINE)
    # Until then Serve's own proxy stands in for them.
    eventually(lambda: ingresses_up("icy") == 2, 120)
    frozen, _ = replica_pids("icy", "ingress").values()
    os.kill(frozen, signal.SIGSTOP)
    with ThreadPoolExecutor(16) as pool:
        ends = Counter(pool.map(lambda _: ask(served), range(16)))
    # Each within the client's patience.
    assert ends.keys() == {"whole", "503 not_ready retry"}, ends
    eventually(lambda: frozen not in replica_pids("icy", "ingress").values(), 120)
    assert {ask(served) for _ in range(8)} == {"whole"}


def test_serve_makes_no_tasks_of_its_own_for_a_request(served: Served) -> None:
    """The application watches its client itself (tests/cases/test_load.py: one that leaves)."""
    from ray._private.state import actors

    prefix = f"SERVE_REPLICA::{served.name}#ingress#"
    names = [a["Name"] for a in actors().values() if a["State"] == "ALIVE" and a["Name"].startswith(prefix)]
    handles = [ray.get_actor(name, namespace="serve") for name in names]
    body = chat("a delay=0.1 repeat=100", stream=True)
    with httpx.stream("POST", served.url + CHAT, json=body, timeout=60, trust_env=False) as answer:
        next(answer.iter_lines())
        counts = [ray.get(h._get_inflight_direct_ingress_task_counts_for_testing.remote(), timeout=60) for h in handles]
    assert counts and all(count == {"request_tasks": 0, "receive_tasks": 0} for count in counts), counts


def ingresses_up(app: str) -> int:
    """As HAProxy sees them."""
    port = os.environ["RAY_SERVE_HAPROXY_STATS_PORT"]
    page = httpx.get(f"http://127.0.0.1:{port}/stats;csv", timeout=30, trust_env=False).text
    rows = csv.DictReader(page.removeprefix("# ").splitlines())
    return sum(row["status"] == "UP" and f"{app}-ingress" in row["svname"] for row in rows)


def ask(served: Served) -> str:
    """How a short answer ends."""
    answer = httpx.post(served.url + CHAT, json=chat("a b"), timeout=60, trust_env=False)
    if answer.status_code == 200:
        return "whole" if answer.json()["choices"][0]["message"]["content"] == "a b" else answer.text
    retry = " retry" if answer.headers.get("x-should-retry") == "true" else ""
    return f"{answer.status_code} {answer.json()['error']['code']}{retry}"
