"""The Prometheus of `make monitor` and of compose.yaml: what its configuration names is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import yaml

from deploy.monitoring.binaries import Unavailable, find
from deploy.monitoring.run import command, configuration
from tests.conftest import free_port
from tests.deploy.configs import DEPLOY, read

HERE = DEPLOY / "monitoring"
NOBODY = "http://127.0.0.1:9"


def watched(tree: dict[str, Any]) -> list[str]:
    """Patterns of the files that targets are read from."""
    jobs = tree["scrape_configs"]
    return [file for job in jobs for source in job.get("file_sd_configs", ()) for file in source["files"]]


def test_the_folders_that_prometheus_watches_exist() -> None:
    """It logs an error for each that does not, and sees no file that comes later."""
    folders = [Path(pattern).parent for pattern in watched(yaml.safe_load(configuration(NOBODY)))]
    assert folders and all(folder.is_absolute() and folder.is_dir() for folder in folders)


def test_a_checkout_has_the_folder_of_gpu_exporters() -> None:
    """Git keeps no empty one."""
    assert (HERE / "dcgm" / "README.md").is_file()


def test_the_example_of_gpu_exporters_is_a_list_of_targets() -> None:
    (example,) = re.findall(r"^    (\[.*\])$", (HERE / "dcgm" / "README.md").read_text(), re.MULTILINE)
    assert all(re.fullmatch(r"[0-9.]+:9400", target) for group in json.loads(example) for target in group["targets"])


def test_containers_see_what_the_configuration_names() -> None:
    tree = read(HERE / "prometheus.yml")
    mounts = [line.split(":") for line in read(HERE / "compose.yaml")["services"]["prometheus"]["volumes"]]
    places = {target: HERE / source for source, target, *_ in mounts if source.startswith(".")}
    for pattern in (*watched(tree), *tree["rule_files"]):
        assert places[f"/etc/prometheus/{Path(pattern).parent}"].is_dir(), pattern
    assert all(place.exists() for place in places.values())


@pytest.fixture
def not_prometheus(tmp_path: Path) -> dict[str, str]:
    """An environment whose Prometheus ends at once."""
    program = tmp_path / "prometheus"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return {"PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}


@pytest.mark.parametrize("there", [True, False])
def test_an_application_that_does_not_answer_is_told(
    there: bool, not_prometheus: dict[str, str], tmp_path: Path
) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}" if there else NOBODY
        line = [sys.executable, "-m", "deploy.monitoring.run", "--application", url, "--data", str(tmp_path / "data")]
        done = subprocess.run(line, env=not_prometheus, capture_output=True, text=True, timeout=120, check=True)
        server.shutdown()
        thread.join()
    assert done.stdout.startswith("Prometheus on ")
    assert ("no application answers on" in done.stderr) == (not there)


def test_prometheus_starts_without_an_error(tmp_path: Path) -> None:
    """Without an application to scrape, which is a warning."""
    try:
        binary = find("prometheus")
    except Unavailable as error:
        pytest.skip(f"no Prometheus to test with: {error}")
    (tmp_path / "prometheus.yml").write_text(configuration(NOBODY))
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command(binary, tmp_path, f"127.0.0.1:{port}"), stdout=log, stderr=log)
    try:
        until_discovering(port, tmp_path / "log")
    finally:
        server.terminate()
        server.wait(timeout=60)
    lines = (tmp_path / "log").read_text().splitlines()
    mistakes = [line for line in lines if re.search(r"level=error", line, re.IGNORECASE) and NOBODY not in line]
    assert mistakes == []


def until_discovering(port: int, log: Path) -> None:
    """Ready, and its discovery has run: a manager of targets tells its pools."""
    end = time.monotonic() + 120
    while True:
        try:
            pools = httpx.get(f"http://127.0.0.1:{port}/api/v1/targets", timeout=5, trust_env=False).json()
            if pools["status"] == "success" and "refresh" in log.read_text().lower():
                return
        except (httpx.HTTPError, ValueError):
            pass
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.2)
