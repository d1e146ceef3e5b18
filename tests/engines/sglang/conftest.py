"""A real SGLang on a CPU, over a tiny random model; without SGLang these tests are skipped.

Its scheduler and detokenizer run as they do anywhere; `cpu_kernels` stands in for what released SGLang imports and a
machine without GPU lacks: one kernel, and an importable torchvision. Drafts need a GPU: `tests/gpu`.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from serve_app.config import Config, load_config
from serve_app.engines.sglang.engine import SglangEngine
from serve_app.multiprocess import EngineFiles
from tests.conftest import require_sglang
from tests.engines.local.conftest import write_model

KERNELS = Path(__file__).parent / "cpu_kernels"
ON_A_CPU = {
    "sampling_backend": "pytorch",
    "grammar_backend": "llguidance",
    "disable_overlap_schedule": True,
    "max_total_tokens": 4096,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # SGLang warns about what a CPU lacks, and about its own and numpy's future.
            for ignored in ("DeprecationWarning", "UserWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{ignored}"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sglang-tiny"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def make_config(model: Path) -> Callable[..., Config]:
    """Configuration of SGLang on a CPU; keyword arguments are sections merged over the defaults."""

    def make(**sections: dict[str, Any]) -> Config:
        tree: dict[str, Any] = {
            "model": {"source": str(model), "drafter": None, "dtype": "float32", "device": "cpu"},
            "engine": {"kind": "sglang", "max_running": 4, "max_queued": 4},
            "sglang": {"attention_backend": "torch_native", "server_args": ON_A_CPU},
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        return load_config(tree, use_env=False)

    return make


@pytest.fixture(scope="session")
def sglang_on_cpu() -> Iterator[None]:
    """SGLang can be imported, here and in its processes; skips where it is not installed."""
    require_sglang()
    sys.path.insert(0, str(KERNELS))  # inherited by its processes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.entrypoints import engine  # noqa: F401
    yield
    sys.path.remove(str(KERNELS))


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(EngineFiles())
    return made


@pytest.fixture(scope="module")
def engine(sglang_on_cpu: None, make_config: Callable[..., Config], registry: CollectorRegistry) -> Iterator[Any]:
    """One for all tests of a file that leave it as it was: starting takes half a minute. One process has one."""
    made = SglangEngine(make_config(), registry, start_timeout_s=120)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())
