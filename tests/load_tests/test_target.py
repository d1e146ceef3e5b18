"""What is asked of a server before it is loaded: whether it is there, and what it says of itself."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from load_tests.__main__ import _config, _parser, _server
from load_tests.target import TargetError, facts, model_of, somebody_at

NOBODY = "http://127.0.0.1:9"
PAGES = {"/v1/models": b'{"data": [{"id": "m"}]}', "/server_info": b'{"model": "m"}'}


class Keyed(BaseHTTPRequestHandler):
    """Answers those who have the key; has no /health at all."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer sk-1"
        self.send_response(404 if self.path not in PAGES else 200 if known else 401)
        self.end_headers()
        self.wfile.write(PAGES.get(self.path, b"") if known else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def keyed() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Keyed) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_key_reaches_what_is_asked_first(keyed: str) -> None:
    assert model_of(keyed, "sk-1") == "m"
    assert facts(keyed, "sk-1")["server"] == {"model": "m"}


def test_a_missing_and_a_wrong_key_are_told_apart(keyed: str) -> None:
    with pytest.raises(TargetError, match="401: give --api-key"):
        model_of(keyed)
    with pytest.raises(TargetError, match="401: it does not know"):
        model_of(keyed, "sk-2")


def test_whoever_answers_is_there(keyed: str) -> None:
    """No server is started in the place of one that refuses, or that has other routes."""
    assert somebody_at(keyed) and not somebody_at(NOBODY)
    with _server(keyed, start=True) as base:
        assert base == keyed


def test_a_report_has_the_address_of_the_server_that_was_loaded() -> None:
    options = _parser().parse_args(["run", "--start", "--api-key", "sk-1"])
    config = _config(options, {"chat": 1.0}, "http://127.0.0.1:23456")
    assert config["url"] == "http://127.0.0.1:23456"
    assert "sk-1" not in map(str, config.values())
