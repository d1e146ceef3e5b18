"""Hugging Face ids, against a server that answers like the Hub."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.models.conftest import Sandbox

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ERRORS = {"org/gated": (403, "GatedRepo"), "org/missing": (404, "RepoNotFound"), "org/broken": (500, "")}


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.released = threading.Event()
        self.served: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        for repo, (status, code) in ERRORS.items():
            if repo in self.path:
                return self._send(status, b"{}", {"X-Error-Code": code} if code else {})
        files = {path.name: path.read_bytes() for path in self.server.files.iterdir()}
        path = self.path.partition("?")[0]
        if "org/stalled" in path:
            self.server.released.wait(60)
        elif path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": _oid(d)} for n, d in files.items()]
            return self._send(200, json.dumps(tree).encode())
        elif path.startswith("/api/models/org/tiny"):
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return self._send(200, json.dumps(info).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            self.server.served.append(name)
            return self._send(200, files[name], {"ETag": f'"{_oid(files[name])}"', "X-Repo-Commit": COMMIT})
        return self._send(404, b"{}")

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(sandbox: Sandbox, tmp_path: Path) -> Iterator[Hub]:
    sandbox.run("fetch", "tiny")
    files = tmp_path / "repository"
    shutil.copytree(sandbox.cache / "models/tiny", files)
    (files / "modeling_tiny.py").write_text("raise SystemExit('model code was run')")
    (files / "pytorch_model.bin").write_text("pickle")
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    sandbox.env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
    sandbox.env |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_snapshot_holds_weights_and_no_code(sandbox: Sandbox, hub: Hub) -> None:
    result = sandbox.run("fetch", "org/tiny")
    assert result.returncode == 0, result.stderr
    names = {path.name for path in Path(result.stdout.strip()).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {"modeling_tiny.py", "pytorch_model.bin"} & names


def test_complete_snapshot_serves_when_the_hub_is_away(sandbox: Sandbox, hub: Hub) -> None:
    path = sandbox.run("fetch", "org/tiny").stdout
    sandbox.env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    assert sandbox.run("fetch", "org/tiny").stdout == path


def test_repository_without_a_tokenizer_is_an_error(sandbox: Sandbox, hub: Hub) -> None:
    (hub.files / "tokenizer.json").unlink()
    sandbox.fails("fetch", "org/tiny", says="it lacks a tokenizer")


@pytest.mark.parametrize(
    ("repo", "says"),
    [("org/gated", "gated"), ("org/missing", "no such repository"), ("org/broken", "the Hub answered 500")],
)
def test_refusals(sandbox: Sandbox, hub: Hub, repo: str, says: str) -> None:
    sandbox.fails("fetch", repo, says=says)


def test_hub_that_never_answers(sandbox: Sandbox, hub: Hub) -> None:
    sandbox.fails("fetch", "org/stalled", says="the Hub cannot be reached")


def test_hub_that_refuses_connections(sandbox: Sandbox, hub: Hub) -> None:
    sandbox.env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    sandbox.fails("fetch", "org/other", says="the Hub cannot be reached")


def test_offline(sandbox: Sandbox, hub: Hub) -> None:
    sandbox.env["HF_HUB_OFFLINE"] = "1"
    sandbox.fails("fetch", "org/other", says="HF_HUB_OFFLINE is set")
