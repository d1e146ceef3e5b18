"""A Ray cluster of this run's own, as a process: `python -m deploy.gpu_e2e.cluster SPEC`.

SPEC is JSON: {"directory": …, "nodes": [{"num_cpus": …, "num_gpus": …, "env": {…}}, …]}; the first node is the head.
Several nodes of one machine stand for several machines. Prints one line, {"address": …}, and ends the cluster when its
standard input closes.

What this module does not do: join or touch any other cluster.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# Ray gives a node 30 s to start, which a busy machine can miss.
ATTEMPTS = 3
STORE_BYTES = 200 * 1024 * 1024


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    temp_dir = keep_to(spec["directory"])
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for index, node in enumerate(spec["nodes"]):
            first = {"temp_dir": temp_dir, "include_dashboard": False} if index == 0 else {}
            options = {"num_cpus": node["num_cpus"], "num_gpus": node["num_gpus"], "env_vars": node.get("env") or None}
            add_node(cluster, object_store_memory=STORE_BYTES, **options, **first)
        print(json.dumps({"address": cluster.address}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


def keep_to(directory: str) -> str:
    """The `temp_dir` for a cluster's first node, below `directory`. Ray's class for clusters also writes the newest
    one's address into the machine's own directory for Ray: others would join it by "auto", and where nothing of Ray's
    has run yet its first node fails."""
    os.environ["RAY_TMPDIR"] = directory
    temp_dir = Path(directory) / "ray"
    temp_dir.mkdir(exist_ok=True)
    return str(temp_dir)


def add_node(cluster: Any, **options: Any) -> Any:
    """`cluster.add_node`, tried again where it fails; what a failed attempt has started is ended first, since it would
    come up as one node too many."""
    for attempt in range(1, ATTEMPTS + 1):
        before = set(cluster.list_all_nodes())
        try:
            return cluster.add_node(**options)
        except Exception:
            for node in set(cluster.list_all_nodes()) - before:
                cluster.remove_node(node, allow_graceful=False)
            if attempt == ATTEMPTS:
                raise
            traceback.print_exc()


if __name__ == "__main__":
    main()
