"""The served application's tests once more, behind Serve's HAProxy: Serve reads its switches when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from load_tests.target import free_port
from serve_app import proxy
from tests.conftest import FULL, PROXY, ROOT, eventually

FOUND = proxy.choose("auto", {**os.environ, proxy.ENABLED: "1"})
QUICK = ["tests/test_served.py", "tests/behind_haproxy.py"]
ALL = [*QUICK, "tests/channel/test_served.py", "tests/cases", "tests/test_lifecycle.py", "tests/test_failover.py"]

pytestmark = [
    pytest.mark.skipif(FOUND.binary is None, reason=f"HAProxy cannot be used: {FOUND.why}"),
    pytest.mark.skipif(PROXY == "haproxy", reason="it runs behind HAProxy already"),
    pytest.mark.timeout(1500),
]


def test_what_holds_behind_serves_proxy_holds_behind_haproxy() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(ALL if FULL else QUICK)]
    env = {**os.environ, "TEST_PROXY": "haproxy"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1480, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


# As Serve writes it, as far as paths are concerned.
CONFIGURATION = """\
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend http_frontend
    bind 127.0.0.1:{port}
{applications}
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found."
backend there
    http-request return status 200 content-type text/plain string "there"
"""
ONE = "    use_backend there if { path_beg /there }"


@pytest.mark.parametrize(
    ("applications", "status", "code", "retry"), [("", 503, "not_ready", "true"), (ONE, 404, "not_found", "false")]
)
def test_a_path_of_no_application_is_told_in_openais_shape(
    tmp_path: Path, applications: str, status: int, code: str, retry: str
) -> None:
    port, file = free_port(), tmp_path / "haproxy.cfg"
    file.write_text(CONFIGURATION.format(port=port, applications=applications))
    command = [str(proxy.SCRIPT), "-db", "-f", str(file)]
    process = subprocess.Popen(command, env={**os.environ, proxy.STARTED: str(FOUND.binary)})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            eventually(lambda: answers(client))
            answer = client.post("/v1/chat/completions", json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert answer.headers["x-should-retry"] == retry
            assert client.get("/there").status_code == (200 if applications else 503)
    finally:
        process.terminate()
        process.wait(timeout=60)


def answers(client: httpx.Client) -> bool:
    try:
        return bool(client.get("/").status_code)
    except httpx.TransportError:
        return False
