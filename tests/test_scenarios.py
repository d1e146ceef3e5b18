"""The modules that build clusters and networks say how they are called before they build anything."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(120)
@pytest.mark.parametrize("module", ["netns_cluster", "netns_haproxy", "placement_cluster"])
def test_help_builds_nothing(module: str) -> None:
    """With no program to build with."""
    env = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", f"tests.{module}", "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {module}.py"), done.stderr
