"""Which proxy is chosen, and what HAProxy is made to say."""

import json
import os
import select
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests.target import free_port
from serve_app import proxy
from serve_app.errors import ConfigError, InvalidRequest, NotReady
from serve_app.launch import SERVE_SWITCHES
from serve_app.ports import PROXY_PORTS
from serve_app.proxy.__main__ import main as link_into
from tests.conftest import eventually


def fake_haproxy(directory: Path, says: str) -> str:
    path = directory / "haproxy"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("says", ["HAProxy version 2.6.12-1+deb12u4 2025/10/03", "HAProxy version 3.1.0-abc"])
def test_auto_takes_a_haproxy_that_is_new_enough(tmp_path: Path, says: str) -> None:
    binary = fake_haproxy(tmp_path, says)
    choice = proxy.choose("auto", {proxy.BINARY: binary})
    assert choice.binary == binary and says.split()[2].split("-")[0] in choice.why


@pytest.mark.parametrize("says", ["HA-Proxy version 1.8.27", "HAProxy version 2.4.1", "hello"])
def test_an_old_one_is_not_taken(tmp_path: Path, says: str) -> None:
    env = {proxy.BINARY: fake_haproxy(tmp_path, says)}
    choice = proxy.choose("auto", env)
    assert choice.binary is None and "2.6" in choice.why
    with pytest.raises(ConfigError, match=r"2\.6"):
        proxy.choose("haproxy", env)


def test_without_one_it_is_serves_own(tmp_path: Path) -> None:
    env = {proxy.BINARY: str(tmp_path / "none")}
    assert proxy.choose("auto", env).binary is None
    with pytest.raises(ConfigError):
        proxy.choose("haproxy", env)


def test_an_environment_that_says_no_is_obeyed(tmp_path: Path) -> None:
    env = {proxy.BINARY: fake_haproxy(tmp_path, "HAProxy version 2.8.25"), proxy.ENABLED: "0"}
    assert proxy.choose("auto", env).binary is None
    assert proxy.choose("haproxy", env).binary == env[proxy.BINARY]
    assert proxy.choose("serve", {**env, proxy.ENABLED: "1"}).binary is None


def test_the_script_does_not_take_itself_for_haproxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "ddtree-haproxy"
    link.symlink_to(proxy.SCRIPT)
    for named in (str(proxy.SCRIPT), str(link)):
        # The package's finder reads the process's own environment.
        monkeypatch.setenv(proxy.BINARY, named)
        assert proxy.find({proxy.BINARY: named, "PATH": ""}) not in (str(proxy.SCRIPT), str(link))
        assert proxy.find({proxy.BINARY: named, proxy.STARTED: "/x/haproxy"}) == "/x/haproxy"


