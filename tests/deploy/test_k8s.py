"""Overlays hold together: references resolve, selectors select, nothing is privileged or floating."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app import proxy
from serve_app.launch import SERVE_SWITCHES
from tests.deploy.configs import BARE_METAL, DEPLOY, K8S, config_of, lacks_of_haproxy, only_app, read
from tests.deploy.manifests import (
    OVERLAYS,
    Object,
    containers,
    of_kind,
    overlay,
    ray_service,
    rendered,
    selects,
    templates,
    walk,
)

each = pytest.mark.parametrize("name", OVERLAYS)
GPU = "nvidia.com/gpu"
# The operator makes these of the RayService's name.
GENERATED = {"ddtree-serve-svc": {8000}, "ddtree-head-svc": {6379, 8265, 10001, 8000, 8080}}


def serve_config(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(ray_service(overlay(name))["spec"]["serveConfigV2"])
    return tree


def engine_pods(name: str) -> Object:
    (group,) = ray_service(overlay(name))["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    found: Object = group
    return found


@each
def test_the_service_carries_the_overlays_serve_configuration(name: str) -> None:
    assert serve_config(name) == read(K8S / "overlays" / name / "serve.yaml")


@pytest.mark.parametrize(("name", "file"), [("b300", "kimi-k2.6-b300-nodes"), ("h200", "gpu-node")])
def test_it_is_the_bare_metal_one_but_for_numbers(name: str, file: str) -> None:
    trees = [only_app(tree) for tree in (serve_config(name), read(BARE_METAL[file]))]
    for tree in trees:
        del tree["args"]["replica"]["num_replicas"], tree["args"]["ingress"]["num_replicas"]
    assert trees[0] == trees[1]


@each
def test_everything_is_in_one_namespace(name: str) -> None:
    spaces = {item["metadata"].get("namespace") for item in overlay(name) if item["kind"] != "Namespace"}
    assert spaces == {"ddtree"}


def listed_secrets() -> set[tuple[str, str]]:
    """Names and keys of those that the manifests expect to find."""
    examples = yaml.safe_load_all((K8S / "secrets.example.yaml").read_text())
    return {(item["metadata"]["name"], key) for item in examples for key in item["stringData"]}


@each
def test_secrets_are_references_to_listed_ones(name: str) -> None:
    named = set()
    for node in walk(overlay(name)):
        if reference := node.get("secretKeyRef"):
            named.add((reference["name"], reference["key"]))
        if "secretName" in node:
            named |= {(node["secretName"], item["key"]) for item in node["items"]}
    assert named and named <= listed_secrets()
    assert of_kind(overlay(name), "Secret") == []


def test_the_example_holds_no_secret() -> None:
    examples = yaml.safe_load_all((K8S / "secrets.example.yaml").read_text())
    assert {value for item in examples for value in item["stringData"].values()} == {""}


@each
def test_config_maps_claims_and_accounts_exist(name: str) -> None:
    objects = overlay(name)
    names = {kind: {item["metadata"]["name"] for item in of_kind(objects, kind)} for kind in
             ("ConfigMap", "PersistentVolumeClaim", "ServiceAccount")}  # fmt: skip
    for node in walk(list(templates(objects).values())):
        if "configMap" in node:
            assert node["configMap"]["name"] in names["ConfigMap"]
        if "persistentVolumeClaim" in node:
            assert node["persistentVolumeClaim"]["claimName"] in names["PersistentVolumeClaim"]
        if "serviceAccountName" in node:
            assert node["serviceAccountName"] in names["ServiceAccount"]


@each
def test_mounts_have_volumes_and_volumes_mounts(name: str) -> None:
    for item in of_kind(overlay(name), "StatefulSet"):
        claims = {claim["metadata"]["name"] for claim in item["spec"]["volumeClaimTemplates"]}
    for component, template in templates(overlay(name)).items():
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]} | (claims if component == "redis" else set())
        assert volumes == {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}


@each
def test_selectors_find_pods(name: str) -> None:
    labels = [template["metadata"]["labels"] for template in templates(overlay(name)).values()]
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector"),
                        ("PodMonitor", "selector"), ("StatefulSet", "selector")):  # fmt: skip
        for item in of_kind(overlay(name), kind):
            assert any(selects(item["spec"][field], each_pod) for each_pod in labels), item["metadata"]["name"]
    for item in of_kind(overlay(name), "Service"):
        assert any(selects({"matchLabels": item["spec"]["selector"]}, each_pod) for each_pod in labels)


@each
def test_every_pod_is_under_a_policy_that_denies(name: str) -> None:
    (deny,) = (p for p in of_kind(overlay(name), "NetworkPolicy")
               if p["spec"]["policyTypes"] == ["Ingress"] and "ingress" not in p["spec"])  # fmt: skip
    for template in templates(overlay(name)).values():
        assert selects(deny["spec"]["podSelector"], template["metadata"]["labels"])


def test_pods_with_local_weights_reach_nothing_outside() -> None:
    """Each rule names pods; the one that leaves the namespace is for DNS."""
    policies = [p["spec"] for p in of_kind(overlay("b300"), "NetworkPolicy") if p["spec"]["policyTypes"] == ["Egress"]]
    (deny,) = (spec for spec in policies if "egress" not in spec)
    assert all(selects(deny["podSelector"], t["metadata"]["labels"]) for t in templates(overlay("b300")).values())
    rules = [rule for spec in policies for rule in spec.get("egress", ())]
    assert all("podSelector" in peer for rule in rules for peer in rule["to"])
    outside = [rule for rule in rules if any("namespaceSelector" in peer for peer in rule["to"])]
    assert [[port["port"] for port in rule["ports"]] for rule in outside] == [[53, 53]]


@pytest.mark.parametrize(("component", "port"), [("head", 6379), ("engine", None)])
def test_redis_is_open_to_the_head_alone(component: str, port: int | None) -> None:
    pods = {name: template["metadata"]["labels"] for name, template in templates(overlay("b300")).items()}
    specs = (policy["spec"] for policy in of_kind(overlay("b300"), "NetworkPolicy"))
    rules = [rule for spec in specs if selects(spec["podSelector"], pods[component]) for rule in spec.get("egress", ())]
    open_to = [rule for rule in rules for peer in rule["to"]
               if "namespaceSelector" not in peer and selects(peer["podSelector"], pods["redis"])]  # fmt: skip
    assert [entry["port"] for rule in open_to for entry in rule["ports"]] == ([port] if port else [])


@each
def test_drains_of_nodes_take_one_engine_pod_at_a_time(name: str) -> None:
    """In whole pods that must stay: Kubernetes cannot compute another budget for pods of a RayCluster."""
    (budget,) = of_kind(overlay(name), "PodDisruptionBudget")
    assert budget["spec"] == {"minAvailable": engine_pods(name)["replicas"] - 1, "selector": budget["spec"]["selector"]}


@each
def test_the_object_store_leaves_shared_memory_to_the_engines(name: str) -> None:
    group = engine_pods(name)
    (shm,) = (volume["emptyDir"] for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shm")
    assert int(group["rayStartParams"]["object-store-memory"]) <= int(shm["sizeLimit"][:-2]) * 1024**3 / 4


@each
def test_named_ports_exist(name: str) -> None:
    pods = templates(overlay(name))
    for template in pods.values():
        for container in template["spec"]["containers"]:
            ports = {port["name"] for port in container["ports"]}
            named = {node["httpGet"]["port"] for node in walk(container) if "httpGet" in node}
            assert named <= ports, container["name"]
    for item in of_kind(overlay(name), "PodMonitor"):
        for component, template in pods.items():
            if selects(item["spec"]["selector"], template["metadata"]["labels"]) and component != "redis":
                ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
                assert {endpoint["port"] for endpoint in item["spec"]["podMetricsEndpoints"]} <= ports
    for item in of_kind(overlay(name), "Service"):
        ports = {port["name"] for port in pods["redis"]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in item["spec"]["ports"]} <= ports


@each
def test_the_configured_ports_are_those_of_pods_and_policies(name: str) -> None:
    tree, objects = serve_config(name), overlay(name)
    engine = templates(objects)["engine"]["spec"]["containers"][0]
    assert {port["name"]: port["containerPort"] for port in engine["ports"]}["serve"] == tree["http_options"]["port"]
    (ray,) = (p for p in of_kind(objects, "NetworkPolicy") if p["metadata"]["name"] == "ddtree-ray")
    ranges = [(p["port"], p["endPort"]) for rule in ray["spec"]["ingress"] for p in rule.get("ports", ()) if
              "endPort" in p]  # fmt: skip
    first = config_of(tree).metrics.port
    assert ranges == [(first, first + 63)]


@each
def test_redis_is_where_ray_looks(name: str) -> None:
    options = ray_service(overlay(name))["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    host, port = options["redisAddress"].split(":")
    (service,) = (s for s in of_kind(overlay(name), "Service") if s["metadata"]["name"] == host)
    assert [entry["port"] for entry in service["spec"]["ports"]] == [int(port)]


@each
def test_services_that_urls_and_routes_name_exist(name: str) -> None:
    for item in of_kind(overlay(name), "ScrapeConfig"):
        for source in item["spec"]["httpSDConfigs"]:
            parts = re.fullmatch(r"http://([a-z-]+)\.ddtree\.svc:(\d+)(/.*)", source["url"])
            assert parts and int(parts[2]) in GENERATED[parts[1]]
            assert f'"{parts[3]}"' in (K8S.parent / "serve_app" / "ingress" / "routes.py").read_text()


@each
def test_images_are_pinned(name: str) -> None:
    for container in containers(overlay(name)):
        assert re.fullmatch(r"[a-z0-9./-]+(:[0-9][A-Za-z0-9.-]*|@sha256:[0-9a-f]{64})", container["image"])


@each
def test_nothing_is_privileged(name: str) -> None:
    for template in templates(overlay(name)).values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in context


@each
def test_pods_hold_no_kubernetes_token(name: str) -> None:
    assert all(t["spec"]["automountServiceAccountToken"] is False for t in templates(overlay(name)).values())


@pytest.mark.parametrize("name", ["h200", "b300"])
def test_engine_pods_take_whole_nodes(name: str) -> None:
    group = engine_pods(name)
    spec = group["template"]["spec"]
    resources = spec["containers"][0]["resources"]
    assert resources["requests"][GPU] == resources["limits"][GPU] == "8"
    assert [t["key"] for t in spec["tolerations"]] == [GPU] and spec["nodeSelector"]
    config = config_of(serve_config(name))
    assert config.replica.num_replicas * config.replica.num_gpus == 8 * group["replicas"]


@each
def test_memory_limits_are_requests_and_hold_shared_memory(name: str) -> None:
    gib = {"Mi": 1 / 1024, "Gi": 1}
    for container in containers(overlay(name)):
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
    spec = engine_pods(name)["template"]["spec"]
    (shm,) = (volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm")
    sizes = [float(text[:-2]) * gib[text[-2:]] for text in
             (shm["sizeLimit"], spec["containers"][0]["resources"]["limits"]["memory"])]  # fmt: skip
    assert shm["medium"] == "Memory" and sizes[0] < sizes[1]
    assert sizes[0] >= config_of(serve_config(name)).placement.min_shm_gib


@each
def test_ray_counts_the_cpus_that_a_pod_requests_and_they_suffice(name: str) -> None:
    group, config = engine_pods(name), config_of(serve_config(name))
    cpus = group["rayStartParams"]["num-cpus"]
    assert cpus == group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
    ingress = config.ingress.num_replicas * 1.0
    assert config.replica.num_replicas * config.replica.num_cpus + ingress <= group["replicas"] * int(cpus)


@each
def test_the_head_serves_nothing(name: str) -> None:
    spec = ray_service(overlay(name))["spec"]
    head = spec["rayClusterConfig"]["headGroupSpec"]
    assert spec["excludeHeadPodFromServeSvc"] is True
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    assert GPU not in str(head["template"]["spec"]["containers"][0]["resources"])


@each
def test_every_ray_pod_has_the_applications_switches(name: str) -> None:
    for component in ("head", "engine"):
        env = {e["name"]: e["value"] for e in templates(overlay(name))[component]["spec"]["containers"][0]["env"]}
        assert SERVE_SWITCHES.items() <= env.items()
        assert lacks_of_haproxy(env, config_of(serve_config(name)).ingress.request_timeout_s) == {}
        # HAProxy's own pages are not for the cluster.
        assert env["HAPROXY_PAGES_HOST"] == "127.0.0.1"


def test_the_image_has_haproxy_where_the_pods_look_for_it() -> None:
    """`python -m serve_app.proxy DIRECTORY` makes these links."""
    env = {e["name"]: e["value"] for e in templates(overlay("b300"))["head"]["spec"]["containers"][0]["env"]}
    paths = {Path(env[name]) for name in (proxy.BINARY, proxy.STARTED)}
    assert {path.name for path in paths} == {"ddtree-haproxy", "haproxy"}
    (directory,) = {str(path.parent) for path in paths}
    assert f"-m serve_app.proxy {directory}" in (DEPLOY / "Dockerfile").read_text()


@each
def test_pods_are_killed_only_after_the_drain(name: str) -> None:
    spec = engine_pods(name)["template"]["spec"]
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    deadline = int(command[command.index("--deadline") + 1])
    drain = config_of(serve_config(name)).replica.graceful_shutdown_timeout_s
    assert drain < deadline < spec["terminationGracePeriodSeconds"]


@each
def test_every_container_has_all_probes_it_needs(name: str) -> None:
    for container in containers(overlay(name)):
        assert {"livenessProbe", "readinessProbe"} <= set(container)


@each
def test_the_raylets_health_is_asked_of_its_agent(name: str) -> None:
    """The dashboard's port answers 404 there, and the head would be killed for it."""
    asked = {(node["httpGet"]["path"], node["httpGet"]["port"]) for node in walk(overlay(name)) if "httpGet" in node}
    assert {port for path, port in asked if path == "/api/local_raylet_healthz"} == {"agent"}


