"""Without Triton and SGLang these tests are skipped."""

import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.conftest import ROOT, require_sglang

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU_KERNELS = ROOT / "tests" / "engines" / "sglang" / "cpu_kernels"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # Triton's interpreter and SGLang warn about their own and numpy's future.
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


@pytest.fixture(scope="session")
def sglang() -> ModuleType:
    """SGLang with the plugin loaded as its own loader does it; skips where it is not installed."""
    require_sglang()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("sglang.srt.managers.scheduler")
        registry = import_module("sglang.srt.plugins.hook_registry").HookRegistry
        import_module("serve_app.sglang_plugin.plugin").register()
        registry.apply_hooks()
        import_module("serve_app.sglang_plugin.worker")
    return import_module("sglang")
