"""Deploys shipped Serve configurations, one after the other, on a cluster of simulated 8-GPU nodes; prints JSON.

Run by `test_serve_started`, in a process of its own: a Ray process can be in one cluster at a time. Only what a
simulation cannot have is changed: the engine (but the laptop's), the node's facts, the model's directory, the port.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from ray.util.placement_group import placement_group_table

from deploy.gpu_e2e.cluster import add_node, keep_to
from tests.conftest import chat, free_port
from tests.deploy.configs import ALL, only_app, read
from tests.placement_cluster import STORE_BYTES, until

APP = "default"
NODES = 4
DRAINED = "kimi-k2.6-b300"  # the last to run


def main() -> None:
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    cluster = Cluster()
    try:
        # As the head of docs/deploy.md and k8s/: it takes nothing that needs a CPU.
        add_node(cluster, num_cpus=0, temp_dir=keep_to(str(directory)), include_dashboard=False,
                 object_store_memory=STORE_BYTES, labels={"name": "head"})  # fmt: skip
        for index in range(NODES):
            add_node(cluster, num_cpus=24, num_gpus=8, resources={"accelerator_type:B300": 1},
                     object_store_memory=STORE_BYTES, labels={"name": f"n{index}"})  # fmt: skip
        ray.init(address=cluster.address, log_to_driver=False, namespace="serve")
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        print("SEEN " + json.dumps({name: run(name, port, directory) for name in sys.argv[1].split(",")}))
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def run(name: str, port: int, directory: Path) -> dict[str, Any]:
    began = time.monotonic()
    tree = read(ALL[name])
    app = only_app(tree)
    assert app["name"] == APP
    if name != "laptop":
        app["import_path"] = "tests.deploy.fake_app:build_app"
        model = app["args"]["model"]
        model |= {key: str(model_directory(directory)) for key in ("source", "drafter") if key in model}
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate(tree))
    up = until(lambda: status() == "RUNNING", 400)
    seen = {"up": up, "status": status(), "model": app["args"]["model"]["id"]}
    seen |= {"engines": nodes_of("engine"), "ingresses": nodes_of("ingress"), "bundles": bundles()}
    seen["answer"] = ask(f"http://127.0.0.1:{port}", seen["model"]) if up else ""
    if name == DRAINED:
        seen["drained"] = drained(seen["engines"])
    serve.delete(APP)
    return {**seen, "seconds": round(time.monotonic() - began, 1)}


def drained(before: list[str]) -> dict[str, Any]:
    """The node with the only engine is emptied, and the others have room; it takes nothing more afterwards."""
    node = next(node["NodeID"] for node in ray.nodes() if node["Labels"]["name"] == before[0])
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "serve_app.drain", "--address", address, "--node-id", node, "--deadline", "240"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    until(lambda: bool(nodes_of("engine")))  # Ray's list of actors follows a little later
    return {"code": done.returncode, "said": done.stderr[-500:], "engines": nodes_of("engine")}


def model_directory(parent: Path) -> Path:
    """What the node check wants to see on a node's disk."""
    model = parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"0")
    return model


def status() -> str:
    found = serve.status().applications.get(APP)
    return found.status.value if found else ""


def nodes_of(deployment: str) -> list[str]:
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    living = (actor for actor in actors().values() if actor["State"] == "ALIVE")
    replicas = (actor for actor in living if actor["Name"].startswith(f"SERVE_REPLICA::{APP}#{deployment}#"))
    return sorted(labels[actor["Address"]["NodeID"]]["name"] for actor in replicas)


def bundles() -> list[list[dict[str, float]]]:
    living = (group for group in placement_group_table().values() if group["state"] != "REMOVED")
    return [list(group["bundles"].values()) for group in living]


def ask(url: str, model: str) -> str:
    body = {**chat("one two three"), "model": model, "max_tokens": 8, "temperature": 0}
    for _ in range(60):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        if answer.status_code != 404:  # the proxy learns of an application a little later than the status does
            break
        time.sleep(0.5)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


if __name__ == "__main__":
    signal.alarm(1160)
    main()
    sys.exit(0)
