"""Every object of every overlay against Kubernetes' schemas, and RayService against its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.deploy.manifests import OVERLAYS, Object, overlay, ray_service
from tests.deploy.schema import validated

# Groups that Kubernetes does not bring. RayService is checked below; no schema of the others is at hand.
CUSTOM = {"ray.io/v1", "monitoring.coreos.com/v1", "monitoring.coreos.com/v1alpha1", "gateway.networking.k8s.io/v1"}
SCHEMA = "rayservice-v1.schema.json"
each = pytest.mark.parametrize("name", OVERLAYS)


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


@each
def test_kubernetes_accepts_every_object(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    version = validate.latest_version()
    for item in overlay(name):
        if item["apiVersion"] not in CUSTOM:
            validate.validate(item, version, strict=True)


@each
def test_kuberay_accepts_the_service(name: str, ray_schema: dict[str, Any]) -> None:
    assert validated(ray_service(overlay(name)), ray_schema) == []


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
