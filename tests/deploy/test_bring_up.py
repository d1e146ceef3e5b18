"""docs/deploy.md done for real: two machines, systemd, Redis, a firewall, an upgrade and its roll-back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.models.cache import cache_root
from tests.conftest import ROOT, full_only
from tests.deploy.bring_up import HEAD, NEW, NODE, OLD
from tests.deploy.configs import DEPLOY
from tests.deploy.machines import isolated, missing

pytestmark = [full_only, pytest.mark.timeout(2700), pytest.mark.model]
SECONDS = 1750


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    """What somebody brings to the machines."""
    if lacks := missing():
        pytest.skip(f"no machines can be made here: {', '.join(lacks)} missing")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the machines have Python 3.11, and wheels are fetched for this one")
    with tempfile.TemporaryDirectory(prefix="bring-up-", dir="/var/tmp") as directory:
        base = Path(directory)
        shutil.copytree(DEPLOY, base / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(cache_root() / "models", base / "models")
        for release in (OLD, NEW):
            wheel(release, base / "releases" / release)
        (built,) = (base / "releases" / OLD).glob("*.whl")
        pip("download", "-d", str(base / "wheelhouse"), "-c", str(DEPLOY / "constraints.txt"), f"{built}[gpu]")
        yield base


def wheel(release: str, into: Path) -> None:
    """A release of this checkout under a number of its own."""
    with tempfile.TemporaryDirectory() as source:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        shutil.copytree(ROOT / "serve_app", f"{source}/serve_app", ignore=shutil.ignore_patterns("__pycache__"))
        for name, key in (("pyproject.toml", "version"), ("serve_app/__init__.py", "__version__")):
            path = Path(source) / name
            path.write_text(re.sub(rf'^{key} = ".*"', f'{key} = "{release}"', path.read_text(), flags=re.MULTILINE))
        pip("wheel", "--no-deps", "-w", str(into), source)


def pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "-q", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def seen(files: Path) -> dict[str, Any]:
    command = isolated(sys.executable, "-m", "tests.deploy.bring_up", str(files))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    print(done.stderr)
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("SEEN "))
    return found


@pytest.mark.parametrize("machine", ["head", "node"])
def test_preflight_misses_nothing_but_the_clock(seen: dict[str, Any], machine: str) -> None:
    """No time server is reached here, and this machine may allow too few open files."""
    misses = [miss for miss in seen["preflight"][machine] if not miss.startswith(("the clock", "open files"))]
    assert misses == []


def test_the_application_gets_ready(seen: dict[str, Any]) -> None:
    assert seen["started"] == {"ready": True, "status": "RUNNING"}


def test_it_answers_to_a_key_alone(seen: dict[str, Any]) -> None:
    answers = seen["answers"]
    assert (answers["key"][0], answers["none"][0], answers["version"]) == (200, 401, OLD)
    assert json.loads(answers["key"][1])["choices"][0]["message"]["content"]


def test_the_cluster_listens_to_its_token_alone(seen: dict[str, Any]) -> None:
    """The dashboard's port, which deploys, and the cluster's own."""
    found = seen["guarded"]
    assert found["token"] == [200, True]
    assert all(found[name][0] in (401, 403) and not found[name][1] for name in ("none", "other")), found


@pytest.mark.parametrize("address", [HEAD, NODE])
def test_each_agent_tells_its_raylets_health(seen: dict[str, Any], address: str) -> None:
    assert seen["health"][address] == [200, "success"]


def test_the_firewall_lets_through_what_the_page_says(seen: dict[str, Any]) -> None:
    opened = {name for name, code in seen["doors"].items() if code == 200}
    assert opened == {"balancer to service", "Prometheus to service", "Prometheus to Ray's metrics",
                      "Prometheus to an exporter"}  # fmt: skip
    assert {code for name, code in seen["doors"].items() if name not in opened} == {0}


def test_another_application_takes_the_place_of_the_first(seen: dict[str, Any]) -> None:
    assert seen["exchanged"] == {"gone": True, "ready": True, "answer": 200}


def test_the_service_outlives_its_head(seen: dict[str, Any]) -> None:
    assert seen["head_lost"] == {"meanwhile": [200] * 5, "back": True, "known": True, "afterwards": 200}


def test_a_configuration_is_changed_in_place_and_back(seen: dict[str, Any]) -> None:
    found = seen["reloaded"]
    assert (found["changed"], found["changed back"], found["status"]) == (True, True, True)


def test_no_answer_fails_while_configurations_change(seen: dict[str, Any]) -> None:
    """Whole answers, the same as before, streaming or not, through a refused file, a new one and the old one again."""
    ends = seen["reloaded"]["clients"]
    assert set(ends) == {"stream", "answer"} and min(ends.values()) > 5, ends


def test_a_refused_configuration_leaves_the_old_one_serving(seen: dict[str, Any]) -> None:
    assert (seen["reloaded"]["refused"], seen["reloaded"]["meanwhile"]) == (True, 200)


@pytest.mark.parametrize("what", ["key", "token", "password", "prompt"])
def test_no_log_tells_a_secret(seen: dict[str, Any], what: str) -> None:
    assert [seen["told"][machine][what] for machine in ("head", "node")] == [[], []]


def test_the_logs_were_searched(seen: dict[str, Any]) -> None:
    assert seen["told"]["node"]["route"] and all(found["unit"] == ["journal"] for found in seen["told"].values())


@pytest.mark.parametrize(("step", "before", "after"), [("upgraded", OLD, NEW), ("rolled_back", NEW, OLD)])
def test_a_release_is_changed_in_a_window(seen: dict[str, Any], step: str, before: str, after: str) -> None:
    found = seen[step]
    assert (found["before"], found["after"], found["answer"], found["status"]) == (before, after, 200, True)


def test_a_worker_without_replicas_stops_without_waiting(seen: dict[str, Any]) -> None:
    """The units wait up to 12 minutes for answers; in a window there are none."""
    assert max(seen[step]["worker stopped in"] for step in ("upgraded", "rolled_back")) < 120


def test_nothing_is_left_once_all_is_stopped(seen: dict[str, Any]) -> None:
    assert seen["stopped"] == {"head": "", "node": ""}
