"""Times of bytes are the kernel's, whatever kept the client from reading."""

import socket
import struct
import sys
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("gevent", reason="needs the extra `load`")

from load_tests.stamps import CURRENT, SO_TIMESTAMPNS, Stamps, TimedSocket, arrival, stamping

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's stamps are Linux's")


def message(age_s: float) -> list[tuple[int, int, bytes]]:
    at = time.time() - age_s
    return [(socket.SOL_SOCKET, SO_TIMESTAMPNS or 0, struct.pack("@ll", int(at), int(at % 1 * 1e9)))]


@linux
def test_a_stamp_is_told_on_the_monotonic_clock() -> None:
    assert arrival(message(5.0), 0.0) == pytest.approx(time.perf_counter() - 5.0, abs=4.0)


@linux
def test_a_clock_that_was_set_meanwhile_cannot_reorder_events() -> None:
    sent = time.perf_counter()
    assert arrival(message(3600.0), sent) == sent
    assert arrival(message(-3600.0), sent) <= time.perf_counter()


def test_without_a_stamp_the_time_of_reading_counts() -> None:
    begin = time.perf_counter()
    assert begin <= arrival([], 0.0) <= time.perf_counter()


@pytest.fixture
def pair() -> Iterator[tuple[TimedSocket, socket.socket]]:
    """A client that keeps stamps, and the server's end of its connection."""
    CURRENT.set(Stamps())
    with socket.create_server(("127.0.0.1", 0)) as door, TimedSocket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.connect(door.getsockname())
        server, _ = door.accept()
        with server:
            yield client, server


@linux
def test_the_kernel_stamps_once_it_was_asked_and_waited_for() -> None:
    assert stamping()
    for _ in range(3):
        # All other sockets that ask are closed by then: it must not stop.
        time.sleep(0.1)
        with socket.create_server(("127.0.0.1", 0)) as door, TimedSocket(socket.AF_INET, socket.SOCK_STREAM) as client:
            client.connect(door.getsockname())
            server, _ = door.accept()
            with server:
                server.sendall(b"x")
                assert client.recvmsg(1, 100)[1]


@linux
def test_what_is_read_late_came_when_it_came(pair: tuple[TimedSocket, socket.socket]) -> None:
    assert stamping()
    client, server = pair
    server.sendall(b"late")
    time.sleep(0.3)
    read_at = time.perf_counter()
    assert client.recv(100) == b"late"
    received = CURRENT.get().received
    # Without the kernel's stamp it could only be later.
    assert received is not None and received < read_at


def test_connecting_is_told_apart_from_the_request(pair: tuple[TimedSocket, socket.socket]) -> None:
    client, server = pair
    before = time.perf_counter()
    client.sendall(b"request")
    stamps = CURRENT.get()
    assert stamps.connect_s is not None and stamps.connect_s >= 0
    assert stamps.sent is not None and before <= stamps.sent <= time.perf_counter()
    assert server.recv(100) == b"request"
