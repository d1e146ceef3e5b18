"""Every panel and every rule, evaluated by a real Prometheus over the running application."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from dashboards.boards import ABSENT_ON_CPU
from dashboards.expressions import Expression, expressions
from dashboards.selectors import names
from tests.conftest import Served
from tests.dashboards.conftest import Prometheus
from tests.dashboards.test_boards import name_of
from tests.dashboards.test_rules import ALERTS, rules

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
# Selectors of rules without data here, and why.
ABSENT_IN_RULES = {
    "model:ddtree_acceptance_length:baseline1d": "leaves out the last half hour, and the test is shorter than that",
    "model_role_reason:ddtree_graph_fallbacks:ratio5m": "has no forward that a graph should have served without CUDA",
}


def test_discovery_names_every_process_with_its_labels(prometheus: Prometheus, watched: Served) -> None:
    targets = prometheus.get("targets")["activeTargets"]
    ours = [target for target in targets if target["labels"]["job"] == "ddtree"]
    assert sorted(target["labels"]["deployment"] for target in ours) == ["engine", "ingress"]
    for target in ours:
        assert target["labels"]["node"] and target["labels"]["model"] == watched.model
        assert target["labels"]["replica"].startswith(target["labels"]["deployment"] + "#")


def test_a_series_own_model_is_kept(prometheus: Prometheus, watched: Served) -> None:
    httpx.post(
        f"{watched.url}/v1/chat/completions", json={"model": "made-up", "messages": []}, timeout=60, trust_env=False
    )
    deadline = time.monotonic() + 60
    while not prometheus.instant('gateway_requests_total{status="404",model="unknown"}'):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert prometheus.instant('{exported_model=~".+"}') == []


@pytest.mark.parametrize("expression", list(expressions()), ids=name_of)
def test_every_panel_has_data_or_a_reason(prometheus: Prometheus, expression: Expression) -> None:
    numbers = prometheus.numbers(expression.filled("15s"))
    absent = ABSENT_ON_CPU.get((expression.board, expression.panel))
    assert bool(numbers) != bool(absent), absent or expression.filled("15s")


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_whatever_a_rule_reads_has_data_or_a_reason(prometheus: Prometheus, rule: dict[str, Any]) -> None:
    for name, _, text in names(rule["expr"]).selectors:
        # A busy machine may miss a scrape.
        found = prometheus.instant(f"last_over_time({text}[1m])")
        assert bool(found) != (name in ABSENT_IN_RULES), text


def test_prometheus_evaluates_every_rule(prometheus: Prometheus) -> None:
    groups = prometheus.get("rules")["groups"]
    loaded = [rule for group in groups for rule in group["rules"]]
    assert len(loaded) == len(rules())
    assert {(rule["name"], rule["health"], rule.get("lastError", "")) for rule in loaded} == {
        (rule.get("alert") or rule["record"], "ok", "") for rule in rules()
    }


def test_the_alerts_of_a_broken_fleet_are_silent_on_a_sound_one(prometheus: Prometheus) -> None:
    sound = {alert["alert"] for alert in ALERTS if "Burn" not in alert["alert"]}
    alerts = prometheus.get("alerts")["alerts"]
    firing = {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
    assert firing & sound == set()


def test_a_slow_request_can_be_found_by_its_exemplar(prometheus: Prometheus) -> None:
    now = time.time()
    series = prometheus.get("query_exemplars", query="gateway_ttft_seconds_bucket", start=now - 300, end=now)
    assert series and all(one["exemplars"][0]["labels"]["request_id"] for one in series)
