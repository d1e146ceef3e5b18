"""The load balancer's and the firewall's files: valid, and what they let through."""

from __future__ import annotations

import http.server
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import SOON_S, eventually, free_port
from tests.deploy.configs import BARE_METAL, DEPLOY, config_of, read
from tests.deploy.test_bare_metal import tool

METAL = DEPLOY / "bare-metal"
BALANCER = (METAL / "haproxy.cfg").read_text()


class Node(http.server.BaseHTTPRequestHandler):
    """A node behind the balancer. `ready`, `alive`: what its /ready and /-/healthz say; `port`: where it listens;
    `read`: the client has the first piece."""

    ready, alive, port = 200, 200, 0
    read = threading.Event()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response({"/ready": self.ready, "/-/healthz": self.alive}.get(self.path, 200))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """Two chunks, the second once the first has been read."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (b"first", b"second"):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
            self.read.wait(SOON_S)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[type[Node]]]:
    """Two nodes on ports of their own."""
    kinds = [type("One", (Node,), {}), type("Two", (Node,), {})]
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in kinds]
    for kind, server in zip(kinds, servers, strict=True):
        kind.port = int(server.server_address[1])
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kinds
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def balancer(nodes: list[type[Node]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """HAProxy with the shipped file, but for its certificate and addresses."""
    haproxy, directory = tool("haproxy"), tmp_path_factory.mktemp("haproxy")
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    subprocess.run([tool("openssl"), *made, "-keyout", "key.pem", "-out", "cert.pem"], cwd=directory,
                   capture_output=True, check=True)  # fmt: skip
    (directory / "ddtree.pem").write_text((directory / "key.pem").read_text() + (directory / "cert.pem").read_text())
    port, text = free_port(), BALANCER
    for there, here in (
        ("/etc/haproxy/ddtree.pem", f"{directory}/ddtree.pem"), ("bind :443", f"bind 127.0.0.1:{port}"),
        ("inter 5s", "inter 200ms"),
        *((f"10.0.0.{n}:8000", f"127.0.0.1:{kind.port}") for n, kind in zip((11, 12), nodes, strict=True)),
    ):  # fmt: skip
        assert text.count(there) == 1, there
        text = text.replace(there, here)
    (directory / "haproxy.cfg").write_text(text)
    check = subprocess.run([haproxy, "-c", "-f", "haproxy.cfg"], cwd=directory, capture_output=True, text=True,
                           timeout=60, check=False)  # fmt: skip
    assert check.returncode == 0 and "WARNING" not in check.stderr, check.stderr
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([haproxy, "-f", "haproxy.cfg"], cwd=directory, stdout=log, stderr=log)
    trusted = ssl.create_default_context(cafile=str(directory / "cert.pem"))
    try:
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=30, trust_env=False) as client:
            eventually(lambda: status(client) == 200)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)


def status(client: httpx.Client, path: str = "/ready") -> int:
    """0 while nothing listens."""
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.parametrize(("path", "passes"), [
    ("/ready", True), ("/v1/models", True), ("/metrics", False), ("/-/prometheus/targets", False),
    ("/-/healthz", False), ("/server_info", False), ("/tokenize", False), ("/docs", False), ("/health", False),
])  # fmt: skip
def test_the_api_alone_is_passed(balancer: httpx.Client, path: str, passes: bool) -> None:
    assert (status(balancer, path) == 200) is passes


def test_a_streams_pieces_are_passed_as_they_come(balancer: httpx.Client) -> None:
    with balancer.stream("POST", "/v1/chat/completions", content=b"{}") as answer:
        pieces = answer.iter_raw()
        first = next(pieces)
        Node.read.set()
        assert (first, b"".join(pieces)) == (b"first", b"second")


@pytest.mark.parametrize("said", ["ready", "alive"])
def test_a_node_that_is_not_ready_or_about_to_go_gets_nothing(
    balancer: httpx.Client, nodes: list[type[Node]], said: str
) -> None:
    """One that is about to go is ready all the while: the engines elsewhere are."""
    one, two = nodes
    for node in nodes:
        setattr(node, said, 503)
    try:
        # By the balancer itself: nodes say 200 to this.
        eventually(lambda: status(balancer, "/v1/models") == 503)
        setattr(two, said, 200)
        eventually(lambda: status(balancer, "/v1/models") == 200)
        assert {status(balancer) for _ in range(10)} == {200}
    finally:
        setattr(one, said, 200)
        setattr(two, said, 200)


def test_the_balancer_waits_longer_than_any_answer_takes() -> None:
    longest = max(config_of(read(path)).ingress.request_timeout_s for path in BARE_METAL.values())
    waits = dict(re.findall(r"timeout (client|server) (\d+)s", BALANCER))
    assert set(waits) == {"client", "server"} and min(map(int, waits.values())) > longest


def test_nftables_takes_the_firewall() -> None:
    """Checked in a network of its own, where nothing is changed either."""
    command = [tool("unshare"), "--user", "--map-root-user", "--net", tool("nft"), "-c", "-f", METAL / "firewall.nft"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare:" in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def test_the_firewall_has_the_pages_ports() -> None:
    """Rows of the table that name somebody outside the cluster."""
    page = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    rows = re.findall(r"^\| ([0-9, -]+) \| [^|]* \| ([^|]*) \|$", page, re.MULTILINE)
    rules = dict(re.findall(r"ip saddr \$(\w+) tcp dport (.*) accept", (METAL / "firewall.nft").read_text()))
    for who, name in (("load balancer", "BALANCERS"), ("Prometheus", "PROMETHEUS")):
        wanted = {port for ports, reached in rows if who in reached for port in ports.split(", ")}
        assert wanted and set(re.findall(r"[\d-]+", rules[name])) == wanted
    assert rules["NODES"] == "!= 10001"
