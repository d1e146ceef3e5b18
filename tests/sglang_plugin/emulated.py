"""Program: answers of SGLang's scheduler on a CPU, in Triton's interpreter, as a line of JSON; see `test_scheduler`.

    TRITON_INTERPRET=1 python -m tests.sglang_plugin.emulated MODE [CHANGES]

CHANGES: JSON of other server arguments; "block" is the drafter's, "asked" in the place of `ASKED`.

What this program does not do: judge.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import sglang_cpu

LIMIT = 80  # iterations, after which it gives up
# (iteration, name, prompt, tokens): a running batch grows past the captured sizes, and shrinks.
ASKED = ((1, "a", [5, 6, 7, 8], 9), (1, "b", [9, 4, 3], 5), (3, "c", [1] * 7, 6))
LEFT_OUT = ("_created", "_seconds", "_seconds_total")


def main() -> None:
    sglang_cpu.prepare()
    import torch

    torch.set_num_threads(1)
    import prometheus_client

    registries: list[Any] = []

    class Kept(prometheus_client.CollectorRegistry):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            registries.append(self)

    prometheus_client.CollectorRegistry = Kept  # the plugin makes its own, in its own time
    mode, given = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    block, asked = given.pop("block", 4), given.pop("asked", ASKED)
    changes: dict[str, Any] = {
        "cuda_graph_max_bs_decode": 2, "cuda_graph_bs_decode": [2], "max_running_requests": 4,
        "max_total_tokens": 2048,
    }  # fmt: skip
    if mode.startswith("ddtree"):
        changes["speculative_eagle_topk"] = 4
    session = sglang_cpu.Session(mode, Path(tempfile.mkdtemp()), vocabulary=16, block=block, **changes | given)
    scheduler = session.scheduler
    seen: dict[str, Any] = {}

    def done(iteration: int) -> bool:
        for batch in (scheduler.running_batch, scheduler.last_batch):
            seen.update({req.rid: req for req in batch.reqs} if batch is not None else {})
        idle = len(seen) == len(asked) and all(req.finished() for req in seen.values()) and not scheduler.last_batch
        return idle or iteration > LIMIT

    session.run([(at, sglang_cpu.request(name, ids, count)) for at, name, ids, count in asked], done)
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    answer: dict[str, Any] = {
        "answers": {name: list(req.output_ids_through_stop) for name, req in sorted(seen.items())},
        "steps": {name: req.spec_verify_ct for name, req in sorted(seen.items())},
        "free": free,
    }
    answer["series"] = {
        ",".join(
            [sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "model")]
        ): sample.value
        for registry in registries
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("ddtree_") and sample.value and not sample.name.endswith(LEFT_OUT)
    }
    print(json.dumps(answer), flush=True)
    os._exit(0)  # SGLang's threads are not asked


if __name__ == "__main__":
    main()
