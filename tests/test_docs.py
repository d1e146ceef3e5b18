"""The documentation names everything it should: configuration keys, series, and files that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from serve_app.config import Config
from serve_app.metrics import EngineMetrics, GatewayMetrics, ProcessMetrics

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def config_keys() -> list[str]:
    groups = [(name, field.annotation) for name, field in Config.model_fields.items()]
    return [f"{name}.{key}" for name, group in groups if isinstance(group, type) for key in keys_of(group)]


def keys_of(group: type) -> list[str]:
    return list(group.model_fields) if issubclass(group, BaseModel) else []


def series() -> list[str]:
    registry = CollectorRegistry()
    EngineMetrics(registry, "m", 4, ["no_cuda"])
    GatewayMetrics(registry)
    ProcessMetrics(registry)
    names = [family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()]
    # prometheus_client's own have its documentation.
    return [name for name in names if not name.startswith("process_")]


@pytest.mark.parametrize("key", config_keys())
def test_every_configuration_key_is_documented(key: str) -> None:
    assert f"`{key}`" in (DOCS / "configuration.md").read_text()


def test_documented_defaults_are_the_real_ones() -> None:
    text = (DOCS / "configuration.md").read_text()
    documented = {}
    text = text[text.index("## Keys") :]
    for keys, defaults in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", text, re.MULTILINE):
        documented |= dict(zip(re.findall(r"`([^`]+)`", keys), defaults.split(", "), strict=True))
    groups = Config().model_dump()
    real = {f"{name}.{key}": value for name, group in groups.items() for key, value in group.items()}
    assert {key: yaml.safe_load(text) for key, text in documented.items()} == real


@pytest.mark.parametrize("name", series())
def test_every_series_is_documented(name: str) -> None:
    assert f"`{name}`" in (DOCS / "metrics.md").read_text()


def test_documented_series_exist() -> None:
    named = set(re.findall(r"^\| (.*?) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    documented = {name for row in named for name in re.findall(r"`([a-z_]+)`", row)}
    assert documented == set(series())


@pytest.mark.parametrize("page", sorted([*DOCS.glob("*.md"), ROOT / "README.md"]), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", *(ROOT / "benchmarks").glob("*.py"), ROOT / "Makefile"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_modules_that_exist_and_are_found_in_a_checkout(page: Path) -> None:
    """A benchmark that is run by its path does not find the packages beside its folder."""
    text = page.read_text()
    assert not re.findall(r"python3? benchmarks/\S+", text)
    named = set(re.findall(r"-m (benchmarks[.\w]*|load_tests|deploy[.\w]*|serve_app[.\w]*|tests[.\w]*)", text))
    assert [name for name in named if importlib.util.find_spec(name.rstrip(".")) is None] == []


def test_the_architecture_page_names_existing_files() -> None:
    text = (DOCS / "architecture.md").read_text()
    files = set(re.findall(r"`([a-z_/]+(?:\.py|/))`", text))
    missing = [f for f in files if not ((ROOT / "serve_app" / f).exists() or (ROOT / f).exists())]
    assert missing == []
