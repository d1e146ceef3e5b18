"""SGLang by itself on Kubernetes: the objects hold together and carry the same options as bare metal."""

from __future__ import annotations

import yaml

from tests.deploy.configs import DEPLOY, K8S
from tests.deploy.manifests import Object, of_kind, rendered, selects, walk
from tests.deploy.test_sglang_args import options

FOLDER = "sglang-b300"


def pod() -> Object:
    (deployment,) = of_kind(rendered(FOLDER), "Deployment")
    found: Object = deployment["spec"]["template"]
    return found


def container() -> Object:
    (found,) = pod()["spec"]["containers"]
    return dict(found)


def test_the_pod_gets_the_options_of_bare_metal() -> None:
    (found,) = of_kind(rendered(FOLDER), "ConfigMap")
    assert found["data"] == {name: (DEPLOY / "sglang" / name).read_text() for name in found["data"]}
    assert [path.split("/")[-1] for path in container()["command"][1:]] == ["start.sh", "kimi-k2.6-b300.args"]


def test_mounts_have_volumes_that_exist() -> None:
    spec, objects = pod()["spec"], rendered(FOLDER)
    names = {(kind, item["metadata"]["name"]) for kind in ("ConfigMap", "PersistentVolumeClaim")
             for item in of_kind(objects, kind)}  # fmt: skip
    assert {v["name"] for v in spec["volumes"]} == {m["name"] for m in container()["volumeMounts"]}
    for node in walk(spec["volumes"]):
        if "configMap" in node:
            assert ("ConfigMap", node["configMap"]["name"]) in names
        if "persistentVolumeClaim" in node:
            assert ("PersistentVolumeClaim", node["persistentVolumeClaim"]["claimName"]) in names


def test_its_key_is_a_reference_to_a_listed_secret() -> None:
    listed = {item["metadata"]["name"]: item["stringData"] for item in
              yaml.safe_load_all((K8S / "secrets.example.yaml").read_text())}  # fmt: skip
    (reference,) = (node["secretKeyRef"] for node in walk(pod()) if "secretKeyRef" in node)
    assert reference["key"] in listed[reference["name"]]
    assert container()["args"][-2:] == ["--api-key", "$(SGLANG_API_KEY)"]


def test_selectors_find_the_pod() -> None:
    labels = pod()["metadata"]["labels"]
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        (item,) = of_kind(rendered(FOLDER), kind)
        assert selects(item["spec"][field], labels)
    (service,) = of_kind(rendered(FOLDER), "Service")
    assert selects({"matchLabels": service["spec"]["selector"]}, labels)


def test_it_takes_as_many_gpus_as_it_has_ranks() -> None:
    resources = container()["resources"]
    gpus = {resources[kind]["nvidia.com/gpu"] for kind in ("requests", "limits")}
    assert gpus == {options()["--tp-size"]}


def test_it_runs_without_privileges_from_a_pinned_image() -> None:
    context = container()["securityContext"]
    assert pod()["spec"]["securityContext"]["runAsNonRoot"] and context["capabilities"] == {"drop": ["ALL"]}
    assert not container()["image"].endswith(":latest") and ":" in container()["image"]
