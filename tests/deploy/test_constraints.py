"""The pinned set: complete for what is installed from this checkout, plain, and applied where that is done."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from deploy.pins import pins
from tests.conftest import ROOT
from tests.deploy.configs import DEPLOY

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("dev", "load", "tracing", "gpu")
LINES = [line for line in (DEPLOY / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINNED = dict(line.split("==") for line in LINES)
NEEDED = [Requirement(text) for text in (
    *PROJECT["dependencies"], *(text for extra in EXTRAS for text in PROJECT["optional-dependencies"][extra])
)]  # fmt: skip


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_a_pin_is_a_name_and_a_version() -> None:
    """No index, address, hash or local build, which are one machine's."""
    assert [line for line in LINES if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.]*", line)] == []


@pytest.mark.parametrize("requirement", [r for r in NEEDED if r.name != PROJECT["name"]], ids=lambda r: r.name)
def test_what_the_project_asks_for_is_pinned_to_what_it_allows(requirement: Requirement) -> None:
    found = {normalised(name): version for name, version in PINNED.items()}
    assert requirement.specifier.contains(found[normalised(requirement.name)])


@pytest.mark.parametrize("file", ["Makefile", "deploy/Dockerfile", "deploy/bare-metal/install.sh"])
def test_it_is_applied(file: str) -> None:
    installs = [
        line for line in (ROOT / file).read_text().splitlines() if re.search(r"pip install .*(\.|whl|wheel)", line)
    ]
    assert installs and "constraints.txt" in (ROOT / file).read_text()


def test_the_makefiles_torch_is_the_pinned_one() -> None:
    (torch,) = re.findall(r"^TORCH\s+\?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert PINNED["torch"] == torch


def test_a_report_becomes_sorted_pins_without_this_project_and_without_builds() -> None:
    items = [("torch", "2.13.0+cpu"), ("DDTree-Serve", "0.1.0"), ("Anyio", "4.1")]
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in items]}
    assert pins(report) == "anyio==4.1\ntorch==2.13.0\n"
