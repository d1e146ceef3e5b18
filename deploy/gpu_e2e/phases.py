"""The phases of a run: which application, on which nodes, with which engine beside it, for which stages.

What this module does not do: order stages in time (`run` does).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sglang_fleet import Child
from deploy.gpu_e2e import settings
from deploy.gpu_e2e.application import Application
from deploy.gpu_e2e.settings import Machine


@dataclass
class Phase:
    """An application, with the engine in process beside it if its mode is measured; `start` returns at once.
    `early`: it starts together with the phase before it."""

    name: str
    tree: dict[str, Any]
    nodes: list[dict[str, Any]]
    beside: bool
    stages: Sequence[str]
    early: bool = False
    app: Application | None = None
    child: Child | None = None
    closed: bool = False

    def start(self, logs: Path) -> None:
        if self.app is not None:
            return
        self.app = Application(self.name, self.tree, self.nodes, logs)
        if self.beside:
            log, program = logs / f"{self.name}-in-process.log", ("-m", "deploy.gpu_e2e.in_process")
            # As many threads as Ray leaves a replica of one CPU.
            threads = {"OMP_NUM_THREADS": "1"}
            self.child = Child(f"{self.name} in process", self.tree, log, threads, program)

    def settle(self, timeout_s: float) -> str:
        """Wait until application and child have started, or failed."""
        assert self.app is not None
        try:
            self.app.wait_ready(timeout_s)
            if self.child is not None and self.child.start_s is None:
                self.child.wait_ready(timeout_s)
        except RuntimeError as error:
            return f"{error}"[:200]
        return "started"

    def close(self, logs: Path) -> None:
        if self.closed:
            return
        self.closed = True
        if self.child is not None:
            self.child.close()
        if self.app is not None:
            self.app.close()
            self.app.keep_logs(logs)
            shutil.rmtree(self.app.temp_dir, ignore_errors=True)


def phases(machine: Machine, wanted: Sequence[str]) -> list[Phase]:
    """What to start for the stages asked for, in order."""
    cpus = 16
    one = [{"num_cpus": cpus, "num_gpus": min(1, machine.gpus)}]
    first = [name for name in ("throughput", "locust", "openai", "cases", "panels") if name in wanted]
    found = []
    if first:
        tree = settings.tree(machine, "ddtree")
        found.append(Phase("ddtree", tree, one, "throughput" in wanted, first))
    if "kill" in wanted:
        # Two replicas on one GPU, so that there is somewhere to go on.
        tree = settings.tree(machine, "ddtree", replicas=2, num_gpus=0.5)
        found.append(Phase("two", tree, one, False, ["kill"]))
    for mode in ("ar", "dflash"):
        if mode in wanted:
            tree = settings.tree(machine, mode)
            found.append(Phase(mode, tree, one, True, [mode], early=mode == "dflash" and "ar" in wanted))
    if "nodes" in wanted and (machine.gpus >= 2 or machine.cpu):
        nodes = [
            {"num_cpus": cpus // 2, "num_gpus": min(1, machine.gpus), "env": {"CUDA_VISIBLE_DEVICES": str(gpu)}}
            for gpu in range(2)
        ]
        tree = settings.tree(machine, "ddtree", replicas=2, whole_node=True)
        found.append(Phase("two-nodes", tree, nodes, False, ["nodes"]))
    if "tp2" in wanted and machine.gpus >= 2:
        tree = settings.tree(machine, "ddtree", num_gpus=2)
        found.append(Phase("tp2-app", tree, [{"num_cpus": cpus, "num_gpus": 2}], False, ["tp2"], early=bool(found)))
    return found
