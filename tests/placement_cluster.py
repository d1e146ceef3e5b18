"""Scenarios on a cluster of simulated 8-GPU nodes, in a process of its own; prints what was seen as JSON.

Arguments: names of scenarios, joined by commas. Later ones build on the cluster that earlier ones left.

Run by `test_placement`. A Ray process can be in one cluster at a time, and pytest's is in another.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import ray
from ray import serve
from ray._private.state import actors
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from deploy.gpu_e2e.cluster import add_node, keep_to
from serve_app.build import bind
from serve_app.config import load_config
from tests.conftest import FAKE_ENGINE, METRICS, chat, free_port

STORE_BYTES = 80 * 1024 * 1024
PREEMPTION = 2  # DrainNodeReason
NODE_READER = "tests.fake_node:read"


def names_given(about: str | None) -> list[str]:
    """The command line's names of scenarios, to be read before anything is built. Exits for --help and without any."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", help="joined by commas")
    return str(parser.parse_args().names).split(",")


def main() -> None:
    wanted = names_given(__doc__)
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    # The cluster's state outlives its server.
    os.environ.update({"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{directory}/gcs"})
    cluster = Cluster()
    try:
        add_node(
            cluster, num_cpus=4, temp_dir=keep_to(directory), include_dashboard=False, object_store_memory=STORE_BYTES
        )
        run(cluster, wanted)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def add_gpu_node(cluster: Cluster, role: str, name: str) -> Any:
    return add_node(
        cluster, num_cpus=4, num_gpus=8, resources={"accelerator_type:B300": 1}, labels={"role": role, "name": name},
        object_store_memory=STORE_BYTES,
    )  # fmt: skip


def run(cluster: Cluster, wanted: list[str]) -> None:
    gpu_nodes = {name: add_gpu_node(cluster, "gpu", name) for name in ("n0", "n1", "n2")}
    # Has GPUs and is not meant.
    add_gpu_node(cluster, "other", "wrong")
    ray.init(address=cluster.address, log_to_driver=False, namespace="serve")
    port = free_port()
    # All nodes have one address here: a proxy on each would share the port, and die with its node's connections.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    url = f"http://127.0.0.1:{port}"
    seen: dict[str, Any] = {}
    scenarios: dict[str, Callable[[], Any]] = {
        "wrong": wrong_nodes,
        "placed": placed,
        "crowded": crowded,
        "controller": lambda: controller_killed(url),
        "gcs": lambda: gcs_killed(cluster, url),
        "proxy": lambda: proxy_killed(url),
        "node_lost": lambda: node_lost(cluster, gpu_nodes, url),
        "drained": lambda: drained(cluster, url),
        "deleted": deleted,
    }
    for name, scenario in scenarios.items():
        if name in wanted:
            began = time.monotonic()
            seen[name] = scenario()
            seen[name]["seconds"] = round(time.monotonic() - began, 1)
    print("SEEN " + json.dumps(seen))


def config(replicas: int, **placement: Any) -> Any:
    return load_config(
        {
            "model": {"id": "fake"},
            "replica": {
                "num_replicas": replicas, "num_gpus": 8, "num_cpus": 1, "max_constructor_retry_count": 2,
                "health_check_period_s": 1, "health_check_timeout_s": 20, "graceful_shutdown_timeout_s": 5,
            },
            "placement": {
                "whole_node": True, "accelerator_type": "B300", "node_labels": {"role": "gpu"}, "preflight": True,
                **placement,
            },
            "metrics": METRICS,
        },
        use_env=False,
    )  # fmt: skip


def deploy(replicas: int, **placement: Any) -> None:
    serve._run(bind(config(replicas, **placement), FAKE_ENGINE, NODE_READER), name="app", _blocking=False)


def until(condition: Any, seconds: float = 200) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.2)
    return False


def replicas(deployment: str = "engine") -> list[dict[str, Any]]:
    living = (actor for actor in actors().values() if actor["State"] == "ALIVE")
    return [actor for actor in living if actor["Name"].startswith(f"SERVE_REPLICA::app#{deployment}#")]


def nodes(deployment: str = "engine") -> list[str]:
    """Names of the nodes that hold replicas."""
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    return sorted(labels[a["Address"]["NodeID"]].get("name", "head") for a in replicas(deployment))


def status() -> Any:
    return serve.status().applications["app"]


def running() -> int:
    return int(status().deployments["engine"].replica_states.get("RUNNING", 0))


def groups() -> list[dict[str, Any]]:
    return [g for g in placement_group_table().values() if g["state"] != "REMOVED"]


def wrong_nodes() -> dict[str, Any]:
    """No node is what the configuration asks for."""
    deploy(3, min_driver="999.1")
    failed = until(lambda: status().status == "DEPLOY_FAILED")
    message = status().deployments["engine"].message
    serve.delete("app")
    return {"failed": failed, "message": message, "left": len(groups())}


def placed() -> dict[str, Any]:
    deploy(3)
    up = until(lambda: status().status == "RUNNING")
    table = groups()
    return {
        "up": up,
        "nodes": nodes(),
        "strategies": [group["strategy"] for group in table],
        "bundles": [list(group["bundles"].values()) for group in table],
    }


def crowded() -> dict[str, Any]:
    """One replica more than there are nodes."""
    deploy(4)
    until(lambda: status().status == "DEPLOYING", 10)
    time.sleep(4)
    found = {"nodes": nodes(), "status": status().status.value}
    deploy(3)
    until(lambda: status().status == "RUNNING")
    return found


