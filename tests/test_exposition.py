"""Merging the pages of several processes."""

from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.exposition import merge
from serve_app.metrics import EngineMetrics, GatewayMetrics, ProcessMetrics

# Values as text, so that NaN equals itself.
Samples = set[tuple[str, frozenset[tuple[str, str]], str]]


def page(count: float) -> str:
    registry = CollectorRegistry()
    Counter("a_total", "A.", ("model",), registry=registry).labels('m"\\\n').inc(count)
    Histogram("b_seconds", "B.", registry=registry).observe(count)
    Gauge("c", "C: one \\ line\nand another.", registry=registry).set(count)
    return generate_latest(registry).decode()


def reference(texts: Mapping[str, str]) -> dict[str, tuple[str, str, Samples]]:
    """The merge by parsing: family → documentation, type, samples."""
    merged: dict[str, tuple[str, str, Samples]] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            if not family.name.endswith("_created"):
                samples = merged.setdefault(family.name, (family.documentation, family.type, set()))[2]
                samples |= {(s.name, frozenset({**s.labels, "replica": replica}.items()), repr(s.value))
                            for s in family.samples if not s.name.endswith("_created")}  # fmt: skip
    return merged


def parsed(text: bytes) -> dict[str, tuple[str, str, Samples]]:
    return {
        f.name: (f.documentation, f.type, {(s.name, frozenset(s.labels.items()), repr(s.value)) for s in f.samples})
        for f in text_string_to_metric_families(text.decode())
    }


def product_page(seed: int) -> str:
    registry = CollectorRegistry()
    gateway, engine = GatewayMetrics(registry), EngineMetrics(registry, "m", 8, ["no_cuda"])
    ProcessMetrics(registry)
    gateway.requests.labels("/v1/models/{model_id:path}", "200", "m").inc(seed)
    engine.verify_step(accepted=seed % 8, emitted=1, committed=1 + seed % 8, nodes=seed)
    return generate_latest(registry).decode()


@pytest.mark.parametrize(
    "texts",
    [
        {"x": product_page(3), "y": product_page(5)},
        {"x": page(1), "y": product_page(1), 'odd"\\\n': page(2)},
        {"x": "# a comment\n\n# HELP a A.\n# TYPE a gauge\na NaN 17\na{} 2\n# EOF\n", "y": ""},
    ],
)
def test_it_equals_merging_what_a_parser_reads(texts: dict[str, str]) -> None:
    assert parsed(merge(texts)) == reference(texts)


def test_each_family_is_declared_once_and_samples_keep_their_values() -> None:
    text = merge({"x": page(1), "y": page(2)}).decode()
    assert text.count("# TYPE a_total counter") == text.count("# HELP b_seconds ") == 1
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert {(s.labels["replica"], s.labels["model"], s.value) for s in families["a"].samples} == {
        ("x", 'm"\\\n', 1.0),
        ("y", 'm"\\\n', 2.0),
    }
    assert families["c"].documentation == "C: one \\ line\nand another."


def test_merging_one_page_changes_only_the_label() -> None:
    (original, merged) = ({(s.name, s.value) for f in text_string_to_metric_families(text) for s in f.samples}
                          for text in (page(3), merge({"x": page(3)}).decode()))  # fmt: skip
    assert {entry for entry in original if not entry[0].endswith("_created")} == merged


def test_nothing_to_merge_is_an_empty_page() -> None:
    assert merge({}) == b""


def test_the_products_series_survive_merging() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    EngineMetrics(registry, "m", 8, ["no_cuda"])
    text = generate_latest(registry).decode()
    names = {f.name for f in text_string_to_metric_families(text) if not f.name.endswith("_created")}
    assert {f.name for f in text_string_to_metric_families(merge({"x": text}).decode())} == names
