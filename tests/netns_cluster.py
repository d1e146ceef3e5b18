"""Scenarios on nodes with network namespaces of their own, so each with its own address and proxy; prints JSON.

    python -m tests.netns_cluster head_lost,unplugged

Run by `test_netns`. The head takes no replica, as in docs/deploy.md; its state is in Redis, or in Ray's own RocksDB
store where there is no redis-server. The client is a node too, since Ray wants one beside a driver.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.conftest import RAY_STARTS, chat
from tests.netns import Network
from tests.placement_cluster import Load, config, names_given, nodes, replicas, running, status, until

WORKERS = ("g1", "g2")
HOSTS = ("store", "head", *WORKERS, "client")
PORT, GCS_PORT, REDIS_PORT = 8000, 6379, 6380
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class Long(Load):
    """Streams of half a minute."""

    REPEAT = 40


class Nodes:
    """Starts, kills and starts Ray on the hosts of a network."""

    def __init__(self, network: Network, directory: str, storage: str = "") -> None:
        self.network, self._directory = network, directory
        self.storage = storage or ("redis" if shutil.which("redis-server") else "rocksdb")
        self.gcs = f"{network.address('head')}:{GCS_PORT}"
        # Raylets wait so long for a head that is away.
        self._env = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "120"}

    def start_store(self) -> None:
        if self.storage == "rocksdb":
            self._env |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{self._directory}/gcs"}
            return
        self._env["RAY_REDIS_ADDRESS"] = f"{self.network.address('store')}:{REDIS_PORT}"
        command = [
            "redis-server",
            "--port",
            str(REDIS_PORT),
            "--protected-mode",
            "no",
            "--save",
            "",
            "--bind",
            "0.0.0.0",
        ]
        subprocess.Popen(
            self.network.inside("store", *command), cwd=self._directory,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(1)

    def start_head(self) -> None:
        # Ray looks for a running head among all of the machine's processes, where it finds the others' words of it.
        Path(self._directory, "ray_current_cluster").unlink(missing_ok=True)
        self._start(
            "head", "--head", f"--port={GCS_PORT}", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false",
            f"--temp-dir={self._directory}", '--labels={"name": "head"}',
        )  # fmt: skip

    def start_worker(self, host: str) -> None:
        resources, labels = {"accelerator_type:B300": 1}, f"role=gpu,name={host}"
        self._start(
            host, f"--address={self.gcs}", "--num-cpus=4", "--num-gpus=8", f"--resources={json.dumps(resources)}",
            f"--labels={labels}",
        )  # fmt: skip

    def start_client(self) -> None:
        self._start("client", f"--address={self.gcs}", "--num-cpus=0", "--num-gpus=0", "--labels=name=client")

    def _start(self, host: str, *options: str) -> None:
        """Ray gives a node 30 s to start, which a busy machine can miss, so try again."""
        command = [
            *RAY, "start", *options, f"--node-ip-address={self.network.address(host)}",
            f"--object-store-memory={80 * 1024 * 1024}", "--disable-usage-stats",
        ]  # fmt: skip
        for attempt in range(1, RAY_STARTS + 1):
            # To a file: what daemons inherit stays open.
            with open(f"{self._directory}/{host}.log", "a") as log:
                done = subprocess.run(
                    self.network.inside(host, *command), env=self._env, stdout=log, stderr=log, timeout=120, check=False
                )
            if done.returncode == 0:
                return
            self.network.kill(host)
            if attempt == RAY_STARTS:
                raise RuntimeError(Path(log.name).read_text()[-3000:])


def main() -> None:
    wanted = names_given(__doc__)
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        with Network(*HOSTS) as network:
            ready = Nodes(network, directory)
            ready.start_store()
            ready.start_head()
            for host in WORKERS:
                ready.start_worker(host)
            ready.start_client()
            # A driver needs a node of its own network; fork does not inherit a namespace that we are not in.
            in_client(network, lambda: run(ready, wanted))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def in_client(network: Network, work: Callable[[], None]) -> None:
    """In a child process, whose end is awaited."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, f"the scenarios ended with {code}"
        return
    enter(network.namespace("client"))
    code = 1
    try:
        work()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def enter(namespace: str) -> None:
    import ctypes

    with open(f"/run/netns/{namespace}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def run(ready: Nodes, wanted: list[str]) -> None:
    connect(ready)
    serve.start(proxy_location="EveryNode", http_options={"host": "0.0.0.0", "port": PORT})
    seen: dict[str, Any] = {"storage": ready.storage, "placed": placed(ready.network)}
    scenarios = {"head_lost": head_lost, "unplugged": unplugged}
    for name in wanted:
        began = time.monotonic()
        seen[name] = scenarios[name](ready)
        seen[name]["seconds"] = round(time.monotonic() - began, 1)
    print("SEEN " + json.dumps(seen))


def connect(ready: Nodes) -> None:
    ray.init(address=ready.gcs, log_to_driver=False, namespace="serve")


def placed(network: Network) -> dict[str, Any]:
    """Two replicas, and one ingress, which asks for a CPU and so is not on the head."""
    app = {
        "name": "app", "route_prefix": "/", "import_path": "tests.deploy.fake_app:build_app",
        "args": arguments(),
        "deployments": [{"name": "ingress", "ray_actor_options": {"num_cpus": 0.1}}],
    }  # fmt: skip
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))
    up = until(lambda: "app" in serve.status().applications and status().status == "RUNNING", 120)
    hosts = sorted(network.host_of(actor["Pid"]) for actor in replicas())
    urls = [url_of(network, host) for host in WORKERS]
    served = up and all(until(lambda url=url: whole(url), 60) for url in urls)
    return {"up": up, "hosts": hosts, "nodes": nodes(), "ingress": nodes("ingress"), "served": served}


