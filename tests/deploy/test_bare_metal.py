"""Scripts and units: well-formed, and what of them runs without a cluster or root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app import proxy
from tests.conftest import ROOT
from tests.deploy.configs import BARE_METAL, DEPLOY, config_of, lacks_of_haproxy, read

METAL = DEPLOY / "bare-metal"
SCRIPTS = sorted([*METAL.glob("*.sh"), *(DEPLOY / "sglang").glob("*.sh")])
CHECKED = [*SCRIPTS, ROOT / ".ci" / "run", *sorted((ROOT / "tests").rglob("*.sh"))]
UNITS = sorted((METAL / "systemd").glob("*.service"))


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def tool(name: str) -> str:
    """Beside this Python, or on the PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def start(role: str, **env: str) -> dict[str, str]:
    done = run(METAL / "start-ray.sh", role, DRY_RUN="1", **env)
    assert done.returncode == 0, done.stderr
    return dict((line + "=").split("=")[:2] for line in done.stdout.splitlines()[2:])  # type: ignore[misc]


@pytest.mark.parametrize("script", CHECKED, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    done = run(tool("shellcheck"), script)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_say_how_they_are_used(script: Path, tmp_path: Path) -> None:
    done = run(script, "--help", PATH=watched(tmp_path))
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"usage: {script.name} ")
    assert not (tmp_path / "called").exists()


def watched(directory: Path) -> str:
    """A PATH whose commands that change a machine say so in `called`, and change nothing."""
    for name in ("useradd", "install"):
        command = directory / name
        command.write_text(f"#!/bin/sh\necho {name} >> {directory}/called\n")
        command.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


@pytest.mark.parametrize("name", ["ddtree_serve-0.1.0-py3-none-any.whl", "other-0.1.0-py3-none-any.whl"])
def test_what_is_no_wheel_of_this_package_installs_nothing(name: str, tmp_path: Path) -> None:
    """A path that is not there, and a file of something else."""
    if name.startswith("other"):
        (tmp_path / name).touch()
    done = run(METAL / "install.sh", tmp_path / name, PATH=watched(tmp_path), ROOT=str(tmp_path / "root"))
    assert done.returncode == 2 and "no wheel of this package" in done.stderr
    assert not (tmp_path / "called").exists() and not (tmp_path / "root").exists()


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_unit(unit: Path) -> None:
    done = run(tool("systemd-analyze"), "verify", unit)
    # What a release brings is not on this machine.
    complaints = [line for line in done.stderr.splitlines() if "/opt/ddtree/current" not in line]
    assert [line for line in complaints if "ddtree" in line] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_scripts_that_units_name_exist(unit: Path) -> None:
    for name in re.findall(r"/opt/ddtree/current/(deploy/\S+)", unit.read_text()):
        assert (ROOT / name).is_file()


@pytest.mark.parametrize("role", ["head", "worker"])
def test_a_node_outlives_a_process_that_memory_ran_out_for(role: str) -> None:
    """systemd's default ends the whole unit with it."""
    assert "OOMPolicy=continue" in (METAL / "systemd" / f"ddtree-ray-{role}.service").read_text().splitlines()


def test_every_node_has_haproxy_in_front() -> None:
    lines = (METAL / "ray.env").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    longest = max(config_of(read(path)).ingress.request_timeout_s for path in BARE_METAL.values())
    assert lacks_of_haproxy(env, longest) == {}
    # Its control socket is in a directory that the units make for their user alone.
    assert proxy.cluster_switches("/run/ddtree").items() <= env.items()
    for role in ("head", "worker"):
        unit = (METAL / "systemd" / f"ddtree-ray-{role}.service").read_text().splitlines()
        assert {"RuntimeDirectory=ddtree", "RuntimeDirectoryMode=0700"} <= set(unit)


def test_ray_knows_every_option() -> None:
    done = run(sys.executable, "-m", "ray.scripts.scripts", "start", "--help")
    known = set(re.findall(r"--[a-z-]+", done.stdout))
    # Ray hides this one.
    used = set(start("head")) | set(start("worker", CLUSTER_HEAD="h")) - {"--redis-password"}
    assert used <= known, done.stderr[-500:]


def test_the_head_takes_no_work() -> None:
    head = start("head")
    assert (head["--num-cpus"], head["--num-gpus"]) == ("0", "0")


def test_the_dashboard_is_reached_from_the_head_alone() -> None:
    """It runs code for whoever reaches it."""
    assert start("head")["--dashboard-host"] == "127.0.0.1"


