"""The pinned set: complete for what is installed from this checkout, plain, and applied where that is done."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.pins import pins
from tests.conftest import ROOT
from tests.deploy.configs import DEPLOY

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("dev", "load", "tracing", "gpu")
NEEDED = [Requirement(text) for text in (
    *PROJECT["dependencies"], *(text for extra in EXTRAS for text in PROJECT["optional-dependencies"][extra])
)]  # fmt: skip
# Of the environment that SGLang's tests run in.
SGLANG = ROOT / "tests" / "engines" / "sglang"
FILES = [DEPLOY / "constraints.txt", SGLANG / "constraints.txt"]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(file: Path) -> list[str]:
    """Without comments."""
    found = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
    return [line for line in found if line]


def pinned(file: Path) -> dict[str, str]:
    return {normalised(name): version for name, version in (line.split("==") for line in lines(file))}


def version_in_makefile(name: str) -> str:
    (version,) = re.findall(rf"^{name.upper()}\s+\?= {name}==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(version)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_pin_is_a_name_and_a_version(file: Path) -> None:
    """No index, address, hash or local build, which are one machine's."""
    assert [line for line in lines(file) if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.]*", line)] == []


@pytest.mark.parametrize("requirement", [r for r in NEEDED if r.name != PROJECT["name"]], ids=lambda r: r.name)
def test_what_the_project_asks_for_is_pinned_to_what_it_allows(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pinned(FILES[0])[normalised(requirement.name)])


def test_what_sglangs_tests_ask_for_is_pinned_to_what_they_allow() -> None:
    needed = [Requirement(text) for text in (*PROJECT["dependencies"], *lines(SGLANG / "requirements.txt"))]
    found = pinned(SGLANG / "constraints.txt")
    assert [str(r) for r in needed if not r.specifier.contains(found.get(normalised(r.name), "0"))] == []


def test_the_makefiles_torch_is_the_pinned_one() -> None:
    assert [pinned(file)["torch"] for file in FILES] == [version_in_makefile("torch")] * 2
    assert pinned(FILES[1])["triton"] == version_in_makefile("triton")


def test_the_tests_are_of_the_extras_sglang() -> None:
    assert PROJECT["optional-dependencies"]["sglang"] == [f"sglang=={version_in_makefile('sglang')}"]


@pytest.mark.parametrize("file", ["Makefile", "deploy/Dockerfile", "deploy/bare-metal/install.sh"])
def test_it_is_applied(file: str) -> None:
    installs = [
        line for line in (ROOT / file).read_text().splitlines() if re.search(r"pip install .*(\.|whl|wheel)", line)
    ]
    assert installs and "constraints.txt" in (ROOT / file).read_text()


def test_a_report_becomes_sorted_pins_without_this_project_and_without_builds() -> None:
    items = [("torch", "2.13.0+cpu"), ("DDTree-Serve", "0.1.0"), ("Anyio", "4.1")]
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in items]}
    assert pins(report) == "anyio==4.1\ntorch==2.13.0\n"
