"""The pinned set: complete for what is installed from this checkout, plain, and applied where that is done."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.pins import pins
from tests.conftest import ROOT
from tests.deploy.configs import DEPLOY
from tests.deploy.test_image import stages

MAKEFILE = (ROOT / "Makefile").read_text()
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
    (version,) = re.findall(rf"^{name.upper()}\s+\?= {name}==(\S+)", MAKEFILE, re.MULTILINE)
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


def held_by(command: str) -> str:
    """The file that a `pip install` is held by."""
    (file,) = re.findall(r" -c (\S+)", command) or [""]
    return str(file)


def test_make_installs_nothing_unpinned(tmp_path: Path) -> None:
    """For somebody who has nothing yet, whatever they make first."""
    targets = re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE)
    env = {name: value for name, value in os.environ.items() if name not in ("PINS", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "-n", *targets, f"VENV={tmp_path / 'none'}"], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    # pip itself is what an environment begins with.
    installs = [line for line in done.stdout.splitlines() if " pip install " in line and "--upgrade pip" not in line]
    assert len(installs) >= 4
    # Single packages, without what they require.
    exact = [line for line in installs if re.search(r" --no-deps( --target \S+)?( \"[a-z]+==[0-9.]+\")+$", line)]
    assert {held_by(line) for line in installs if line not in exact} == {str(file.relative_to(ROOT)) for file in FILES}


PYTHON = """#!/bin/sh
# Makes an environment of itself, and only writes down what pip was asked.
if [ "$2" = venv ]; then
  mkdir -p "$3/bin" && cp "$(command -v "$0")" "$3/bin/python" && echo "#!$3/bin/python" > "$3/bin/ray"
else
  echo "$@" >> "$LOG"
fi
"""
INSTALL = """#!/bin/sh
# Owners and what lies in /etc are root's to make.
for place; do :; done
case $place in "$ROOT"/*) mkdir -p "$place" ;; esac
"""


def installed(tmp_path: Path, extras: str) -> str:
    """install.sh's `pip install` from a copy of the checkout, with a Python that only writes down what it was asked."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, script in (("python", PYTHON), ("install", INSTALL), ("id", "#!/bin/sh\necho 0\n")):
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": "python", "ROOT": str(tmp_path / "opt"),
           "LOG": str(tmp_path / "log")}  # fmt: skip
    script = tmp_path / "deploy" / "bare-metal" / "install.sh"
    wheel = tmp_path / "ddtree_serve-1.2.3-py3-none-any.whl"
    wheel.touch()
    done = subprocess.run([str(script), str(wheel), extras], env=env, capture_output=True, text=True, timeout=60,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    release = tmp_path / "opt" / "releases" / "1.2.3"
    assert (release / "bin" / "ray").read_text() == f"#!{release}/bin/python\n"
    assert (release / "deploy" / "bare-metal" / "release.sh").exists() and (release / "deploy" / "serve").is_dir()
    line, links = (tmp_path / "log").read_text().splitlines()
    assert links == f"-m serve_app.proxy {release}/bin"
    return line


@pytest.mark.parametrize(("extras", "file"), [
    ("gpu", "constraints.txt"), ("gpu,tracing", "constraints.txt"), ("gpu,sglang", "constraints-sglang.txt"),
])  # fmt: skip
def test_the_install_script_pins_by_the_extras_file(tmp_path: Path, extras: str, file: str) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (tmp_path / "deploy" / "constraints-sglang.txt").write_text("torch==2.11.0\n")
    line = installed(tmp_path, extras)
    assert line.endswith(f"ddtree_serve-1.2.3-py3-none-any.whl[{extras}]")
    assert Path(held_by(line)).resolve() == tmp_path / "deploy" / file


def test_the_install_script_holds_sglang_to_no_other_engines_torch(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    assert held_by(installed(tmp_path, "gpu,sglang")) == ""


@pytest.mark.parametrize(("stage", "there", "files"), [
    ("cpu-packages", ["constraints.txt"], ["constraints.txt"]),
    ("gpu-packages", ["constraints.txt"], []),
    ("gpu-packages", ["constraints.txt", "constraints-sglang.txt"], ["constraints-sglang.txt"]),
])  # fmt: skip
def test_the_image_pins_by_the_kinds_file(tmp_path: Path, stage: str, there: list[str], files: list[str]) -> None:
    """The stage's own command is run, with what it copies in a directory here and a pip that prints."""
    (run,) = (line.removeprefix("RUN ") for line in stages()[stage] if line.startswith("RUN ") and "pip" in line)
    for pattern, place in copied(stages()[stage]):
        into = tmp_path / place.strip("/")
        into.mkdir(parents=True, exist_ok=True)
        for name in there if pattern != "/wheels" else ["ddtree_serve-1.2.3-py3-none-any.whl"]:
            if pattern == "/wheels" or fnmatch(f"deploy/{name}", pattern):
                (into / name).touch()
    run = re.sub(r"python\S* -m venv \S+ && ", "", run).replace("/opt/ddtree/bin/pip", "echo")
    run = re.sub(r"/(constraints|wheels)", rf"{tmp_path}/\1", run)
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=60, check=True)
    assert "ddtree_serve-1.2.3-py3-none-any.whl" in done.stdout
    assert re.findall(r"-c \S*?([^/\s]+)(?=\s)", done.stdout) == files


def copied(lines: list[str]) -> list[tuple[str, str]]:
    """What a stage copies, and to where."""
    words = [line.removeprefix("COPY ").replace("--from=wheel ", "").split() for line in lines if "COPY " in line]
    return [(source, place) for source, place in words]


def test_a_report_becomes_sorted_pins_without_this_project_and_without_builds() -> None:
    items = [("torch", "2.13.0+cpu"), ("DDTree-Serve", "0.1.0"), ("Anyio", "4.1")]
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in items]}
    assert pins(report) == "anyio==4.1\ntorch==2.13.0\n"
