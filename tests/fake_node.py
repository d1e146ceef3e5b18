"""Facts of a simulated node, from its Ray labels: `gpus`, how many it "has"; anything else is right."""

import ray

from serve_app.topology import Gpu, NodeFacts


def read():
    labels = ray.get_runtime_context().get_node_labels()
    gpus = int(labels.get("gpus", 8))
    return NodeFacts(
        gpus=(Gpu("NVIDIA B300", 268, 267),) * gpus, driver="580.95", cuda="13.0", memory_gib=900, shm_gib=64
    )
