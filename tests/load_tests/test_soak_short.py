"""The soak in its short form, on the real model: every kind of round, and all its findings, as `make soak` has them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="needs the extra `load`"),
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and soak.json. Locust patches the standard library: a process of its own."""
    out = tmp_path_factory.mktemp("soak")
    command = [sys.executable, "-m", "load_tests", "soak", "--duration", "60", "--round", "12", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    file = out / "soak.json"
    assert file.exists(), done.stderr[-4000:]
    return done.returncode, done.stdout, json.loads(file.read_text())


def test_the_books_agree_and_nothing_is_stuck_held_or_growing(soaked: tuple[int, str, dict[str, Any]]) -> None:
    code, said, report = soaked
    assert report["problems"] == [], said
    assert code == 0


def test_every_kind_of_round_did_what_it_is_for(soaked: tuple[int, str, dict[str, Any]]) -> None:
    rounds = soaked[2]["rounds"]
    assert {one["kind"] for one in rounds} == {"calm", "rough", "deadly"}
    assert all(one["requests"] for one in rounds)
    assert all(one["invalid"] for one in rounds if one["kind"] != "calm")
    assert all((one["killed"] is not None) == (one["kind"] == "deadly") for one in rounds)
