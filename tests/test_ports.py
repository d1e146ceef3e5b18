"""Ports for servers that start later: free, different, of their own range, and an error where there are none."""

from __future__ import annotations

import socket

import pytest

from serve_app.ports import ENGINE_PORTS, PROXY_PORTS, free_ports


def test_they_are_different_and_can_be_bound() -> None:
    found = free_ports(ENGINE_PORTS, 50)
    assert len(set(found)) == 50 and set(found) <= set(ENGINE_PORTS)
    with socket.socket() as one:
        one.bind(("", found[0]))


def test_nothing_else_hands_them_out() -> None:
    """Linux gives connections, and servers that name no port, those from 32768 on; Serve gives ingress processes those
    from 30000 on, Ray its workers those up to 19999."""
    assert min(ENGINE_PORTS) >= 20_000 and max(ENGINE_PORTS) < min(PROXY_PORTS) and max(PROXY_PORTS) < 30_000


def test_one_that_is_taken_on_any_address_is_not_free() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_ports(ENGINE_PORTS)[0]))
        taken = other.getsockname()[1]
        with pytest.raises(OSError, match=f"no free port from {taken} to {taken}"):
            free_ports(range(taken, taken + 1))
