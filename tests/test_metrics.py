"""Conventions of every declared series, and the arithmetic of the engine's."""

import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from serve_app.metrics import EngineMetrics, GatewayMetrics

UNITS = ("milliseconds", "minutes", "hours", "kilobytes", "megabytes", "percent")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def engine(registry: CollectorRegistry) -> EngineMetrics:
    return EngineMetrics(registry, "m", 8, ["no_cuda", "disabled"])


def families() -> list[Any]:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    EngineMetrics(registry, "m", 8, ["no_cuda"])
    return list(registry.collect())


@pytest.mark.parametrize("family", families(), ids=lambda f: f.name)
def test_names_follow_prometheus_conventions(family: Any) -> None:
    assert re.fullmatch(r"(ddtree|gateway)_[a-z_]+", family.name)
    assert family.documentation.endswith(".")
    assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert not any(unit in family.name for unit in UNITS)


def test_declaring_twice_in_one_registry_is_an_error(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        GatewayMetrics(registry)


def test_every_reason_exists_from_the_start(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    for role in ("target", "draft"):
        for reason in ("no_cuda", "disabled"):
            labels = {"model": "m", "role": role, "reason": reason}
            assert registry.get_sample_value("ddtree_graph_fallbacks_total", labels) == 0


@pytest.mark.parametrize(("accepted", "emitted"), [(0, 1), (3, 4), (3, 2), (7, 8)])
def test_tokens_of_a_verify_step_add_up(
    registry: CollectorRegistry, engine: EngineMetrics, accepted: int, emitted: int
) -> None:
    engine.verify_step(accepted=accepted, emitted=emitted, committed=accepted + 1, nodes=16)

    def value(name: str) -> float:
        return registry.get_sample_value(name, {"model": "m"}) or 0.0

    assert value("ddtree_accepted_tokens_total") + value("ddtree_bonus_tokens_total") == emitted
    assert emitted + value("ddtree_trimmed_tokens_total") == accepted + 1
    assert value("ddtree_acceptance_length_sum") == emitted
    assert value("ddtree_acceptance_length_count") == value("ddtree_verify_steps_total") == 1
