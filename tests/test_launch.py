"""What the launcher does besides `serve run`; the whole of it runs in test_laptop."""

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from ray import serve

from serve_app import launch
from serve_app.errors import ConfigError


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_readiness_is_asked_past_the_environments_proxy() -> None:
    server = HTTPServer(("127.0.0.1", 0), Ready)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        code = f"import sys; from serve_app.launch import _ready; sys.exit(not _ready('http://127.0.0.1:{server.server_port}'))"
        env = {"PATH": "", "PYTHONPATH": ":".join(sys.path), "http_proxy": "http://127.0.0.1:9"}
        assert subprocess.run([sys.executable, "-c", code], env=env, timeout=120, check=False).returncode == 0
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_switches_are_printed_for_a_shell() -> None:
    from serve_app.launch import SERVE_SWITCHES

    done = subprocess.run(
        [sys.executable, "-m", "serve_app.launch", "--switches"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == [f"export {name}={value}" for name, value in SERVE_SWITCHES.items()]


def test_the_proxys_switches_are_printed_where_they_are_asked_for() -> None:
    """A cluster's nodes need the same: what one of them has does not decide."""
    from serve_app.launch import SERVE_SWITCHES

    command = [sys.executable, "-m", "serve_app.launch", "--proxy", "serve", "--switches"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    more = done.stdout.splitlines()[len(SERVE_SWITCHES) :]
    assert more == ["export RAY_SERVE_ENABLE_HA_PROXY=0"]


def test_an_ipv6_address_is_served_by_serves_proxy() -> None:
    """Whatever HAProxy is there: it would look for the ingress processes at an IPv4 address."""
    assert launch._choose("auto", "::1").binary is None
    assert launch._choose("serve", "::1").binary is None
    with pytest.raises(ConfigError, match="--host is ::1"):
        launch._choose("haproxy", "::1")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_told_with_its_address(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as taken:
        try:
            taken.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no {host} here: {error}")
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=re.escape(f"{launch._in_url(host)}:{port}")):
            launch._check_port(host, port)
    launch._check_port(host, port)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(launch, "_ending", threading.Event())
    yield launch._ending


def test_the_shutdown_that_a_second_signal_begins_is_not_interrupted(
    ending: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the end of the drain, which no longer waits for anything, nor by a third."""
    signals: list[int] = []
    monkeypatch.setattr(serve, "delete", lambda name: None)
    monkeypatch.setattr(launch.signal, "pthread_kill", lambda thread, number: signals.append(number))
    with pytest.raises(KeyboardInterrupt):
        launch._interrupt()
    launch._drain()
    launch._interrupt()
    assert not signals


def test_the_end_of_the_drain_begins_the_shutdown(ending: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(serve, "delete", lambda name: None)
    monkeypatch.setattr(launch.signal, "pthread_kill", lambda thread, number: signals.append(number))
    launch._drain()
    assert signals == [launch.signal.SIGTERM] and not ending.is_set()
