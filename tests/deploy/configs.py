"""Serve configurations that the repository ships, by name, and what two readers make of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from serve_app.config import Config, load_config
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
K8S = ROOT / "k8s"
BARE_METAL = {path.stem: path for path in sorted((DEPLOY / "serve").glob("*.yaml")) if path.stem != "kustomization"}
OVERLAYS = {f"k8s-{path.parent.name}": path for path in sorted((K8S / "overlays").glob("*/serve.yaml"))}
ALL = {**BARE_METAL, **OVERLAYS}


def read(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    return tree


def only_app(tree: dict[str, Any]) -> dict[str, Any]:
    (app,) = tree["applications"]
    found: dict[str, Any] = app
    return found


def config_of(tree: dict[str, Any]) -> Config:
    return load_config(only_app(tree)["args"], use_env=False)
