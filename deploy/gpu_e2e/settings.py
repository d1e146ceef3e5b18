"""Which configuration each phase serves; the engine in process gets exactly the same.

What this module does not do: start anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.gpu_e2e.template import PARSER

MODEL_ID = "smollm2-135m"
METHODS = {"ddtree": "ddtree", "dflash": "chain", "ar": "none"}
# Engines of several phases may lie side by side on one GPU: their KV caches are sized by tokens, and idle ones sleep.
ON_A_GPU: dict[str, Any] = {
    "sampling_backend": "pytorch", "grammar_backend": "xgrammar", "random_seed": 1,
    "skip_server_warmup": True, "sleep_on_idle": True, "max_total_tokens": 131072,
}  # fmt: skip
# Breakable graphs of larger prompts take long to capture.
BREAKABLE = {"cuda_graph_max_bs_prefill": 512}
# As tests/engines/sglang/conftest.py.
ON_A_CPU: dict[str, Any] = {
    "sampling_backend": "pytorch", "grammar_backend": "llguidance", "disable_overlap_schedule": True,
    "random_seed": 1, "skip_server_warmup": True, "sleep_on_idle": True, "max_total_tokens": 16384,
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What the run is on.

    Attributes:
        model, drafter: directories. gpus: how many there are; 0 rehearses on a CPU, where SGLang cannot draft.
        streams: the largest concurrency, which is also the largest batch and captured graph.
        sharded: directories of both with heads that two ranks can share. server_args: SGLang's, beside those above.
        prefill_graphs: as the configuration's; auto on a CPU, which captures none.
    """

    model: Path
    drafter: Path
    gpus: int
    dtype: str
    budget: int
    streams: int
    sharded: tuple[Path, Path]
    server_args: dict[str, Any] = field(default_factory=dict)
    prefill_graphs: str = "full"

    @property
    def cpu(self) -> bool:
        return self.gpus == 0


def tree(machine: Machine, mode: str, *, replicas: int = 1, num_gpus: float = 1, **placement: Any) -> dict[str, Any]:
    """The configuration of one phase. `mode`: a key of METHODS."""
    cpu = machine.cpu
    drafts = mode != "ar" and not cpu
    arguments = dict(ON_A_CPU if cpu else {**ON_A_GPU, "cuda_graph_max_bs_decode": machine.streams})
    arguments |= BREAKABLE if machine.prefill_graphs == "auto" and not cpu else {}
    arguments |= machine.server_args
    model, drafter = machine.sharded if num_gpus > 1 else (machine.model, machine.drafter)
    settings: dict[str, Any] = {
        "model": {
            "id": MODEL_ID, "source": str(model), "drafter": str(drafter) if drafts else None,
            "dtype": "float32" if cpu else machine.dtype, "device": "cpu" if cpu else "cuda",
        },
        "speculation": {"method": METHODS[mode] if drafts else "none", "budget": machine.budget},
        "engine": {"kind": "sglang", "max_running": machine.streams, "max_queued": 512},
        "sglang": {
            "attention_backend": "torch_native" if cpu else "triton", "mem_fraction_static": None if cpu else 0.8,
            "prefill_graphs": machine.prefill_graphs, "tool_call_parser": PARSER, "server_args": arguments,
        },
        # Kernels may be compiled at the first request of their kind, on slow cores: that is no stuck engine.
        "replica": {
            "num_replicas": replicas, "num_cpus": 1, "num_gpus": 0 if cpu else num_gpus, "stuck_after_s": 60,
            "health_check_timeout_s": 30, "warmup_grace_s": 180, "graceful_shutdown_timeout_s": 5,
            "max_constructor_retry_count": 1,
        },
        # As k8s/overlays/h200.
        "ingress": {"num_replicas": 1 if cpu else 4},
        "metrics": {"host": "127.0.0.1", "heartbeat_s": 0.5, "scrape_timeout_s": 5},
    }  # fmt: skip
    if cpu:
        settings["model"]["context_length"] = 2048
        settings["replica"]["num_cpus"] = 0.1
    if placement:
        settings["placement"] = placement
    return settings
