"""What the launcher does besides `serve run`; the whole of it runs in test_laptop."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from ray import serve
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus

from serve_app import launch
from serve_app.config import load_config
from serve_app.errors import ConfigError
from tests.conftest import ROOT, free_port


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


MISSING = [
    ({"DDTREE_MODEL__SOURCE": "nope"}, "model.source: 'nope' is neither a known model"),
    ({"DDTREE_MODEL__SOURCE": "/no/such"}, "model.source: /no/such does not exist"),
]
if not torch.cuda.is_available():
    MISSING.append(({"DDTREE_MODEL__DEVICE": "cuda"}, "model.device is cuda, but torch sees no CUDA device"))
if importlib.util.find_spec("sglang") is None:
    MISSING.append(({"DDTREE_ENGINE__KIND": "sglang"}, "engine.kind sglang: sglang is not installed"))


def launched(port: int, **env: str) -> subprocess.CompletedProcess[str]:
    """The launcher's end, where nothing is to be started."""
    command = [sys.executable, "-m", "serve_app.launch", "--proxy", "serve", "--port", str(port)]
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(command, env={**kept, **env}, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("env", "says"), MISSING)
def test_what_this_machine_lacks_is_told_before_anything_starts(env: dict[str, str], says: str) -> None:
    done = launched(free_port(), **env)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith(f"error: {says}")


def test_another_clusters_machines_are_not_this_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launched(port, DDTREE_MODEL__SOURCE="/no/such", RAY_ADDRESS="127.0.0.1:9")
    assert done.returncode == 1 and "cannot listen on" in done.stderr


def status(**messages: tuple[str, str]) -> ServeStatus:
    deployments = {
        name: DeploymentStatusOverview(
            status=said, status_trigger="REPLICA_STARTUP_FAILED", replica_states={}, message=message
        )
        for name, (said, message) in messages.items()
    }
    application = ApplicationStatusOverview(
        status="DEPLOY_FAILED", message="", last_deployed_time_s=0, deployments=deployments
    )
    return ServeStatus(applications={launch.APP_NAME: application})


def test_the_cause_is_the_end_of_what_a_constructor_raised() -> None:
    trace = "The deployment failed to start. Error:\nTraceback:\n  in start\nserve_app.errors.ConfigError: no disk\n"
    failed = status(exporters=("HEALTHY", "is well"), engine=("DEPLOY_FAILED", trace))
    assert launch._cause(failed, "other") == "deployment engine: serve_app.errors.ConfigError: no disk"


@pytest.mark.parametrize(
    "known", [None, ServeStatus(), status(engine=("UPDATING", "waits"), ingress=("DEPLOY_FAILED", " "))]
)
def test_without_a_deployments_word_the_cause_is_what_was_raised(known: ServeStatus | None) -> None:
    assert launch._cause(known, "other") == "other"


def test_the_line_to_try_sends_a_key_where_one_is_needed() -> None:
    key = {"name": "a", "hash": "sha256:" + "0" * 64}
    open_one, keyed = (load_config({"admission": {"keys": keys}}, use_env=False) for keys in ([], [key]))
    assert "Authorization" not in launch._example("http://h:1", open_one)
    line = launch._example("http://h:1", keyed)
    assert ' -H "Authorization: Bearer $KEY" ' in line
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == keyed.model.id


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(launch, "_ending", threading.Event())
    yield launch._ending


@pytest.fixture
def signals(ending: threading.Event, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a drain, which has nothing to delete, sends to the main thread."""
    sent: list[int] = []
    monkeypatch.setattr(serve, "delete", lambda name: None)
    monkeypatch.setattr(launch.signal, "pthread_kill", lambda thread, number: sent.append(number))
    return sent


def test_the_shutdown_that_a_second_signal_begins_is_not_interrupted(signals: list[int]) -> None:
    """Neither by the end of the drain, which no longer waits for anything, nor by a third."""
    with pytest.raises(KeyboardInterrupt):
        launch._interrupt()
    launch._drain()
    launch._interrupt()
    assert not signals


def test_the_end_of_the_drain_begins_the_shutdown(ending: threading.Event, signals: list[int]) -> None:
    launch._drain()
    assert signals == [launch.signal.SIGTERM] and not ending.is_set()


def test_a_drain_that_nobody_reads_of_ends_all_the_same(signals: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:  # as a pipe that nobody holds the other end of
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            launch._drain()
        with contextlib.suppress(OSError):
            full.close()
    assert signals == [launch.signal.SIGTERM]


def test_whoever_reads_may_leave_at_any_time() -> None:
    """Its lines are for people; the exit code says whether it failed."""
    code = "from serve_app.launch import _say; _say('In front'); _say('Stopped.')"
    command = [sys.executable, "-c", code]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_signal_before_there_is_anything_to_drain_raises_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised inside an import of Ray's it was swallowed, or left logging's lock taken, so that nothing stopped it."""
    monkeypatch.setattr(launch, "_stopping", threading.Event())
    handlers: list[object] = []
    monkeypatch.setattr(launch, "_on_stop", handlers.append)
    launch._check_stop()
    launch._stop_soon()
    assert handlers == [launch._interrupt]
    with pytest.raises(KeyboardInterrupt):
        launch._check_stop()


def test_a_stop_while_ray_starts_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has a handler of its own then, which ends the process with the signal's number."""
    import ray

    def ends(**_: object) -> None:
        raise SystemExit(signal.SIGTERM)

    monkeypatch.setattr(launch, "_on_stop", lambda handler: None)
    monkeypatch.setattr(ray, "init", ends)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(launch, "_ending", threading.Event())
    assert launch._serve("127.0.0.1", 8000, load_config(use_env=False)) is None
