"""Nodes with nothing but a network in common (`netns_cluster`): the head goes and comes back, a cable is pulled."""

from typing import Any

import pytest

from tests import netns
from tests.conftest import full_only, scenarios

pytestmark = [
    full_only,
    pytest.mark.timeout(620),
    pytest.mark.skipif(not netns.available(), reason="needs root and network namespaces"),
]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return scenarios("tests.netns_cluster", ["head_lost", "unplugged"], 580)


def test_each_replica_runs_in_a_network_of_its_own(seen: dict[str, Any]) -> None:
    assert seen["placed"]["up"] and seen["placed"]["hosts"] == seen["placed"]["nodes"] == ["g1", "g2"]


def test_every_nodes_proxy_answers(seen: dict[str, Any]) -> None:
    assert seen["placed"]["served"]


def test_streams_outlive_the_whole_head(seen: dict[str, Any]) -> None:
    assert seen["head_lost"]["answers"] == {"whole": 30}


def test_requests_are_answered_while_the_head_is_away(seen: dict[str, Any]) -> None:
    assert seen["head_lost"]["away"] == {"whole": 10}


def test_a_head_that_came_back_replaces_replicas(seen: dict[str, Any]) -> None:
    assert seen["head_lost"]["back"] and seen["head_lost"]["later"] == {"whole": 10} and seen["head_lost"]["healed"]


def test_streams_outlive_a_node_that_nothing_reaches_any_more(seen: dict[str, Any]) -> None:
    assert seen["unplugged"]["answers"] == {"whole": 30}


def test_requests_sent_to_a_node_that_nothing_reaches_are_answered_by_another(seen: dict[str, Any]) -> None:
    assert seen["unplugged"]["asked"] == {"whole": 10}
