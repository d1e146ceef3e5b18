"""Overlays, rendered; and walks over what they hold. Skips where no kustomize is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from tests.deploy.configs import K8S

OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
Object = dict[str, Any]


@cache
def rendered(directory: str) -> tuple[Object, ...]:
    """Objects of `k8s/<directory>`."""
    tool = next(([tool, *words] for tool, words in (("kustomize", ["build"]), ("kubectl", ["kustomize"]))
                 if shutil.which(tool)), None)  # fmt: skip
    if tool is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*tool, str(K8S / directory)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def overlay(name: str) -> tuple[Object, ...]:
    return rendered(f"overlays/{name}")


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def ray_service(objects: tuple[Object, ...]) -> Object:
    (found,) = of_kind(objects, "RayService")
    return found


def templates(objects: tuple[Object, ...]) -> dict[str, Object]:
    """Every pod template, by its component label."""
    cluster = ray_service(objects)["spec"]["rayClusterConfig"]
    found = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    found += [item["spec"]["template"] for item in objects if item["kind"] in ("StatefulSet", "Deployment")]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in found}


def containers(objects: tuple[Object, ...]) -> Iterator[Object]:
    for template in templates(objects).values():
        yield from template["spec"].get("initContainers", [])
        yield from template["spec"]["containers"]


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping within."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from walk(value)


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Kubernetes' label selectors, as far as the manifests use them."""
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In", rule
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()