def controller_killed(url: str) -> dict[str, Any]:
    """The controller and a replica are killed at once, while streams run."""
    answers = Load(url, 30)
    answers.wait_for_tokens()
    controller = next(a for a in actors().values() if a["State"] == "ALIVE" and "CONTROLLER" in a["Name"])
    before = {actor["ActorID"] for actor in replicas()}
    for pid in (controller["Pid"], replicas()[0]["Pid"]):
        os.kill(pid, signal.SIGKILL)
    answers.join()
    healed = until(lambda: len(replicas()) == 3 and running() == 3 and {a["ActorID"] for a in replicas()} != before)
    tidy = until(lambda: len(groups()) == 3)
    return {"answers": answers.right(), "healed": healed, "groups": len(groups()), "tidy": tidy}


def gcs_killed(cluster: Cluster, url: str) -> dict[str, Any]:
    """The head's state server is killed while streams run, and comes back; then a replica is killed."""
    answers = Load(url, 30)
    answers.wait_for_tokens()
    cluster.head_node.kill_gcs_server()
    time.sleep(2)
    cluster.head_node.start_gcs_server()
    answers.join()
    until(lambda: len(replicas()) == 3)
    victim = replicas()[0]
    later = Load(url, 10)
    later.wait_for_tokens()
    os.kill(victim["Pid"], signal.SIGKILL)
    later.join()
    healed = until(lambda: len(replicas()) == 3 and victim["ActorID"] not in {a["ActorID"] for a in replicas()})
    return {"answers": answers.right(), "later": later.right(), "healed": healed}


def proxy_killed(url: str) -> dict[str, Any]:
    """The process that holds the clients' connections is killed: they break, and none waits for ever."""
    answers = Load(url, 10)
    answers.wait_for_tokens()
    proxy = next(a for a in actors().values() if a["State"] == "ALIVE" and "SERVE_PROXY" in a["Name"])
    os.kill(proxy["Pid"], signal.SIGKILL)
    answers.join()
    back = until(lambda: Load(url, 1).joined().right() == {"whole": 1})
    return {"hung": sum(thread.is_alive() for thread in answers.threads), "back": back}


def node_lost(cluster: Cluster, gpu_nodes: dict[str, Any], url: str) -> dict[str, Any]:
    """A node with a replica goes at once, while streams run; then another joins."""
    lost = next(name for name in gpu_nodes if name not in nodes("ingress"))
    answers = Load(url, 30)
    answers.wait_for_tokens()
    cluster.remove_node(gpu_nodes[lost], allow_graceful=False)
    answers.join()
    add_gpu_node(cluster, "gpu", "n9")
    healed = until(lambda: "n9" in nodes() and lost not in nodes() and running() == 3)
    return {"answers": answers.right(), "healed": healed, "nodes": nodes(), "lost": lost}


def drained(cluster: Cluster, url: str) -> dict[str, Any]:
    """A node is told to empty itself while streams run, and a spare one is there."""
    add_gpu_node(cluster, "gpu", "n10")
    name = nodes()[0]
    leaving = next(node["NodeID"] for node in ray.nodes() if node["Labels"].get("name") == name)
    answers = Load(url, 30)
    answers.wait_for_tokens()
    deadline_ms = int((time.time() + 60) * 1000)
    accepted, why = GcsClient(address=cluster.address).drain_node(leaving, PREEMPTION, "maintenance", deadline_ms)
    answers.join()
    moved = until(lambda: "n10" in nodes() and name not in nodes() and running() == 3)
    return {"accepted": accepted, "why": why, "answers": answers.right(), "moved": moved, "nodes": nodes()}


def deleted() -> dict[str, Any]:
    serve.delete("app")
    return {"left": until(lambda: not groups()) and len(groups())}


class Load:
    """Streams that run in threads of this process."""

    WORDS = "a b c d e f g h"
    REPEAT = 8

    def __init__(self, url: str, count: int) -> None:
        self.url, self.count = url, count
        self.texts: list[str] = [""] * count
        self.ends: list[str] = [""] * count
        self.threads = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def _read(self, index: int) -> None:
        body = chat(f"{self.WORDS} repeat={self.REPEAT} delay=0.1", stream=True, temperature=0)
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/chat/completions", json=body, timeout=180, trust_env=False
            ) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            self.ends[index] += str(event["error"]["code"])
                        for choice in event.get("choices", ()):
                            self.texts[index] += choice["delta"].get("content", "")
                    elif line:
                        self.ends[index] += line
        except httpx.HTTPError as error:
            self.ends[index] += repr(error)

    def wait_for_tokens(self) -> None:
        until(lambda: all(self.texts))

    def join(self) -> None:
        for thread in self.threads:
            thread.join(180)

    def joined(self) -> "Load":
        self.join()
        return self

    def right(self) -> dict[str, int]:
        """How each ended, counted; "whole" is the text of an undisturbed run, once, and [DONE]."""
        whole = " ".join([self.WORDS] * self.REPEAT)
        kinds: dict[str, int] = {}
        for text, end in zip(self.texts, self.ends, strict=True):
            kind = "whole" if (text, end) == (whole, "data: [DONE]") else f"{len(text)} of {len(whole)}: {end[:80]}"
            kinds[kind] = kinds.get(kind, 0) + 1
        return kinds


if __name__ == "__main__":
    signal.alarm(1160)
    main()
    sys.exit(0)