def arguments() -> dict[str, Any]:
    """With the health checks of a default configuration, which find a node that is silent."""
    args = config(len(WORKERS)).model_dump(exclude={"sglang"})
    args["replica"] |= {"health_check_period_s": 3, "health_check_timeout_s": 6}
    return args


def url_of(network: Network, host: str) -> str:
    return f"http://{network.address(host)}:{PORT}"


def whole(url: str) -> bool:
    """Whether a short request is answered there."""
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat("a b"), timeout=30, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


def head_lost(ready: Nodes) -> dict[str, Any]:
    """Every process of the head is killed while streams run through both workers' proxies; it comes back as it was."""
    urls = [url_of(ready.network, host) for host in WORKERS]
    answers = [Long(url, 15) for url in urls]
    for load in answers:
        load.wait_for_tokens()
    ready.network.kill("head")
    away = [Load(url, 5) for url in urls]
    for load in away:
        load.join()
    began = time.monotonic()
    ready.start_head()
    for load in answers:
        load.join()
    # A driver from before keeps asking the old controller's address; replicas and proxies do not.
    ray.shutdown()
    connect(ready)
    back = until(lambda: running() == len(WORKERS), 120)
    back_s = round(time.monotonic() - began, 1)
    victim = replicas()[0]
    later = [Load(url, 5) for url in urls]
    for load in later:
        load.wait_for_tokens()
    os.kill(victim["Pid"], signal.SIGKILL)
    for load in later:
        load.join()
    healed = until(lambda: len(replicas()) == len(WORKERS) and victim["ActorID"] not in ids(), 120)
    kinds = {"answers": answers, "away": away, "later": later}
    return {**{k: merged(v) for k, v in kinds.items()}, "back": back, "back_s": back_s, "healed": healed}


def unplugged(ready: Nodes) -> dict[str, Any]:
    """The network of a node with a replica fails: no connection is refused or reset, nothing comes any more."""
    lost = next(host for host in WORKERS if host not in nodes("ingress"))
    answers = Long(url_of(ready.network, next(host for host in WORKERS if host != lost)), 30)
    answers.wait_for_tokens()
    began = time.monotonic()
    ready.network.unplug(lost)
    asked = Load(answers.url, 10)
    answers.join()
    asked.join()
    took_s = round(time.monotonic() - began, 1)
    ready.network.kill(lost)
    return {"answers": answers.right(), "asked": asked.right(), "took_s": took_s, "lost": lost}


def ids() -> set[str]:
    return {actor["ActorID"] for actor in replicas()}


def merged(loads: list[Load]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for load in loads:
        for kind, count in load.right().items():
            kinds[kind] = kinds.get(kind, 0) + count
    return kinds


if __name__ == "__main__":
    signal.alarm(560)
    main()
    sys.exit(0)
