"""A Ray cluster of this run's own, as a process: `python -m deploy.gpu_e2e.cluster SPEC`.

SPEC is JSON: {"temp_dir": …, "nodes": [{"num_cpus": …, "num_gpus": …, "env": {…}}, …]}; the first node is the head.
Several nodes of one machine stand for several machines. Prints one line, {"address": …}, and ends the cluster when its
standard input closes.

What this module does not do: join or touch any other cluster.
"""

from __future__ import annotations

import json
import sys
from typing import Any

# Ray gives a node 30 s to start, which a busy machine can miss.
ATTEMPTS = 3
STORE_BYTES = 200 * 1024 * 1024


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for index, node in enumerate(spec["nodes"]):
            first = {"temp_dir": spec["temp_dir"], "include_dashboard": False} if index == 0 else {}
            _add(cluster, node, first)
        print(json.dumps({"address": cluster.address}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


def _add(cluster: Any, node: dict[str, Any], first: dict[str, Any]) -> None:
    options = {
        "num_cpus": node["num_cpus"], "num_gpus": node["num_gpus"],
        "env_vars": node.get("env") or None, "object_store_memory": STORE_BYTES,
    }  # fmt: skip
    for attempt in range(1, ATTEMPTS + 1):
        try:
            cluster.add_node(**options, **first)
            return
        except Exception:
            if attempt == ATTEMPTS:
                raise


if __name__ == "__main__":
    main()
