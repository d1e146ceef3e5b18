"""`python -m deploy.gpu_e2e --model DIR`: serve, measure and break the whole stack, and write one report.

`tests/gpu/run_sglang.sh python3 -m deploy.gpu_e2e …` prepares the environment first (docs/sglang.md). Writes
report.json, report.md and logs.tar.xz into --out; the report is there after every stage. Exit code 0 when every stage
came to its end, 1 when one failed; missed targets are in the report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES = ("throughput", "locust", "openai", "cases", "panels", "kill", "ar", "dflash", "nodes", "tp2")


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    if options.cpu:
        options.prefill_graphs = "auto"
        _prepare_cpu()
    # The servers are asked directly, whatever proxy the environment names.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    gpus = 0 if options.cpu else options.gpus if options.gpus is not None else _gpus()
    from benchmarks.sharded import write_pair
    from deploy.gpu_e2e.phases import phases
    from deploy.gpu_e2e.run import Options, Run
    from deploy.gpu_e2e.settings import Machine
    from deploy.gpu_e2e.template import with_tools

    wanted = [name for name in STAGES if name in options.stages.split(",")]
    unknown = set(options.stages.split(",")) - set(STAGES)
    if unknown or not (options.cpu or gpus):
        print(
            f"error: {f'unknown stages {sorted(unknown)}' if unknown else 'no GPU; --cpu rehearses'}", file=sys.stderr
        )
        return 2
    levels = [int(n) for n in options.streams.split(",")]
    model = with_tools(options.model, options.work / "model")
    sharded = (model, options.drafter)
    if gpus > 1 and "tp2" in wanted:
        sharded = write_pair(model, options.drafter, options.work / "sharded", 2)
    machine = Machine(
        model, options.drafter, gpus, options.dtype, options.budget, max(levels), sharded, options.server_args,
        options.prefill_graphs,
    )  # fmt: skip
    run = Run(
        machine,
        Options(
            options.out, options.work, options.seconds, wanted, levels, options.tokens, options.rounds,
            options.requests, options.locust_seconds, options.ready,
        ),
        _facts(options, gpus),
    )  # fmt: skip
    run.run(phases(machine, wanted))
    print((options.out / "report.md").read_text()[:4000])
    return int(any("failed" in stage for stage in run.report["stages"].values()))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.gpu_e2e", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=os.environ.get("MODEL"), help="checkpoint folder (default: $MODEL)")
    add("--drafter", type=Path, default=ROOT / "serve_app" / "models" / "smollm2_135m_dflash")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-e2e-report")), help="default: $OUT")
    add("--work", type=Path, help="scratch folder (default: a new one)")
    add("--seconds", type=float, default=560.0, help="of the whole run (default: %(default)s)")
    add("--stages", default=",".join(STAGES), help="default: %(default)s; the last two need two GPUs")
    add("--streams", default="1,16,64", help="concurrencies (default: %(default)s)")
    add("--tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    add("--rounds", type=int, default=3, help="of each load, HTTP and in process in turns (default: %(default)s)")
    add("--requests", type=int, help="of a stream in a round, at least 8 in all (default: 10, on a CPU 3)")
    add("--locust-seconds", type=float, default=40.0, help="default: %(default)s")
    add("--ready", type=float, default=240.0, help="seconds an engine may take to start (default: %(default)s)")
    add("--dtype", default="float16", help="float16 has fewer near-ties than bfloat16 (default: %(default)s)")
    add("--budget", type=int, default=32, help="nodes of a draft tree (default: %(default)s)")
    add("--server-args", type=json.loads, default={}, help="more of SGLang's, for all engines, as a JSON object")
    graphs = "sglang.prefill_graphs (default: %(default)s; on a CPU auto)"
    add("--prefill-graphs", choices=("auto", "full"), default="full", help=graphs)
    add("--gpus", type=int, help="default: what nvidia-smi lists")
    add("--cpu", action="store_true", help="rehearse where there is no GPU: SGLang on a CPU, which cannot draft")
    options = parser.parse_args(argv)
    if options.model is None:
        parser.error("--model, or MODEL in the environment")
    options.requests = options.requests or (3 if options.cpu else 10)
    options.work = options.work or Path(tempfile.mkdtemp(prefix="gpu-e2e-"))
    options.model, options.out, options.work = (p.resolve() for p in (options.model, options.out, options.work))
    return options


def _prepare_cpu() -> None:
    """One kernel that released SGLang has for accelerators alone; every process inherits it."""
    kernels = os.environ.get("SGLANG_CPU_KERNELS", str(ROOT / "tests" / "engines" / "sglang" / "cpu_kernels"))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), kernels]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(listed.splitlines())


def _facts(options: argparse.Namespace, gpus: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"gpus": gpus, "cpus": os.cpu_count(), "python": platform.python_version()}
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        facts["gpu"] = listed.partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        facts["gpu"] = "none"
    for name in ("sglang", "torch", "triton", "ray", "openai", "locust"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    chosen = (
        "dtype", "budget", "tokens", "streams", "rounds", "requests", "seconds", "stages", "cpu", "server_args",
        "prefill_graphs",
    )  # fmt: skip
    return facts | {name: getattr(options, name) for name in chosen}


if __name__ == "__main__":
    sys.exit(main())
