"""What the way of a token costs beside SGLang's scheduler: the engine in process, and the application over HTTP.

The scheduler's process is replaced, at SGLang's own seam for it, by a scripted one that sends what DDTREE's would: at
every step one batch with a block of accepted tokens for each running request. Everything else is real: SGLang's
tokenizer manager, the engine, and in the second mode replica, ingress, Ray Serve and HAProxy.

  sglang   SGLang's tokenizer manager alone, token ids in and out
  engine   the engine's seam in that process: messages in, chunks of text out
  http     the application, its client in this process

    python -m benchmarks.sglang_path [--streams 1,16,64] [--step-ms 20] [--sides sglang,engine,http] [--out PATH]

For each number of streams: CPU time of each process per token at that step, without what it uses when idle; the first
token's median time; tokens/s with a step of 1 ms; CPU and median time of an answer of one token, which
is what each request costs whatever its length. In an environment with SGLang 0.5.17 and Ray; needs no GPU.

What it does not do: load weights, or measure a scheduler.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gateway
from benchmarks.sglang_fleet import Child
from deploy.gpu_e2e.clients import Clients
from deploy.gpu_e2e.closed_loop import Timing, summary
from deploy.gpu_e2e.stages import STAGGER_S, load_child
from load_tests.target import free_port, get

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "tests" / "engines" / "sglang" / "cpu_kernels"
SIDES = ("sglang", "engine", "http")
TOKENS, BLOCK, ONE_TOKEN = 128, 4, 320
KV_TOKENS, LONGEST = 1 << 20, 2000
START_S, LOAD_S, IDLE_S = 180.0, 120.0, 2.0
# A step that no forward is faster than. Without one every answer would be over before the next is asked for, a batch of
# its own at each step.
FASTEST_S = 0.001
# The file whose first eight bytes are the step's seconds.
PACE = "SGLANG_PATH_PACE"
MODEL = "smollm2-135m"
TREE: dict[str, Any] = {
    "model": {"id": MODEL, "dtype": "float32", "device": "cpu", "drafter": None, "context_length": 2048},
    "engine": {"kind": "sglang", "max_running": 64, "max_queued": 512},
    "speculation": {"method": "none"},
    "sglang": {
        "attention_backend": "torch_native",
        "server_args": {"sampling_backend": "pytorch", "grammar_backend": "none", "disable_overlap_schedule": True},
    },
    "replica": {"num_cpus": 0.1, "stuck_after_s": 60},
    "metrics": {"host": "127.0.0.1", "heartbeat_s": 5},
}


# -- the scripted scheduler ------------------------------------------------------------------------------------------


@dataclass
class _Running:
    asked: Any
    stats: Any
    prompt: int
    sent: int = 0


def scripted_scheduler(server_args: Any, port_args: Any, *placed: Any, **_: Any) -> None:
    """In the place of SGLang's `run_scheduler_process`: `placed` ends with the pipe that says it is ready."""
    import setproctitle
    import zmq
    from sglang.srt.managers.io_struct import AbortReq, sock_recv, sock_send
    from sglang.srt.managers.load_snapshot import create_load_snapshot_writer
    from sglang.srt.utils import kill_itself_when_parent_died
    from sglang.srt.utils.network import get_zmq_socket

    kill_itself_when_parent_died()
    setproctitle.setproctitle("sglang::scheduler")
    context = zmq.Context(2)
    taken = get_zmq_socket(context, zmq.PULL, port_args.scheduler_input_ipc_name, False)
    given = get_zmq_socket(context, zmq.PUSH, port_args.detokenizer_ipc_name, False)
    create_load_snapshot_writer(server_args, port_args, 1, 0)
    with open(os.environ[PACE], "r+b") as file:
        pace = mmap.mmap(file.fileno(), 8)
    info = {"status": "ready", "max_total_num_tokens": KV_TOKENS, "max_req_input_len": LONGEST, "startup_time": {}}
    placed[-1].send(info)
    running: dict[str, _Running] = {}
    due = time.perf_counter()
    while True:
        new: list[_Running] = []
        while taken.poll(max(0, 1000 * (due - time.perf_counter())) if running and not new else 0 if new else 1000):
            message = sock_recv(taken)
            if isinstance(message, AbortReq):
                if (left := running.pop(message.rid, None)) is not None:
                    sock_send(given, _batch([left], [0], {"type": "abort", "message": "Aborted"}))
            elif hasattr(message, "input_ids"):
                new.append(_begun(message))
        if new:
            # A prompt's forward gives one token, as soon as it is asked for, and those after it take a step.
            if not running:
                (step_s,) = struct.unpack("d", pace[:8])
                due = time.perf_counter() + step_s
            _emit(given, sock_send, running, new, 1)
        elif running and time.perf_counter() >= due:
            (step_s,) = struct.unpack("d", pace[:8])
            due = max(due + step_s, time.perf_counter() - step_s)
            _emit(given, sock_send, running, list(running.values()), BLOCK)


