"""Each shipped Serve configuration is deployed as Ray deploys it: the laptop's in full, the others on fake engines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import FULL, scenarios
from tests.deploy.configs import ALL, BARE_METAL
from tests.deploy.serve_cluster import DRAINED

# Overlays hold what the bare-metal files hold (test_k8s), so that one run of each shape is enough every day.
NAMES = sorted(ALL if FULL else BARE_METAL, key=lambda name: name == DRAINED)
ONE_NODE = [{"CPU": 16.0, "GPU": 8.0, "accelerator_type:B300": 0.001}]
pytestmark = [pytest.mark.timeout(1200), pytest.mark.model]
each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return scenarios("tests.deploy.serve_cluster", NAMES, 1180, RAY_prestart_worker_first_driver="0")


@each
def test_it_runs(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["up"], seen[name]["status"]


@each
def test_it_answers(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["answer"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("laptop", "gpu")])
def test_no_ingress_is_on_the_head(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["ingresses"] and "head" not in seen[name]["ingresses"]


def test_a_node_holds_eight_single_gpu_engines(seen: dict[str, Any]) -> None:
    assert len(seen["gpu-node"]["engines"]) == 8


def test_kimi_takes_one_whole_node(seen: dict[str, Any]) -> None:
    assert seen["kimi-k2.6-b300"]["bundles"] == [ONE_NODE]


def test_four_kimis_take_four_nodes(seen: dict[str, Any]) -> None:
    assert seen["kimi-k2.6-b300-nodes"]["engines"] == ["n0", "n1", "n2", "n3"]
    assert seen["kimi-k2.6-b300-nodes"]["bundles"] == [ONE_NODE] * 4


def test_a_drained_nodes_engine_moves(seen: dict[str, Any]) -> None:
    drained = seen[DRAINED]["drained"]
    assert drained["code"] == 0, drained["said"]
    assert drained["engines"] and drained["engines"] != seen[DRAINED]["engines"]
