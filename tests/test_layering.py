"""Imports point one way: ddtree ← graphs ← engines, sglang_plugin ← replica ← ingress, router ← build."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "serve_app"
LEAVES = {"errors", "config", "metrics"}
# Part of the package (first name below serve_app) → parts it may import, itself and leaves aside.
ALLOWED = {
    "errors": set(),
    "config": set(),
    "metrics": set(),
    "ddtree": set(),
    "graph_batch": {"ddtree"},
    "graph_capture": {"ddtree", "graph_batch"},
    "graphs": {"ddtree", "graph_batch", "graph_capture"},
    "models": {"ddtree"},
    "engines.base": set(),
    "engines": {
        "engines.base",
        "graphs",
        "graph_batch",
        "graph_capture",
        "ddtree",
        "models",
        "sglang_plugin",
        "multiprocess",
        "ports",
    },
    "sglang_plugin": {"graphs", "graph_batch", "graph_capture", "ddtree", "models", "engines.base"},
    "protocol": {"engines.base"},
    "channel": {"engines.base", "protocol"},
    "entrance": {"protocol", "channel"},
    "exposition": set(),
    "logs": set(),
    "ports": set(),
    "tracing": {"engines.base", "protocol"},
    "multiprocess": set(),
    "exporter": {"multiprocess"},
    "topology": set(),
    "watchdog": {"engines.base"},
    "scaling": {"engines.base"},
    "replica": {
        "engines",
        "engines.base",
        "protocol",
        "channel",
        "entrance",
        "exporter",
        "topology",
        "watchdog",
        "scaling",
        "logs",
        "tracing",
    },
    "router": {"engines.base", "protocol", "channel"},
    "admission": set(),
    "edge": {"protocol"},
    "ingress": {
        "edge",
        "protocol",
        "channel",
        "engines.base",
        "exporter",
        "exposition",
        "logs",
        "tracing",
        "admission",
        "router",
    },
    "build": {"logs", "tracing", "ingress", "replica", "exporter", "router", "engines.base", "topology"},
    "proxy": {"ports"},
    "launch": {"build", "engines", "proxy"},
    "drain": set(),
    "capacity": set(),
    "": {"build"},
}


def part_of(module: str) -> str:
    names = module.split(".")[1:]
    return "engines.base" if names[:2] == ["engines", "base"] else (names[0] if names else "")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (
                [f"{node.module}.{a.name}" for a in node.names] if node.module == "serve_app" else [str(node.module)]
            )


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    part = part_of(module)
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    wanted = {part_of(name) for name in imports(path) if name.split(".")[0] == "serve_app"}
    wanted.discard("__version__")
    lower = {"errors"} if part in LEAVES else LEAVES
    assert wanted - {part} - lower - ALLOWED[part] == set()


def test_the_package_and_the_plugins_way_in_import_no_ray() -> None:
    code = "import sys, serve_app, serve_app.ddtree, serve_app.errors; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0


def test_the_http_side_starts_without_torch() -> None:
    code = "import sys, serve_app.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0
