"""Serve's HAProxy on nodes with nothing but a network in common (`netns_haproxy`)."""

import os
from typing import Any

import pytest

from serve_app import proxy
from tests import netns
from tests.conftest import full_only, scenarios

FOUND = proxy.choose("auto", {**os.environ, proxy.ENABLED: "1"})

pytestmark = [
    full_only,
    pytest.mark.timeout(620),
    pytest.mark.skipif(FOUND.binary is None, reason=f"HAProxy cannot be used: {FOUND.why}"),
    pytest.mark.skipif(not netns.available(), reason="needs root and network namespaces"),
]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    wanted = ["crowded", "told", "replica_killed", "manager_killed", "rolled"]
    return scenarios("tests.netns_haproxy", wanted, 580, **proxy.switches(FOUND, 600))


@pytest.fixture(scope="module")
def lost() -> dict[str, Any]:
    """On another cluster, where no two ingresses share a node."""
    wanted = ["alone", "ingress_killed", "drained", "unplugged"]
    return scenarios("tests.netns_haproxy", wanted, 580, **proxy.switches(FOUND, 600))


def test_every_nodes_haproxy_answers(seen: dict[str, Any]) -> None:
    placed, hosts = seen["placed"], ["head", "g1", "g2"]
    assert placed["replicas"] == ["g1", "g2"]
    assert placed["served"] == dict.fromkeys(hosts, True)
    assert placed["listeners"] == dict.fromkeys(hosts, "haproxy")


def test_every_node_speaks_as_the_application_does(seen: dict[str, Any]) -> None:
    assert set(map(tuple, seen["told"]["hosts"].values())) == {("invalid_request_error", 200, 200)}


def test_streams_outlive_a_replica(seen: dict[str, Any]) -> None:
    assert seen["replica_killed"]["answers"] == {"whole": 30} and seen["replica_killed"]["healed"]


def test_a_lost_ingress_is_its_own_nodes_loss(lost: dict[str, Any]) -> None:
    """No client of another node depends on it, and its own node's are answered by others from then on."""
    found = lost["ingress_killed"]
    assert (found["hung"], found["elsewhere"], found["later"]) == (0, {"whole": 10}, {"whole": 10})
    assert found["healed"]


def test_a_lost_haproxy_comes_back(seen: dict[str, Any]) -> None:
    found = seen["manager_killed"]
    assert (found["hung"], found["again"], found["back"]) == (0, True, True)


def test_a_changed_configuration_fails_no_request(seen: dict[str, Any]) -> None:
    assert seen["rolled"]["done"] and set(seen["rolled"]["answers"]) == {"whole"}


def test_a_drained_node_fails_no_request(lost: dict[str, Any]) -> None:
    """Neither those that came through its own HAProxy, which says that it goes and ends before the node does."""
    found = lost["drained"]
    assert (found["code"], found["told"], found["left"]) == (0, True, "")
    assert found["through"] == {"whole": 5} and set(found["answers"]) == {"whole"} and found["moved"]


def test_streams_outlive_a_node_that_nothing_reaches_any_more(lost: dict[str, Any]) -> None:
    assert lost["unplugged"]["answers"] == {"whole": 30} and lost["unplugged"]["asked"] == {"whole": 10}