@each
def test_ray_processes_need_a_token(name: str) -> None:
    assert ray_service(overlay(name))["spec"]["rayClusterConfig"]["authOptions"]["mode"] == "token"


@each
def test_a_change_of_pods_starts_no_second_cluster(name: str) -> None:
    assert ray_service(overlay(name))["spec"]["upgradeStrategy"]["type"] == "None"


@each
def test_the_clusters_ray_is_the_applications(name: str) -> None:
    import ray

    assert ray_service(overlay(name))["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__


def test_optional_components_render() -> None:
    """Gateway and RDMA on top of the GPU overlay."""
    objects = rendered("examples/b300-gateway-rdma")
    (route,) = of_kind(objects, "HTTPRoute")
    (back,) = route["spec"]["rules"][0]["backendRefs"]
    assert back["port"] in GENERATED[back["name"]]
    pods = templates(objects)
    (gateway,) = of_kind(objects, "Gateway")
    assert [parent["name"] for parent in route["spec"]["parentRefs"]] == [gateway["metadata"]["name"]]
    certificates = {ref["name"] for listener in gateway["spec"]["listeners"] for ref in
                    listener["tls"]["certificateRefs"]}  # fmt: skip
    assert certificates <= {name for name, key in listed_secrets() if key == "tls.key"}
    (policy,) = (p["spec"] for p in of_kind(objects, "NetworkPolicy") if p["metadata"]["name"] == "ddtree-gateway")
    assert selects(policy["podSelector"], pods["engine"]["metadata"]["labels"])
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"].popitem()[1] == gateway["metadata"]["name"]
    limits = pods["engine"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["rdma/hca_shared_devices"] == "1"
