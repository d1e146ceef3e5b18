"""Every object of every overlay and example against Kubernetes' schemas, and RayService against its own."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.deploy.configs import K8S
from tests.deploy.manifests import Object, of_kind, overlay, ray_service, rendered
from tests.deploy.schema import validated

# Groups that Kubernetes does not bring. RayService is checked below; no schema of the others is at hand.
CUSTOM = {"ray.io/v1", "monitoring.coreos.com/v1", "monitoring.coreos.com/v1alpha1", "gateway.networking.k8s.io/v1"}
SCHEMA = "rayservice-v1.schema.json"
# What somebody may apply: every kustomization that is no part of another.
FOLDERS = sorted(str(path.parent.relative_to(K8S)) for path in K8S.rglob("kustomization.yaml")
                 if path.parent.name != "base" and path.parent.parent.name != "components")  # fmt: skip
each = pytest.mark.parametrize("folder", FOLDERS)


@pytest.fixture(scope="module")
def ray_schema() -> dict[str, Any]:
    """The CRD's schema: $KUBERAY_SCHEMA, or what lies beside the checkout."""
    places = [Path(os.environ.get("KUBERAY_SCHEMA", "")), ROOT.parent / "shared" / "k8s" / SCHEMA]
    places += [parent / "shared" / "k8s" / SCHEMA for parent in ROOT.parents]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        pytest.skip(f"no {SCHEMA}: set KUBERAY_SCHEMA to KubeRay's RayService schema")
    schema: dict[str, Any] = json.loads(found.read_text())["schema"]
    return schema


def objects(folder: str) -> tuple[Object, ...]:
    return overlay(Path(folder).name) if folder.startswith("overlays/") else rendered(folder)


def test_no_folder_is_forgotten() -> None:
    assert {"overlays/b300", "overlays/h200", "overlays/laptop-cpu", "examples/b300-gateway-rdma", "sglang-b300"} <= {
        *FOLDERS
    }


@each
def test_kubernetes_accepts_every_object(folder: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    version = validate.latest_version()
    for item in objects(folder):
        if item["apiVersion"] not in CUSTOM:
            validate.validate(item, version, strict=True)


@each
def test_kuberay_accepts_the_service(folder: str, ray_schema: dict[str, Any]) -> None:
    for item in of_kind(objects(folder), "RayService"):
        assert validated(item, ray_schema) == []


@each
def test_no_rule_of_kuberays_is_about_what_a_service_sets(folder: str, ray_schema: dict[str, Any]) -> None:
    """Rules in CEL, which are not evaluated here: each is about a field, which has its path in the schema."""
    for item in of_kind(objects(folder), "RayService"):
        assert [path for path in ruled(ray_schema) if set_at(item, path)] == []


def ruled(schema: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of properties with rules of their own; [] stands for every entry of a list."""
    if not isinstance(schema, dict):
        return []
    found = [path] if "x-kubernetes-validations" in schema else []
    for name, part in schema.get("properties", {}).items():
        found += ruled(part, (*path, name))
    return found + ruled(schema.get("items"), (*path, "[]")) + ruled(schema.get("additionalProperties"), (*path, "[]"))


def set_at(node: Any, path: tuple[str, ...]) -> bool:
    if not path:
        return True
    if path[0] == "[]":
        entries = node.values() if isinstance(node, dict) else node
        return any(set_at(entry, path[1:]) for entry in entries)
    return path[0] in node and set_at(node[path[0]], path[1:])


def test_paths_of_rules_are_found_in_objects() -> None:
    schema = {"properties": {"a": {"items": {"properties": {"b": {"x-kubernetes-validations": []}}}}}}
    assert ruled(schema) == [("a", "[]", "b")]
    assert set_at({"a": [{}, {"b": 0}]}, ruled(schema)[0]) and not set_at({"a": [{"c": 0}]}, ruled(schema)[0])


def broken(item: Object) -> Object:
    copied: Object = json.loads(json.dumps(item))
    return copied


def test_the_schema_finds_a_misspelt_key(ray_schema: dict[str, Any]) -> None:
    item = broken(ray_service(overlay("laptop-cpu")))
    item["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["rayStartParam"] = {}
    assert any("rayStartParam" in line for line in validated(item, ray_schema))


def test_the_schema_finds_a_wrong_type(ray_schema: dict[str, Any]) -> None:
    item = broken(ray_service(overlay("laptop-cpu")))
    item["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = "two"
    assert any("replicas" in line for line in validated(item, ray_schema))


def test_the_schema_fills_in_defaults(ray_schema: dict[str, Any]) -> None:
    """Required and defaulted at once: an API server adds them before it checks."""
    item = broken(ray_service(overlay("laptop-cpu")))
    del item["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplicas"]
    assert validated(item, ray_schema) == []


def test_the_pages_way_in_steps_is_one_that_kuberay_takes(ray_schema: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (text,) = re.findall(r"^    (upgradeStrategy:\n(?:      .*\n)+)", page, re.MULTILINE)
    item = broken(ray_service(overlay("b300")))
    item["spec"] |= yaml.safe_load(text)
    assert item["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]["maxSurgePercent"]
    assert validated(item, ray_schema) == []