def _begun(message: Any) -> _Running:
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    now = time.perf_counter()
    stats = SchedulerReqTimeStats(enable_metrics=True)
    stats.wait_queue_entry_time = stats.forward_entry_time = stats.prefill_finished_time = now
    return _Running(message, stats, len(message.input_ids))


def _emit(
    socket: Any, send: Callable[..., None], running: dict[str, _Running], rows: list[_Running], most: int
) -> None:
    counts = [min(most, row.asked.sampling_params.max_new_tokens - row.sent) for row in rows]
    for row, count in zip(rows, counts, strict=True):
        row.sent += count
    send(socket, _batch(rows, counts, None))
    for row in rows:
        if row.sent >= row.asked.sampling_params.max_new_tokens:
            running.pop(row.asked.rid, None)
        else:
            running[row.asked.rid] = row


def _batch(rows: list[_Running], counts: list[int], finish: dict[str, Any] | None) -> Any:
    """One message to the detokenizer, every field filled as `SchedulerOutputStreamer` fills it for DDTREE."""
    from array import array

    from sglang.srt.managers.io_struct import BatchTokenIDOutput, wrap_as_pickle

    size = len(rows)
    # Printable tokens of the laptop model, other ones in each block.
    blocks = [
        array("q", range(1000 + row.sent, 1000 + row.sent + count)) for row, count in zip(rows, counts, strict=True)
    ]
    limits = [row.asked.sampling_params.max_new_tokens for row in rows]
    nothing = dict.fromkeys(
        (
            *("input_token_logprobs_val", "input_token_logprobs_idx", "output_token_logprobs_val"),
            *("output_token_logprobs_idx", "input_top_logprobs_val", "input_top_logprobs_idx"),
            *("output_top_logprobs_val", "output_top_logprobs_idx", "input_token_ids_logprobs_val"),
            *("input_token_ids_logprobs_idx", "output_token_ids_logprobs_val", "output_token_ids_logprobs_idx"),
            *("output_token_entropy_val", "output_token_sampling_mask", "output_token_sampling_logprobs"),
            *("output_hidden_states", "routed_experts", "indexer_topk", "placeholder_tokens_idx"),
            *("placeholder_tokens_val", "customized_info"),
        )
    )
    ended = [
        finish or ({"type": "length", "length": limit} if row.sent >= limit else None)
        for row, limit in zip(rows, limits, strict=True)
    ]
    return BatchTokenIDOutput(
        rids=[row.asked.rid for row in rows], http_worker_ipcs=[None] * size, finished_reasons=ended,
        decoded_texts=[""] * size, decode_ids=blocks, read_offsets=[0] * size, output_ids=blocks,
        skip_special_tokens=[True] * size, spaces_between_special_tokens=[True] * size, no_stop_trim=[False] * size,
        prompt_tokens=[row.prompt for row in rows], reasoning_tokens=[0] * size,
        completion_tokens=[row.sent for row in rows], cached_tokens=[0] * size, cached_tokens_details=[None] * size,
        image_tokens=[0] * size, audio_tokens=[0] * size, video_tokens=[0] * size, retraction_counts=[0] * size,
        time_stats=wrap_as_pickle([row.stats for row in rows]), dp_ranks=[0] * size,
        spec_verify_ct=[row.sent // BLOCK for row in rows], spec_num_correct_drafts=[row.sent for row in rows],
        spec_num_block_accept_tokens=[0] * size, spec_num_cap_tokens=[0] * size,
        spec_correct_drafts_histogram=[[row.sent] * 16 for row in rows], spec_cap_lens_histogram=[[] for _ in rows],
        **nothing,
    )  # fmt: skip


def script() -> None:
    """From here on SGLang starts the scripted scheduler in this process."""
    from sglang.srt.entrypoints.engine import Engine

    Engine.run_scheduler_process_func = staticmethod(scripted_scheduler)


def create_engine(config: Any, registry: Any) -> Any:
    """The engine factory of the served application."""
    from serve_app import engines

    script()
    return engines.create_engine(config, registry)


# -- measuring -------------------------------------------------------------------------------------------------------


class Pace:
    """What the scheduler is told of its step."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        self._path = path

    def set(self, step_s: float) -> None:
        with self._path.open("r+b") as file:
            file.write(struct.pack("d", step_s))


class Side:
    """One running system. `load`: streams, requests, tokens of each, seconds between the streams' starts."""

    def __init__(self, pid: int, load: Callable[..., list[Timing]]) -> None:
        self.pid, self.load = pid, load
        self._idle: Counter[str] = Counter()

    def rest(self) -> None:
        """Note what it uses when idle."""
        before = gateway.cpu_s(self.pid)
        time.sleep(IDLE_S)
        after = gateway.cpu_s(self.pid)
        self._idle = Counter({role: (used - before[role]) / IDLE_S for role, used in after.items()})

    def timed(
        self, streams: int, requests: int, tokens: int, stagger_s: float = 0.0
    ) -> tuple[list[Timing], dict[str, float]]:
        """The timings, and CPU seconds by role, the scripted scheduler's left out."""
        before, began = gateway.cpu_s(self.pid), time.monotonic()
        timings = self.load(streams, requests, tokens, stagger_s)
        took = time.monotonic() - began
        used = {role: s - before[role] - self._idle[role] * took for role, s in gateway.cpu_s(self.pid).items()}
        return timings, {role: s for role, s in used.items() if role != "sglang::scheduler"}


def measure(side: Side, pace: Pace, streams: list[int], step_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pace.set(FASTEST_S)
    side.load(max(streams), 2 * max(streams), 8)
    side.rest()
    for count in streams:
        requests = max(8, 3 * count)
        pace.set(step_s)
        timings, used = side.timed(count, requests, TOKENS, STAGGER_S)
        tokens = requests * TOKENS
        numbers = summary([timings])
        ideal = count * TOKENS / ((TOKENS - 1) / BLOCK * step_s)
        found[f"us_per_token_{count}"] = round(1e6 * sum(used.values()) / tokens, 1)
        found[f"roles_{count}"] = {role: round(1e6 * s / tokens, 1) for role, s in used.items() if s / tokens >= 1e-6}
        found[f"ttft_p50_ms_{count}"] = numbers["ttft_ms"]["p50"]
        found[f"of_pace_{count}"] = round(numbers["tok_s"] / ideal, 3)
        pace.set(FASTEST_S)
        timings, _ = side.timed(count, requests, TOKENS)
        found[f"most_tok_s_{count}"] = summary([timings])["tok_s"]
    for count in streams:
        timings, used = side.timed(count, ONE_TOKEN, 1)
        found[f"us_per_request_{count}"] = round(1e6 * sum(used.values()) / ONE_TOKEN)
        found[f"roles_request_{count}"] = {
            role: round(1e6 * s / ONE_TOKEN) for role, s in used.items() if s / ONE_TOKEN >= 1e-5
        }
        found[f"one_token_p50_ms_{count}"] = summary([timings])["ttft_ms"]["p50"]
    return found


def in_process(pace: Path, logs: Path) -> tuple[Child, dict[str, Side]]:
    """The engine's process, asked through either way."""
    program = ("-m", "benchmarks.sglang_path", "--child", "engine", str(pace))
    child = Child("in process", TREE, logs / "engine.log", _environment(pace), program)
    child.wait_ready(START_S)

    def load(through: str) -> Callable[..., list[Timing]]:
        def ask(streams: int, requests: int, tokens: int, stagger_s: float = 0.0) -> list[Timing]:
            return load_child(child, through, streams, requests, tokens, LOAD_S, stagger_s)

        return ask

    return child, {side: Side(child.pid, load(side)) for side in ("sglang", "engine")}


def served(pace: Path, logs: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The application's process and address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (logs / "http.log").open("w") as log:
        command = [sys.executable, "-m", "benchmarks.sglang_path", "--child", "http", str(port)]
        process = subprocess.Popen(
            command, env={**os.environ, **_environment(pace)}, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + START_S
    while get(f"{url}/ready", 5) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            gateway.end(process)
            raise RuntimeError(f"the application did not come up: {logs}")
        time.sleep(0.5)
    return process, url


def _environment(pace: Path) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(KERNELS)]
    return {
        PACE: str(pace), "PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip


def run_child(kind: str, argument: str) -> None:
    if kind == "http":
        gateway.serve_ours(int(argument), "haproxy", TREE, "benchmarks.sglang_path:create_engine")
        return
    from deploy.gpu_e2e import in_process as program

    script()
    sys.argv = [sys.argv[0], sys.argv[-1]]
    program.main()


def compared(results: dict[str, dict[str, Any]], streams: list[int]) -> dict[str, Any]:
    """HTTP over the engine in process, and that over SGLang alone, where both were measured."""
    found: dict[str, Any] = {}
    for one, other in (("http", "engine"), ("engine", "sglang")):
        if one in results and other in results:
            a, b = results[one], results[other]
            names = [f"{name}_{n}" for name in ("us_per_token", "most_tok_s", "us_per_request") for n in streams]
            found[f"{one}/{other}"] = {name: round(a[name] / b[name], 3) for name in names}
            times = [f"{name}_{n}" for name in ("ttft_p50_ms", "one_token_p50_ms") for n in streams]
            found[f"{one}-{other}"] = {name: round(a[name] - b[name], 3) for name in times}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--out", type=Path, help="where to write the JSON as well")
    parser.add_argument("--logs", type=Path, help="folder of the processes' logs (default: a new one)")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "ARGUMENT"), help=argparse.SUPPRESS)
    parser.add_argument("tree", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(*options.child)
        return
    streams = [int(count) for count in options.streams.split(",")]
    logs = options.logs or Path(tempfile.mkdtemp(prefix="sglang-path-"))
    logs.mkdir(parents=True, exist_ok=True)
    path, results = logs / "pace", {}
    pace = Pace(path)
    wanted = options.sides.split(",")

    def take(name: str, side: Side) -> None:
        results[name] = measure(side, pace, streams, options.step_ms / 1000)
        print(f"{name:7} " + "  ".join(f"{key} {value}" for key, value in results[name].items()), flush=True)
        results["compared"] = compared(results, streams)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")

    if {"sglang", "engine"} & set(wanted):
        child, sides = in_process(path, logs)
        try:
            for name in ("sglang", "engine"):
                if name in wanted:
                    take(name, sides[name])
        finally:
            child.close()
    if "http" in wanted:
        process, url = served(path, logs)

        def load(streams: int, requests: int, tokens: int, stagger_s: float = 0.0) -> list[Timing]:
            return clients.load(streams, requests, tokens, LOAD_S, stagger_s)

        try:
            with Clients(url, logs, 1) as clients:
                take("http", Side(process.pid, load))
        finally:
            gateway.end(process)
    print(json.dumps(results["compared"], indent=1))


if __name__ == "__main__":
    main()
