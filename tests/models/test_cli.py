from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.errors import ModelFetchError
from serve_app.models import cache
from tests.models.conftest import ROOT, Sandbox


def test_list_tells_what_is_in_the_cache(sandbox: Sandbox) -> None:
    before = sandbox.run("list").stdout
    assert "tiny\tnot in the cache" in before and "smollm2-135m\tnot in the cache" in before
    sandbox.run("fetch", "tiny")
    assert "tiny\tready" in sandbox.run("list").stdout


def test_path_prints_only_the_path_and_fetches_nothing(sandbox: Sandbox) -> None:
    sandbox.fails("path", "tiny", says="not in the cache; fetch it")
    sandbox.run("fetch", "tiny")
    result = sandbox.run("path", "tiny")
    assert (result.stdout, result.stderr) == (f"{sandbox.cache}/models/tiny\n", "")


def test_path_and_verify_of_a_local_directory(sandbox: Sandbox) -> None:
    path = sandbox.run("fetch", "tiny").stdout.strip()
    assert sandbox.run("path", path).stdout.strip() == path
    assert "complete" in sandbox.run("verify", path).stderr


def test_verify_says_so_on_stderr(sandbox: Sandbox) -> None:
    sandbox.run("fetch", "tiny")
    result = sandbox.run("verify", "tiny")
    assert (result.returncode, result.stdout) == (0, "")
    assert "every file has its SHA-256" in result.stderr


@pytest.mark.parametrize("command", ["path", "fetch", "verify"])
def test_unknown_names(sandbox: Sandbox, command: str) -> None:
    sandbox.fails(command, "nonsense", says="known model (smollm2-135m, tiny)")
    sandbox.fails(command, "/no/such", says="does not exist")
    assert not sandbox.cache.exists()


@pytest.mark.parametrize("command", ["path", "verify"])
def test_hub_models_are_not_in_this_cache(sandbox: Sandbox, command: str) -> None:
    sandbox.fails(command, "some/model", says="`fetch some/model` prints the directory")


def test_cache_option_wins_over_the_environment(sandbox: Sandbox, tmp_path: Path) -> None:
    result = sandbox.run("fetch", "tiny", "--cache", str(tmp_path / "other"))
    assert result.stdout.strip() == str(tmp_path / "other/models/tiny")
    assert not sandbox.cache.exists()


@pytest.mark.parametrize("arguments", [[], ["fetch"], ["frobnicate"], ["list", "--force"]])
def test_wrong_usage_is_exit_code_2(sandbox: Sandbox, arguments: list[str]) -> None:
    result = sandbox.run(*arguments)
    assert result.returncode == 2 and "usage:" in result.stderr


def test_import_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, serve_app.models; sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DDTREE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/h"}, "/a"),
        ({"DDTREE_CACHE": "~/a", "HOME": "/h"}, "/h/a"),
        ({"DDTREE_CACHE": "", "XDG_CACHE_HOME": "/b", "HOME": "/h"}, "/b/ddtree-serve"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/ddtree-serve"),
        ({"HOME": "/h"}, "/h/.cache/ddtree-serve"),
    ],
)
def test_cache_root(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DDTREE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_root() == Path(expected)


def test_cache_of_an_unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_CACHE", "~no-such-user/x")
    with pytest.raises(ModelFetchError, match="home directory"):
        cache.cache_root()
