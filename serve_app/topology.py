"""What a node must be before a model is loaded on it, and the command that says whether this one is.

`python -m serve_app.topology` prints what the node has and what the configuration misses; its exit code is 1 where
something is missing. A replica runs the same check first, so that a wrong node fails with its reason.

What this module does not do: choose nodes (Ray's placement groups do), or measure speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from serve_app.config import Config, PlacementConfig, load_config
from serve_app.errors import ConfigError

READ_NODE = "serve_app.topology:read_node"
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """`name` as the driver says it ("NVIDIA B300 SXM6 AC"); memory in GiB."""

    name: str
    memory_gib: float
    free_gib: float


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node has.

    Attributes:
        gpus: all of the node's, whatever CUDA_VISIBLE_DEVICES hides. unlinked: pairs of them that NVLink does not join.
        driver, cuda: versions, the newest CUDA that the driver runs; empty without a driver.
        memory_gib, shm_gib: free memory of the node and free space in /dev/shm.
        problem: why the GPUs could not be read.
    """

    gpus: tuple[Gpu, ...] = ()
    unlinked: tuple[tuple[int, int], ...] = ()
    driver: str = ""
    cuda: str = ""
    memory_gib: float = 0.0
    shm_gib: float = 0.0
    problem: str = ""


def read_node() -> NodeFacts:
    """Facts of this machine. Reads NVML through the optional package nvidia-ml-py; never raises."""
    shm = Path("/dev/shm")
    shm_gib = shutil.disk_usage(shm).free / GIB if shm.exists() else 0.0
    host: dict[str, Any] = {"memory_gib": _free_memory_gib(), "shm_gib": shm_gib}
    try:
        import pynvml as nvml
    except ImportError:
        return NodeFacts(**host, problem="nvidia-ml-py is not installed (pip install 'ddtree-serve[gpu]')")
    try:
        nvml.nvmlInit()
        try:
            return NodeFacts(**host, **_read_gpus(nvml))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return NodeFacts(**host, problem=f"NVML: {error}")


def _read_gpus(nvml: Any) -> dict[str, Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    gpus = []
    for handle in handles:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        gpus.append(Gpu(_text(nvml.nvmlDeviceGetName(handle)), memory.total / GIB, memory.free / GIB))
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return {
        "gpus": tuple(gpus),
        "unlinked": tuple(
            (a, b) for a, b in combinations(range(len(handles)), 2) if not _linked(nvml, handles[a], handles[b])
        ),
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
    }


def _linked(nvml: Any, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _free_memory_gib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024**2
    return 0.0


def mismatches(facts: NodeFacts, placement: PlacementConfig, gpus: int) -> list[str]:
    """Everything in which a node is not what is asked for, one sentence each; pure.

    Args:
        gpus: how many the replica takes, which is all that the node may have.
    """
    wrong = [*_wrong_gpus(facts, placement, gpus)] if gpus else []
    for what, have, least in (
        ("driver", facts.driver, placement.min_driver),
        ("CUDA", facts.cuda, placement.min_cuda),
    ):
        if least is not None and _version(have) < _version(least):
            wrong.append(f"{what} {have or 'missing'} is older than {least}")
    for what, free, needed in (
        ("memory", facts.memory_gib, placement.min_memory_gib),
        ("/dev/shm", facts.shm_gib, placement.min_shm_gib),
    ):
        if free < needed:
            wrong.append(f"{what} has {free:.1f} GiB free, {needed:g} are needed")
    return wrong


def _wrong_gpus(facts: NodeFacts, placement: PlacementConfig, gpus: int) -> list[str]:
    if facts.problem:
        return [f"the GPUs cannot be read: {facts.problem}"]
    wrong = []
    if len(facts.gpus) != gpus:
        wrong.append(f"the node has {len(facts.gpus)} GPUs, the replica takes all of {gpus}")
    name = placement.gpu_name or placement.accelerator_type
    others = sorted({gpu.name for gpu in facts.gpus if name and name.lower() not in gpu.name.lower()})
    if others:
        wrong.append(f"GPUs are {', '.join(others)} instead of {name}")
    least = placement.min_gpu_free_gib
    short = [f"{i} ({gpu.free_gib:.1f})" for i, gpu in enumerate(facts.gpus) if gpu.free_gib < least]
    if short:
        wrong.append(f"GPUs with less than {least:g} GiB free: {', '.join(short)}")
    if placement.nvlink and facts.unlinked:
        pairs = ", ".join(f"{a}-{b}" for a, b in facts.unlinked[:8])
        wrong.append(f"NVLink does not join {len(facts.unlinked)} pairs of GPUs: {pairs}")
    return wrong


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def missing_models(config: Config) -> list[str]:
    """What the target's and the drafter's directories lack. A drafter by name is not looked for: it is shipped or
    fetched."""
    wrong = missing_files(config.model.source, config.placement.local_model)
    drafter = config.model.drafter
    if drafter is not None and config.speculation.method != "none":
        wrong += missing_files(drafter, False, "model.drafter")
    return wrong


def missing_files(source: str, required: bool, key: str = "model.source") -> list[str]:
    """What a local model directory lacks. A source that is no directory is fetched later, unless it is `required` to
    be one. `key`: what configures it."""
    path = Path(source)
    if not path.is_dir():
        looks_local = required or source.startswith(("/", "./", "../", "~"))
        return [f"{key} {source} is not a directory on this node"] if looks_local else []
    if not (path / "config.json").is_file():
        return [f"{key} {source} has no config.json"]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(path.glob("*.safetensors")) else [f"{key} {source} has no safetensors"]
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return [f"{index} cannot be read"]
    lost = sorted(name for name in named if not ((path / name).is_file() and (path / name).stat().st_size))
    return [f"{key} {source} lacks {', '.join(lost[:4])} ({len(lost)} of {len(named)} files)"] if lost else []


def preflight(config: Config, read: Callable[[], NodeFacts] = read_node) -> None:
    """Raises ConfigError with every mismatch of this node. Does nothing where `placement` asks for no check."""
    if not config.placement.preflight:
        return
    wrong = mismatches(read(), config.placement, int(config.replica.num_gpus))
    wrong += missing_models(config)
    if wrong:
        node = os.uname().nodename
        raise ConfigError(f"node {node} is not what the configuration asks for: {'; '.join(wrong)}", param="placement")


def main(argv: Sequence[str] | None = None) -> int:
    """Print facts as JSON, then mismatches; exit code 1 where there are any, whether or not replicas would check."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.topology", description=__doc__)
    parser.parse_args(argv)
    try:
        config = load_config()
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    facts = read_node()
    print(json.dumps(asdict(facts), indent=2))
    wrong = mismatches(facts, config.placement, int(config.replica.num_gpus))
    wrong += missing_models(config)
    for sentence in wrong:
        print(f"mismatch: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