def test_a_clusters_nodes_name_it_by_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: a release's directory may be linked again."""
    binary = fake_haproxy(tmp_path, "HAProxy version 2.8.25")
    monkeypatch.setenv(proxy.BINARY, binary)
    where = tmp_path / "bin"
    where.mkdir()
    for _ in range(2):
        assert link_into([str(where)]) == 0
    assert {path.name: path.resolve() for path in where.iterdir()} == {
        "ddtree-haproxy": proxy.SCRIPT,
        "haproxy": Path(binary),
    }
    # Through the links, it starts the PATH's.
    said = subprocess.run(
        ["ddtree-haproxy", "-v"], env={"PATH": f"{where}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert said.stdout.startswith("HAProxy version")


def test_no_link_is_made_to_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(proxy.BINARY, str(tmp_path / "none"))
    assert link_into([str(tmp_path)]) == 1 and not list(tmp_path.iterdir())


def test_long_answers_outlive_a_reload() -> None:
    found = proxy.switches(proxy.Choice("/x/haproxy", ""), 600)
    assert int(found["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > 600
    assert not found.keys() & SERVE_SWITCHES.keys()


def test_clients_that_say_nothing_cannot_hold_all_places() -> None:
    """Serve's own value is an hour, for a body that never comes too, and after the answer that refused it."""
    assert int(proxy.switches(proxy.Choice("/x/haproxy", ""), 600)["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"]) <= 60


def test_applications_beside_each_other_share_no_port() -> None:
    """Serve's listeners let others have their port: requests of one application would reach the other."""
    ports = [
        value
        for found in (proxy.local_switches("/x", "127.0.0.1"), proxy.local_switches("/y", "127.0.0.1"))
        for name, value in found.items()
        if name.endswith("_PORT")
    ]
    assert len(ports) == len(set(ports)) == 6
    # Nor with whatever asks the system for one before HAProxy starts.
    assert all(int(port) in PROXY_PORTS for port in ports)
    assert "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT" in proxy.local_switches("/x", "127.0.0.1")


def test_the_script_can_be_run() -> None:
    assert proxy.SCRIPT.stat().st_mode & stat.S_IXUSR
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(proxy.SCRIPT)], check=True, timeout=60)


WRITTEN = """\
defaults
    mode http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind *:8000
backend app
    server a 10.0.0.11:30000
listen stats
  bind *:8404
"""


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_the_script_changes_what_serve_wrote(tmp_path: Path, host: str) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(WRITTEN)
    (tmp_path / "500.http").write_text("plain text")
    env = {**os.environ, "HAPROXY_BINARY": fake_haproxy(tmp_path, "$@"), "HAPROXY_PAGES_HOST": host}
    (tmp_path / "haproxy").write_text('#!/bin/sh\nprintf "%s " "$@"\n')
    said = subprocess.run(
        [proxy.SCRIPT, "-db", "-f", config, "-sf", "1"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.split() == ["-db", "-f", str(config), "-sf", "1"]
    lines = [line.strip() for line in config.read_text().splitlines()]
    # Right behind the section's name, so that Serve's own lines win.
    assert lines[0] == "defaults" and lines[1] == "timeout http-request 30s"
    assert lines.index("timeout check 2s") < lines.index("option srvtcpka") < lines.index("mode http")
    # The service's own line, which may look like that of a page, stays.
    binds = [line.split()[1] for line in lines if line.startswith("bind ")]
    assert binds == [f"{host}:9101", "*:8000", f"{host or '*'}:8404"]
    head, _, body = (tmp_path / "500.http").read_bytes().partition(b"\r\n\r\n")
    error = NotReady("No process of the service answers.", retry_after=1)
    status, *headers = head.decode().split("\r\n")
    assert status.split()[1] == str(error.status)
    found = dict(line.split(": ") for line in headers)
    assert found.items() >= error.headers().items()
    assert int(found["content-length"]) == len(body) and b'"code":"not_ready"' in body


BACKENDS = """\
backend default_backend
    http-request return status 404
backend near
    option httpchk GET /-/healthz
    server own 127.0.0.1:30000 check on-error mark-down
    server other 10.0.0.12:30000 check on-error mark-down
    server fallback 127.0.0.1:8500 check backup
backend far
    server other 10.0.0.12:30000 check on-error mark-down
    server fallback 10.0.0.10:8500 check backup
listen stats
  bind *:8404
"""


def test_a_nodes_own_ingresses_come_first(tmp_path: Path) -> None:
    """The others' are reserves beside Serve's own proxy, where there are any of its own."""
    config = tmp_path / "haproxy.cfg"
    config.write_text(BACKENDS)
    env = {**os.environ, "HAPROXY_BINARY": fake_haproxy(tmp_path, "")}
    subprocess.run([proxy.SCRIPT, "-f", config], env=env, capture_output=True, timeout=60, check=True)
    sections = config.read_text().split("backend ")
    near, far = (next(text for text in sections if text.startswith(name)) for name in ("near", "far"))
    servers = [line.split() for line in near.splitlines() if line.startswith("    server")]
    assert {words[1]: words[-1] == "backup" for words in servers} == {"own": False, "other": True, "fallback": True}
    assert "option allbackups" in near
    assert f"backend {far}" in BACKENDS


def test_haproxy_takes_what_the_script_writes(tmp_path: Path) -> None:
    choice = proxy.choose("auto", {**os.environ, proxy.ENABLED: "1"})
    if choice.binary is None:
        pytest.skip(choice.why)
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n    timeout server 5s\n"
        "frontend http_frontend\n    bind 127.0.0.1:8000\n    default_backend app\nbackend app\n"
        "    server a 127.0.0.1:9 check\n"
    )
    env = {**os.environ, "HAPROXY_BINARY": choice.binary}
    done = subprocess.run(
        [proxy.SCRIPT, "-c", "-f", config], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr


# As Serve writes it, as far as it matters here.
REQUESTS_PART = """\
defaults
    mode http
    timeout connect 60s
    timeout client 60s
    timeout server 60s
    option abortonclose
    option splice-request
    option splice-response
    errorfile 502 {directory}/500.http
frontend http_frontend
    bind 127.0.0.1:{front}
    default_backend app
backend app
    http-reuse always
    server a 127.0.0.1:{back}
"""
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n", b"hello"


@pytest.fixture
def before_one_ingress(tmp_path: Path) -> Iterator[tuple[int, socket.socket]]:
    """HAProxy's port, and the listening socket that it takes for an ingress."""
    choice = proxy.choose("auto", {**os.environ, proxy.ENABLED: "1"})
    if choice.binary is None:
        pytest.skip(choice.why)
    front = free_port()
    with socket.create_server(("127.0.0.1", 0)) as ingress:
        ingress.settimeout(60)
        config = tmp_path / "haproxy.cfg"
        config.write_text(REQUESTS_PART.format(front=front, back=ingress.getsockname()[1], directory=tmp_path))
        haproxy = subprocess.Popen(
            [proxy.SCRIPT, "-db", "-f", config], env={**os.environ, "HAPROXY_BINARY": choice.binary},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            eventually(lambda: _connects(front), 60)
            yield front, ingress
        finally:
            haproxy.kill()
            haproxy.wait(60)


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "then"),
    [(b"".join(POST), None), (CHUNKED + b"5\r\nhello\r\n", b"no length\r\n")],
    ids=["closed", "malformed chunk"],
)
def test_a_request_that_breaks_off_is_told_in_openais_shape(
    before_one_ingress: tuple[int, socket.socket], sent: bytes, then: bytes | None
) -> None:
    front, ingress = before_one_ingress
    with socket.create_connection(("127.0.0.1", front), 60) as client:
        client.sendall(sent)
        with _taken(ingress, sent[-4:]):
            if then is None:
                client.shutdown(socket.SHUT_WR)
            else:
                client.sendall(then)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and f"content-length: {len(body)}".encode() in head.split(b"\r\n")
    assert json.loads(body) == InvalidRequest(json.loads(body)["error"]["message"]).body()


def test_a_client_whose_body_came_apart_from_its_head_is_seen_to_leave(
    before_one_ingress: tuple[int, socket.socket],
) -> None:
    """Most libraries send it so. Spliced, HAProxy looked at the client no more until the answer came."""
    front, ingress = before_one_ingress
    head, body = POST
    with socket.create_connection(("127.0.0.1", front), 60) as client:
        client.sendall(head)
        request = _taken(ingress, head[-4:])
        client.sendall(body)
        _read_until(request, body)
    with request:
        assert _ends(request)


def test_a_first_request_is_answered_though_its_ingress_is_lost(
    before_one_ingress: tuple[int, socket.socket],
) -> None:
    """Over an ingress's connection that another client had used, it was closed without an answer."""
    front, ingress = before_one_ingress
    with socket.create_connection(("127.0.0.1", front), 60) as other:
        other.sendall(b"".join(POST))
        kept = _taken(ingress, POST[1])
        kept.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        _read_until(other, b"ok")
    with kept, socket.create_connection(("127.0.0.1", front), 60) as client:
        client.sendall(b"".join(POST))
        readable, _, _ = select.select([kept, ingress], [], [], 60)
        lost = _taken(ingress, POST[1]) if ingress in readable else kept
        lost.close()
        assert client.recv(4096).startswith(b"HTTP/1.1 503 ")


def _taken(ingress: socket.socket, end: bytes) -> socket.socket:
    """The connection of a request, once it has come so far."""
    request, _ = ingress.accept()
    request.settimeout(60)
    _read_until(request, end)
    return request


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _read_until(connection: socket.socket, end: bytes) -> None:
    read = b""
    while not read.endswith(end):
        more = connection.recv(4096)
        assert more, read
        read += more


def _ends(connection: socket.socket) -> bool:
    """However HAProxy says it."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
