"""Serve configurations that the repository ships, by name, and what two readers make of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from serve_app import proxy
from serve_app.config import Config, load_config
from tests.conftest import ROOT

HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
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


def lacks_of_haproxy(env: Mapping[str, str], longest_s: float) -> dict[str, str]:
    """What a node's environment lacks to have Serve's HAProxy in front. `longest_s`: what an answer may take."""
    wanted = proxy.switches(proxy.Choice("haproxy", ""), longest_s)
    # Paths are the machine's, and for how long old answers may go on, the longest's.
    paths = (proxy.BINARY, proxy.STARTED)
    lacks = {
        name: value for name, value in wanted.items() if name not in (*paths, HARD_STOP) and env.get(name) != value
    }
    lacks |= {name: "a path" for name in paths if not env.get(name, "").startswith("/")}
    if int(env.get(HARD_STOP, 0)) < int(wanted[HARD_STOP]):
        lacks[HARD_STOP] = wanted[HARD_STOP]
    return lacks