def test_no_two_ports_are_the_same() -> None:
    ports = [int(value) for name, value in start("head").items() if name.endswith("port")]
    low, high = (int(start("head")[f"--{end}-worker-port"]) for end in ("min", "max"))
    exporters = {config_of(read(path)).metrics.port for path in BARE_METAL.values()} - {0}
    taken = [*ports, 8000, *(port + n for port in exporters for n in range(64))]
    assert len(set(taken)) == len(taken)
    assert not [port for port in taken if low < port < high]


def test_every_port_is_in_the_firewalls_table() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    ports = {value for name, value in start("head").items() if name.endswith("port")} | {"8000"}
    assert {port for port in ports if not re.search(rf"\b{port}\b", page)} == set()


def test_a_worker_needs_the_heads_address() -> None:
    assert run(METAL / "start-ray.sh", "worker", DRY_RUN="1", CLUSTER_HEAD="").returncode != 0


def test_the_redis_password_comes_from_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret\n")
    head = start("head", CLUSTER_REDIS="h:1", REDIS_PASSWORD_FILE=str(secret))
    assert head["--redis-password"] == "s3cret"


def preflight(etc: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(METAL / "preflight.sh", *arguments, ETC=str(etc), PYTHON=sys.executable, PYTHONPATH=str(ROOT),
               CLUSTER_HEAD="127.0.0.1", CLUSTER_REDIS="", DDTREE_CONFIG="")  # fmt: skip


def test_preflight_lists_every_miss(tmp_path: Path) -> None:
    done = preflight(tmp_path, "head")
    assert done.returncode == 1
    assert "miss:" in done.stdout and "ray-token" in done.stdout and "keys.yaml" in done.stdout


def test_preflight_wants_secrets_that_nobody_else_reads(tmp_path: Path) -> None:
    token = tmp_path / "ray-token"
    token.write_text("x")
    token.chmod(0o644)
    assert f"miss: {token}" in preflight(tmp_path, "head").stdout
    token.chmod(0o400)
    assert f"ok: {token}" in preflight(tmp_path, "head").stdout


def test_preflight_checks_a_worker_against_the_serve_configuration(tmp_path: Path) -> None:
    """This machine has no B300."""
    done = preflight(tmp_path, "worker", str(BARE_METAL["kimi-k2.6-b300"]))
    assert "mismatch: " in done.stderr and "this node is not what" in done.stdout


@pytest.mark.parametrize(("name", "asked"), [("kimi-k2.6-b300", True), ("cpu-node", False)])
def test_preflight_looks_for_compilers_where_sglang_is_asked_for(tmp_path: Path, name: str, asked: bool) -> None:
    said = preflight(tmp_path, "worker", str(BARE_METAL[name])).stdout
    for what in ("SGLang is installed", "gcc and Python's headers are there", "CUDA's compiler is there"):
        assert (re.search(f"^(ok|miss): {what}$", said, re.MULTILINE) is not None) is asked


def test_preflight_reads_the_configuration_that_it_is_given(tmp_path: Path) -> None:
    """One that is not there is a miss, not this node's own configuration."""
    done = preflight(tmp_path, "worker", str(tmp_path / "none.yaml"))
    assert "miss: this node is not what" in done.stdout


@pytest.mark.parametrize("name", ["ddtree-ray-worker", "ddtree-sglang"])
def test_what_compiles_kernels_finds_cudas_compiler(name: str) -> None:
    (path,) = re.findall(r"PATH=(\S+)", (METAL / "systemd" / f"{name}.service").read_text())
    assert "/usr/local/cuda/bin" in path.split(":")


def test_a_release_is_switched_and_switched_back(tmp_path: Path) -> None:
    for version in ("0.1.0", "0.2.0"):
        binary = tmp_path / "releases" / version / "bin" / "python"
        binary.parent.mkdir(parents=True)
        binary.touch(0o755)
        unit = tmp_path / "releases" / version / "deploy" / "bare-metal" / "systemd" / "a.service"
        unit.parent.mkdir(parents=True)
        unit.write_text(version)
    for version in ("0.1.0", "0.2.0", "0.1.0"):
        done = run(METAL / "release.sh", version, ROOT=str(tmp_path), UNITS=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert os.readlink(tmp_path / "current") == f"releases/{version}"
        assert (tmp_path / "a.service").read_text() == version


def test_a_release_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    assert run(METAL / "release.sh", "9.9", ROOT=str(tmp_path)).returncode == 1
    assert not (tmp_path / "current").exists()


@pytest.mark.parametrize("folder", ["deploy", "k8s", "tests/deploy"])
def test_lines_fit_a_screen(folder: str) -> None:
    """As the Python code's; but paths within objects, which cannot be broken, and pages."""
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in (".md", ".pyc"))
    long = [f"{path.relative_to(ROOT)}:{number}" for path in files
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if len(line) > 120 and not re.match(r" *path: \S+$", line)]  # fmt: skip
    assert long == []
