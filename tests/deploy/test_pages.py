"""What the pages about deployment tell somebody to type is there: files, units, modules, options."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.deploy.configs import DEPLOY

PAGES = [ROOT / "docs" / f"{name}.md" for name in
         ("deploy", "kubernetes", "sizing", "threat-model", "runbook", "monitoring", "sglang")]  # fmt: skip
# Made by whoever needs it; threat-model.md says how.
MADE = {"deploy/constraints-sglang.txt"}
each = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each
def test_files_exist(page: Path) -> None:
    """Those of the checkout and those of a release, which has its `deploy`."""
    named = set(re.findall(r"\b(?:deploy|k8s|dashboards|tests|benchmarks|serve_app)/[\w./-]*\w", page.read_text()))
    assert {name for name in named - MADE if not (ROOT / name).exists()} == set()


@each
def test_units_exist(page: Path) -> None:
    """Names of objects in Kubernetes begin alike."""
    units = {path.stem for path in (DEPLOY / "bare-metal" / "systemd").glob("*.service")}
    lines = [line for line in page.read_text().splitlines() if "systemctl" in line or "journalctl" in line]
    assert {name for line in lines for name in re.findall(r"\bddtree-[a-z-]+", line)} <= units


@each
def test_modules_exist(page: Path) -> None:
    named = set(re.findall(r"-m ((?:serve_app|deploy|dashboards|load_tests)[\w.]*\w)", page.read_text()))
    assert {name for name in named if find_spec(name) is None} == set()


@each
def test_targets_of_make_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= set(targets)


@pytest.mark.parametrize(("module", "page"), [("capacity", "sizing"), ("drain", "deploy"), ("admission", "deploy")])
def test_commands_take_the_options_they_are_shown_with(module: str, page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text() + (DEPLOY / "bare-metal" / "systemd" / (
        "ddtree-ray-worker.service")).read_text()  # fmt: skip
    shown = {option for line in re.findall(rf"-m serve_app\.{module}\b([^`\n]*)", text) for option in
             re.findall(r"--[a-z-]+", line)}  # fmt: skip
    done = subprocess.run([sys.executable, "-m", f"serve_app.{module}", "--help"], capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert shown <= set(re.findall(r"--[a-z-]+", done.stdout))


def test_the_operators_rules_are_made_of_the_rules() -> None:
    """kubernetes.md's command, up to kubectl."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (command,) = re.findall(r"^ +(\{ printf (?:.*\\\n)*.*)\| kubectl apply -f -$", page, re.MULTILINE)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    made = yaml.safe_load(done.stdout)
    assert (made["kind"], made["metadata"]["namespace"]) == ("PrometheusRule", "ddtree")
    assert made["spec"] == yaml.safe_load((ROOT / "dashboards" / "rules" / "alerts.yml").read_text())
