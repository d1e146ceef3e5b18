"""Serve's HAProxy on every node of a cluster, in network namespaces (see `netns_cluster`); prints JSON.

    python -m tests.netns_haproxy crowded,replica_killed,rolled

Run by `test_netns_haproxy`, with the switches of `serve_app.proxy` in the environment. Clients ask every node's own
HAProxy. There are an ingress and a replica on each of two nodes, and a third that joins when one is drained. The first
word: how much of a node an ingress asks for.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import httpx
import ray
from ray import serve
from ray._private.state import actors
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from serve_app import proxy
from tests.netns import Network
from tests.netns_cluster import PORT, Long, Nodes, connect, in_client, merged, url_of, whole
from tests.placement_cluster import Load, config, names_given, nodes, replicas, running, status, until
from tests.test_rolling import Load as Asking

FIRST, SPARE = ("g1", "g2"), "g3"
# Of a node's four one is its replica's: one ingress fits, or several, as the change of a configuration needs.
INGRESS_CPUS = {"alone": 1.6, "crowded": 0.1}
HOSTS = ("head", *FIRST, SPARE, "client")
PROXY_ACTOR, FALLBACK = "SERVE_PROXY_ACTOR-", "fallback-"


def main() -> None:
    size, *wanted = names_given(__doc__)
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ.update(proxy.cluster_switches(f"{directory}/hp"))
    try:
        with Network(*HOSTS) as network:
            ready = Nodes(network, directory, "rocksdb")
            ready.start_store()
            ready.start_head()
            for host in FIRST:
                ready.start_worker(host)
            ready.start_client()
            in_client(network, lambda: run(ready, INGRESS_CPUS[size], wanted))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(ready: Nodes, cpus: float, wanted: list[str]) -> None:
    connect(ready)
    serve.start(proxy_location="EveryNode", http_options={"host": "0.0.0.0", "port": PORT})
    seen: dict[str, Any] = {"placed": placed(ready.network, cpus)}
    scenarios: dict[str, Callable[[Nodes], dict[str, Any]]] = {
        "told": told,
        "replica_killed": replica_killed,
        "ingress_killed": ingress_killed,
        "manager_killed": manager_killed,
        "rolled": lambda ready: rolled(ready, cpus),
        "drained": drained,
        "unplugged": unplugged,
    }
    for name in wanted:
        began = time.monotonic()
        seen[name] = scenarios[name](ready)
        seen[name]["seconds"] = round(time.monotonic() - began, 1)
        print(name, seen[name], file=sys.stderr, flush=True)
    print("SEEN " + json.dumps(seen))


def deploy(cpus: float, **engine: Any) -> None:
    """An ingress and a replica on each of two nodes; the ingress asks for CPUs and so is not on the head."""
    args = config(len(FIRST)).model_dump(exclude={"sglang"})
    args["replica"] |= {"health_check_period_s": 3, "health_check_timeout_s": 6, "graceful_shutdown_timeout_s": 30}
    args["ingress"] |= {"num_replicas": len(FIRST)}
    args["engine"] |= engine
    app = {
        "name": "app", "route_prefix": "/", "import_path": "tests.deploy.fake_app:build_app", "args": args,
        "deployments": [{"name": "ingress", "ray_actor_options": {"num_cpus": cpus}}],
    }  # fmt: skip
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))


def placed(network: Network, cpus: float) -> dict[str, Any]:
    deploy(cpus)
    up = until(lambda: "app" in serve.status().applications and status().status == "RUNNING", 120)
    hosts = ("head", *FIRST)
    served = {host: up and until(lambda url=url_of(network, host): whole(url), 60) for host in hosts}
    listeners = {host: listener(network, host) for host in hosts}
    return {"replicas": nodes(), "ingresses": nodes("ingress"), "served": served, "listeners": listeners}


def listener(network: Network, host: str) -> str:
    """The program that has the service's port there, or ""."""
    command = network.inside(host, "ss", "-Hltnp", f"sport = :{PORT}")
    said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return said.split('(("')[1].split('"')[0] if '(("' in said else said


def get(url: str) -> int:
    """A status, 0 where nothing answers."""
    try:
        return httpx.get(url, timeout=30, trust_env=False).status_code
    except httpx.HTTPError:
        return 0


def told(ready: Nodes) -> dict[str, Any]:
    """What each node says to a wrong body, and to balancers."""
    found: dict[str, Any] = {}
    for host in ("head", *FIRST):
        url = url_of(ready.network, host)
        wrong = httpx.post(f"{url}/v1/chat/completions", json={"model": "none"}, timeout=30, trust_env=False)
        found[host] = [wrong.json()["error"]["type"], get(f"{url}/ready"), get(f"{url}/-/healthz")]
    return {"hosts": found}


