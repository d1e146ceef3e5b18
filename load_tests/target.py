"""The server under test: that it is on this machine, what it says about itself, and starting one where there is none.

What this module does not do: stop or change a server that it did not start.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

START_TIMEOUT_S = 300.0
# The server is asked directly, whatever proxy the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class TargetError(Exception):
    """The server may not, or cannot, be tested."""


def check_loopback(url: str) -> str:
    """`url` without a trailing slash. Raises TargetError unless every address of its host is this machine's own."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise TargetError(f"{url} is not an http:// address")
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise TargetError(f"{url}: {error}") from None
    if not all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found):
        raise TargetError(f"{parts.hostname} is not this machine; forward a port of the server to 127.0.0.1")
    return url.rstrip("/")


def ask(url: str, timeout_s: float = 10.0, api_key: str | None = None) -> tuple[int | None, bytes]:
    """Status and body; (None, b"") where nobody answers."""
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        with _DIRECT.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, b""
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return None, b""


def get(url: str, timeout_s: float = 10.0, api_key: str | None = None) -> bytes | None:
    """Body of a 200; None for anything else."""
    status, body = ask(url, timeout_s, api_key)
    return body if status == 200 else None


def get_json(url: str, api_key: str | None = None) -> Any:
    body = get(url, api_key=api_key)
    try:
        return None if body is None else json.loads(body)
    except ValueError:
        return None


def somebody_at(base: str) -> bool:
    """Whether a server answers there, whatever it says: to load another one in its place would be a surprise."""
    return ask(f"{base}/health")[0] is not None


def model_of(base: str, api_key: str | None = None) -> str:
    """The id of the first model that is served. Raises TargetError."""
    status, body = ask(f"{base}/v1/models", api_key=api_key)
    if status == 401:
        raise TargetError(f"{base}: 401: " + ("it does not know the key of --api-key" if api_key else "give --api-key"))
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (TypeError, KeyError, IndexError, ValueError):
        raise TargetError(f"{base} does not answer GET /v1/models") from None


def facts(base: str, api_key: str | None = None) -> dict[str, Any]:
    """What makes two reports comparable, or not: versions, commit, machine, and the server's own word."""
    return {
        "server": get_json(f"{base}/server_info", api_key),
        "version": (get_json(f"{base}/version") or {}).get("version"),
        "commit": _commit(),
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
    }


def _commit() -> str | None:
    """Of the checkout this runs from; `+` marks uncommitted changes."""

    def git(*arguments: str) -> str:
        where = Path(__file__).resolve().parent
        return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def free_port() -> int:
    """A port that nothing listens on, from below those that the system hands out by itself and those from 30000 on
    that Serve's ingress processes take: a server that takes a while to start must not find it taken by another's
    outgoing connection or by a port asked for as 0."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def started(port: int | None = None, env: dict[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """The laptop application on a port of this machine, for the time of the context: (address, process id).

    Raises:
        TargetError: with the end of its log, when it does not become ready.
    """
    port = port or free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "serve_app.launch", "--port", str(port)],
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})},
        )  # fmt: skip
        try:
            end = time.monotonic() + START_TIMEOUT_S
            while get(f"{base}/ready", 60) is None:
                if child.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise TargetError(f"the server did not start:\n{log.read()[-3000:].decode(errors='replace')}")
                time.sleep(0.5)
            yield base, child.pid
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(90)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
