"""The served application's tests once more, behind Serve's HAProxy: Serve reads its switches when it is imported."""

import os
import subprocess
import sys

import pytest

from serve_app import proxy
from tests.conftest import FULL, PROXY, ROOT

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