def replica_killed(ready: Nodes) -> dict[str, Any]:
    loads = [Load(url_of(ready.network, host), 15) for host in FIRST]
    for load in loads:
        load.wait_for_tokens()
    os.kill(replicas()[0]["Pid"], signal.SIGKILL)
    for load in loads:
        load.join()
    return {"answers": merged(loads), "healed": until(lambda: running() == len(replicas()) == len(FIRST), 120)}


def ingress_killed(ready: Nodes) -> dict[str, Any]:
    """A node's own ingress: what it had begun ends, what comes later is answered by the other node's."""
    loads = [Load(url_of(ready.network, host), 10) for host in FIRST]
    for load in loads:
        load.wait_for_tokens()
    victim = next(a for a in replicas("ingress") if ready.network.host_of(a["Pid"]) == FIRST[0])
    os.kill(victim["Pid"], signal.SIGKILL)
    later = Load(loads[0].url, 10).joined()
    for load in loads:
        load.join()
    healed = until(lambda: len(replicas("ingress")) == len(FIRST) and victim["ActorID"] not in ids(), 120)
    return {
        "hung": sum(thread.is_alive() for thread in loads[0].threads), "elsewhere": loads[1].right(),
        "later": later.right(), "healed": healed,
    }  # fmt: skip


def manager_killed(ready: Nodes) -> dict[str, Any]:
    """The actor of Serve's that looks after a node's HAProxy, which goes with it."""
    load = Load(url_of(ready.network, FIRST[0]), 10)
    load.wait_for_tokens()
    old = managers(ready)[FIRST[0]]
    os.kill(old, signal.SIGKILL)
    load.join()
    again = until(lambda: managers(ready).get(FIRST[0], old) != old, 90)
    back = until(lambda: whole(load.url), 60)
    return {"hung": sum(thread.is_alive() for thread in load.threads), "again": again, "back": back}


def managers(ready: Nodes) -> dict[str, int]:
    """Host → process."""
    living = (a for a in actors().values() if a["State"] == "ALIVE" and a["Name"].startswith(PROXY_ACTOR))
    return {ready.network.host_of(a["Pid"]): a["Pid"] for a in living if FALLBACK not in a["Name"]}


def rolled(ready: Nodes, cpus: float) -> dict[str, Any]:
    """Every ingress and replica is replaced, since the configuration changes."""
    before = ids()
    with Asking(url_of(ready.network, FIRST[0]), 5) as one, Asking(url_of(ready.network, FIRST[1]), 5) as two:
        deploy(cpus, max_queued=17)
        done = until(lambda: not ids() & before and status().status == "RUNNING", 120)
    return {"done": done, "answers": dict(one.outcomes + two.outcomes)}


def drained(ready: Nodes) -> dict[str, Any]:
    """A node is emptied as its unit does it, and then all its processes end. Clients of its own HAProxy go elsewhere
    once that says that it goes; those of another node's never notice."""
    ready.start_worker(SPARE)
    until(lambda: node_id(SPARE) != "", 60)
    stay, leave = (url_of(ready.network, host) for host in FIRST)
    through = Long(leave, 5)
    through.wait_for_tokens()
    with Asking(stay, 6) as load:
        # By id: this machine's processes are all visible to Ray, which otherwise takes any head that it finds.
        words = ("--deadline", "300", "--address", ready.gcs, "--node-id", node_id(FIRST[1]))
        command = ready.network.inside(FIRST[1], sys.executable, "-m", "serve_app.drain", *words)
        with subprocess.Popen(command, stdout=sys.stderr) as drain:
            told_so = until(lambda: get(f"{leave}/-/healthz") == 503, 60)
            code = drain.wait(320)
        left = listener(ready.network, FIRST[1])
        ready.network.kill(FIRST[1])
    through.join()
    moved = until(lambda: nodes() == nodes("ingress") == [FIRST[0], SPARE] and running() == len(FIRST), 120)
    return {
        "code": code, "told": told_so, "left": left, "through": through.right(), "answers": dict(load.outcomes),
        "moved": moved,
    }  # fmt: skip


def unplugged(ready: Nodes) -> dict[str, Any]:
    """The network of a node with a replica and an ingress fails, while streams run through another node's HAProxy."""
    lost = FIRST[0]
    other = next(host for host in nodes("ingress") if host != lost)
    load = Long(url_of(ready.network, other), 30)
    load.wait_for_tokens()
    began = time.monotonic()
    ready.network.unplug(lost)
    asked = Load(load.url, 10)
    load.join()
    asked.join()
    took_s = round(time.monotonic() - began, 1)
    ready.network.kill(lost)
    return {"answers": load.right(), "asked": asked.right(), "took_s": took_s}


def ids() -> set[str]:
    return {actor["ActorID"] for name in ("engine", "ingress") for actor in replicas(name)}


def node_id(host: str) -> str:
    return next((n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Labels"].get("name") == host), "")


if __name__ == "__main__":
    signal.alarm(560)
    main()
    sys.exit(0)
