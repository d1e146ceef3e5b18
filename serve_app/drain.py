"""`python -m serve_app.drain --deadline 720`: empties this node before it goes, for a pod's preStop or a systemd unit.

Ray is told that the node will go; Serve then starts this node's replicas elsewhere where there is room, and lets those
here end their answers. Its proxy here tells balancers that it goes (`/-/healthz`), and ends once the answers that pass
through it have. Returns when neither is left here, or at the deadline with exit code 1.

What this module does not do: stop Ray, or take the order back (a node that was told to go takes no replica again until
its Ray is started anew).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

PREEMPTION = 2  # ray.core.generated.autoscaler_pb2.DrainNodeReason
POLL_S = 0.5
REPLICA, PROXY = "SERVE_REPLICA::", "SERVE_PROXY_ACTOR-"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the node is empty, 1 when it is not or Ray refuses."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.drain", description=__doc__)
    parser.add_argument("--deadline", type=float, default=600, help="seconds from now (default: %(default)s)")
    parser.add_argument("--address", default="auto", help="of the cluster (default: this machine's)")
    parser.add_argument("--node-id", help="of the node to empty (default: this one)")
    options = parser.parse_args(argv)

    import ray

    try:
        ray.init(address=options.address, namespace="serve", log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        print(f"no Ray runs here, nothing to drain: {error}", file=sys.stderr)
        return 0
    node = options.node_id or ray.get_runtime_context().get_node_id()
    return drain(node, options.deadline)


def drain(node: str, deadline_s: float) -> int:
    """Tell Ray and wait; `node` is its id in hexadecimal. Needs a connection to the cluster."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    end = time.monotonic() + deadline_s
    accepted, why = client.drain_node(node, PREEMPTION, "drained by hand", int((time.time() + deadline_s) * 1000))
    if not accepted:
        print(f"Ray does not drain {node}: {why}", file=sys.stderr)
        return 1
    while left := left_on(node):
        if time.monotonic() > end:
            print(f"{len(left)} are still on {node}: {', '.join(left)}", file=sys.stderr)
            return 1
        time.sleep(POLL_S)
    return 0


def left_on(node: str) -> list[str]:
    """Names of the living replicas and proxies on a node. The head's proxies never go."""
    from ray._private.state import actors

    kinds = (REPLICA,) if _is_head(node) else (REPLICA, PROXY)
    living = (actor for actor in actors().values() if actor["State"] == "ALIVE" and actor["Name"].startswith(kinds))
    return sorted(actor["Name"] for actor in living if actor["Address"]["NodeID"] == node)


def _is_head(node: str) -> bool:
    import ray

    return any(n["NodeID"] == node and "node:__internal_head__" in n["Resources"] for n in ray.nodes())


if __name__ == "__main__":
    sys.exit(main())
