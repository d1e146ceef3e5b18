"""Conventions of every declared series, and the arithmetic of the engine's."""

import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_app.metrics import (
    ITL_BUCKETS,
    EngineMetrics,
    GatewayMetrics,
    ProcessMetrics,
    exemplar,
    observe_gaps,
)

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
    ProcessMetrics(registry)
    # `process_*` are prometheus_client's own.
    return [family for family in registry.collect() if not family.name.startswith("process_")]


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


def test_rows_of_a_bucket_are_real_or_padding(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    engine.graph_replay("target", padding_rows=3, bucket=8)
    engine.graph_replay("target", padding_rows=0, bucket=8)

    def rows(kind: str) -> float | None:
        labels = {"model": "m", "role": "target", "bucket": "8", "kind": kind}
        return registry.get_sample_value("ddtree_graph_bucket_rows_total", labels)

    assert (rows("real"), rows("padding")) == (13, 3)


def test_steps_are_counted_by_budget(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    for nodes in (15, 7, 15):
        engine.verify_step(accepted=1, emitted=2, committed=2, nodes=nodes)
    counted = {
        n: registry.get_sample_value("ddtree_budget_steps_total", {"model": "m", "budget": n}) for n in ["7", "15"]
    }
    assert counted == {"7": 1, "15": 2}


def test_the_last_capture_is_told(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    engine.graph_capture("draft", graphs=4, seconds=1.5, reserved_bytes=1 << 20)
    engine.graph_capture("draft", graphs=3, seconds=1.0, reserved_bytes=1 << 19)
    labels = {"model": "m", "role": "draft"}
    names = ("ddtree_graph_captured", "ddtree_graph_capture_seconds", "ddtree_graph_capture_bytes")
    assert [registry.get_sample_value(name, labels) for name in names] == [3, 1.0, 1 << 19]


@pytest.mark.parametrize("length", [1, 118])
def test_a_request_id_within_the_formats_room_becomes_an_exemplar(length: int) -> None:
    assert exemplar("r" * length) == {"request_id": "r" * length}


@pytest.mark.parametrize("length", [0, 119])
def test_no_exemplar_is_better_than_an_invalid_one(length: int) -> None:
    assert exemplar("r" * length) is None


@pytest.mark.parametrize("value", [0.0, *ITL_BUCKETS, 0.0031, 3.0])
def test_many_observations_at_once_are_many(value: float) -> None:
    """Two, so that the sums agree to the last bit."""
    pages = []
    for each in (True, False):
        registry = CollectorRegistry()
        histogram = GatewayMetrics(registry).itl.labels("m", "true")
        if each:
            observe_gaps(histogram, [(2 * value, 2)])
        else:
            for _ in range(2):
                histogram.observe(value)
        pages.append([line for line in generate_latest(registry).decode().splitlines() if "created" not in line])
    assert pages[0] == pages[1]
