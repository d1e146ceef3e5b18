"""Rules: over series that exist, tested both ways, each alert with a section in the runbook."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.selectors import names
from deploy.monitoring.binaries import Unavailable, find
from deploy.monitoring.run import configuration
from tests.dashboards.exported import exported, uids

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "dashboards" / "rules"
TESTS = sorted((RULES / "tests").glob("*.yml"))


def rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def name_of(rule: dict[str, Any]) -> str:
    return str(rule.get("alert") or rule["record"])


ALERTS = [rule for rule in rules() if "alert" in rule]


@pytest.fixture(scope="session")
def promtool() -> Path:
    try:
        return find("promtool")
    except Unavailable as error:
        pytest.skip(f"no promtool: {error}")


@pytest.mark.parametrize("rule", rules(), ids=name_of)
def test_every_series_and_label_is_exported_or_recorded(rule: dict[str, Any]) -> None:
    recorded = {other["record"] for other in rules() if "record" in other}
    for name, labels, _ in names(rule["expr"]).selectors:
        assert name in exported() or name in recorded, f"{name} is not exported"
        assert labels <= exported().get(name, labels)


@pytest.mark.parametrize("alert", ALERTS, ids=name_of)
def test_every_alert_links_to_its_section_of_the_runbook(alert: dict[str, Any]) -> None:
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^## (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]
    assert alert["alert"].lower().startswith(anchor)


def test_every_section_of_the_runbook_belongs_to_an_alert() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    anchors = {alert["annotations"]["runbook_url"].partition("#")[2] for alert in ALERTS}
    assert {heading.lower() for heading in headings} == anchors and len(headings) == len(anchors)


@pytest.mark.parametrize("section", ["**Confirm.**", "**Do"])
def test_every_section_says_how_to_confirm_and_what_to_do(section: str) -> None:
    for text in (ROOT / "docs" / "runbook.md").read_text().split("\n## ")[1:]:
        assert section in text, text.split("\n")[0]


@pytest.mark.parametrize("alert", ALERTS, ids=name_of)
def test_every_alert_names_a_board_and_how_urgent_it_is(alert: dict[str, Any]) -> None:
    assert alert["annotations"]["dashboard"] in uids()
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert alert["annotations"]["summary"] and alert["annotations"]["description"].endswith(".")


@pytest.mark.parametrize("alert", ALERTS, ids=name_of)
@pytest.mark.parametrize("fires", [True, False])
def test_every_alert_is_tested_to_fire_and_to_stay_silent(alert: dict[str, Any], fires: bool) -> None:
    cases = [case for path in TESTS for test in yaml.safe_load(path.read_text())["tests"]
             for case in test["alert_rule_test"]]  # fmt: skip
    assert any(case["alertname"] == alert["alert"] and bool(case["exp_alerts"]) == fires for case in cases)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_fire_and_stay_silent(promtool: Path, path: Path) -> None:
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules(promtool: Path) -> None:
    done = subprocess.run([promtool, "check", "rules", *RULES.glob("*.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_configuration(promtool: Path, tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(configuration("http://127.0.0.1:8000"))
    command = [promtool, "check", "config", tmp_path / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
