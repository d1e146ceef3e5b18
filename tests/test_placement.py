"""One replica per node, on a cluster of five simulated nodes (`placement_cluster`), and what outlives its parts."""

from typing import Any

import pytest

from tests.conftest import FULL, full_only, scenarios

pytestmark = pytest.mark.timeout(1200)
SCENARIOS = ["wrong", "placed", "node_lost", "deleted"]
if FULL:
    SCENARIOS[2:3] = ["crowded", "controller", "gcs", "proxy", "node_lost", "drained"]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return scenarios("tests.placement_cluster", SCENARIOS, 1180)


def test_each_replica_has_a_node_of_its_own(seen: dict[str, Any]) -> None:
    assert seen["placed"]["up"] and seen["placed"]["nodes"] == ["n0", "n1", "n2"]


def test_a_replica_is_one_bundle_on_one_node(seen: dict[str, Any]) -> None:
    assert seen["placed"]["strategies"] == ["STRICT_PACK"] * 3
    assert seen["placed"]["bundles"] == [[{"CPU": 1.0, "GPU": 8.0, "accelerator_type:B300": 0.001}]] * 3


@full_only
def test_one_replica_more_than_nodes_waits(seen: dict[str, Any]) -> None:
    assert (seen["crowded"]["nodes"], seen["crowded"]["status"]) == (["n0", "n1", "n2"], "DEPLOYING")


def test_a_wrong_node_fails_the_deployment_with_its_reason(seen: dict[str, Any]) -> None:
    assert seen["wrong"]["failed"]
    assert "driver 580.95 is older than 999.1" in seen["wrong"]["message"]


def test_a_failed_deployment_leaves_no_placement_group(seen: dict[str, Any]) -> None:
    assert seen["wrong"]["left"] == 0


@full_only
def test_streams_outlive_controller_and_replica(seen: dict[str, Any]) -> None:
    assert seen["controller"]["answers"] == {"whole": 30} and seen["controller"]["healed"]


@full_only
def test_no_placement_group_is_left_over_from_controller_and_replica(seen: dict[str, Any]) -> None:
    assert seen["controller"]["tidy"], seen["controller"]["groups"]


@full_only
def test_streams_outlive_the_heads_state_server(seen: dict[str, Any]) -> None:
    assert seen["gcs"]["answers"] == {"whole": 30}


@full_only
def test_replicas_are_replaced_after_the_heads_state_server_came_back(seen: dict[str, Any]) -> None:
    assert seen["gcs"]["later"] == {"whole": 10} and seen["gcs"]["healed"]


@full_only
def test_nobody_hangs_on_a_killed_proxy_and_it_comes_back(seen: dict[str, Any]) -> None:
    assert (seen["proxy"]["hung"], seen["proxy"]["back"]) == (0, True)


def test_streams_outlive_a_node(seen: dict[str, Any]) -> None:
    assert seen["node_lost"]["answers"] == {"whole": 30}


def test_a_new_node_takes_the_lost_ones_place(seen: dict[str, Any]) -> None:
    assert seen["node_lost"]["healed"], seen["node_lost"]["nodes"]


@full_only
def test_a_node_that_is_drained_loses_no_stream(seen: dict[str, Any]) -> None:
    assert seen["drained"]["accepted"], seen["drained"]["why"]
    assert seen["drained"]["answers"] == {"whole": 30}


@full_only
def test_a_drained_nodes_replica_moves(seen: dict[str, Any]) -> None:
    assert seen["drained"]["moved"], seen["drained"]["nodes"]


def test_nothing_is_left_after_deletion(seen: dict[str, Any]) -> None:
    assert seen["deleted"]["left"] == 0
