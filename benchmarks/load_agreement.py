"""Our load test beside AIPerf: the same prompts, the same server, in turns in one run; prints theirs over ours.

    python -m benchmarks.load_agreement --aiperf PATH [--url http://127.0.0.1:8000] [--concurrency 1 4]

AIPerf is not among the requirements; install `aiperf` into an environment of its own and name its command. The
acceptance length is counted three times: from the chunks our client read, from those AIPerf read, and by the server.
What must be so for both to see the same: greedy, a fixed number of tokens, usage counted by the server.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from load_tests.target import check_loopback, facts, get, model_of, started
from load_tests.workloads import draw
from serve_app.models.cache import cache_root

# Measure → how far theirs may be from ours, as a share.
MEASURES = {
    "ttft_p50_s": 0.1, "ttft_mean_s": 0.1, "tpot_mean_s": 0.1, "chunk_gap_mean_s": 0.1, "tok_per_s": 0.1,
    "acceptance": 0.02,
}  # fmt: skip
Numbers = dict[str, float]
# Without a rate AIPerf 0.13 looks for a free place in a busy loop, on one of the server's cores; with one it looks so
# often a second, and a place stays free for half an interval. Neither may be a large share of an answer.
RATE = "100"
# Its own packages, not ours; and it finds a local tokenizer only while the hub is not declared offline.
APART = ("PYTHONPATH", "HF_HUB_OFFLINE")


def counters(base: str) -> tuple[float, float]:
    """(tokens, verify steps) of all engines since their start."""
    from load_tests.scrape import parse, total

    page = parse((get(f"{base}/metrics") or b"").decode())
    return total(page, "ddtree_acceptance_length_sum"), total(page, "ddtree_acceptance_length_count")


def ours(base: str, seed: int, requests: int, users: int) -> Numbers:
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [sys.executable, "-m", "load_tests", "run", "--url", base, "--mix", "fixed", "--seed", str(seed),
             "--requests", str(requests), "--users", str(users), "--duration", "3600", "--quiet", "--out", out],
            check=True, stdout=subprocess.DEVNULL, timeout=1800,
        )  # fmt: skip
        summary = json.loads((Path(out) / "report.json").read_text())["summary"]
    return {
        "ttft_p50_s": summary["ttft_s"]["p50"], "ttft_mean_s": summary["ttft_s"]["mean"],
        "tpot_mean_s": summary["tpot_s"]["mean"], "chunk_gap_mean_s": summary["chunk_gap_s"]["mean"],
        "tok_per_s": summary["output_tok_per_s"], "acceptance": summary["acceptance"],
    }  # fmt: skip


def theirs(command: Path, tokenizer: Path, base: str, model: str, seed: int, requests: int, users: int) -> Numbers:
    asks = list(islice(draw({"fixed": 1}, seed), requests))
    body = asks[0].body(model)
    extra = {"temperature": 0, "ignore_eos": True, "min_tokens": body["min_tokens"], "max_tokens": body["max_tokens"]}
    with tempfile.TemporaryDirectory() as out:
        prompts = Path(out) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"text": ask.messages[0]["content"]}) + "\n" for ask in asks))
        done = subprocess.run(
            [str(command), "profile", "--model", model, "--url", base, "--endpoint-type", "chat", "--streaming",
             "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
             "--dataset-sampling-strategy", "sequential", "--request-count", str(requests),
             "--concurrency", str(users), "--request-rate", RATE,
             "--arrival-pattern", "constant", "--extra-inputs", json.dumps(extra), "--use-server-token-count",
             "--workers-max", "1", "--record-processors", "1",
             "--tokenizer", str(tokenizer), "--ui", "none", "--output-artifact-dir", out, "--no-server-metrics",
             "--no-gpu-telemetry"],
            capture_output=True, text=True, timeout=1800, check=False,
            env={name: value for name, value in os.environ.items() if name not in APART},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"AIPerf failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        summary = json.loads((Path(out) / "profile_export_aiperf.json").read_text())
        records = [json.loads(line) for line in (Path(out) / "profile_export.jsonl").read_text().splitlines()]
    return {
        "ttft_p50_s": summary["time_to_first_token"]["p50"] / 1e3,
        "ttft_mean_s": summary["time_to_first_token"]["avg"] / 1e3,
        "tpot_mean_s": summary["inter_token_latency"]["avg"] / 1e3,
        "chunk_gap_mean_s": summary["inter_chunk_latency"]["avg"] / 1e3,
        "tok_per_s": summary["output_token_throughput"]["avg"],
        "acceptance": _acceptance([record["metrics"] for record in records]),
    }


def _acceptance(metrics: list[Mapping[str, Any]]) -> float:
    """Tokens per chunk after the first, from the gaps AIPerf recorded."""
    tokens = sum(m["output_sequence_length"]["value"] - 1 for m in metrics)
    return tokens / sum(len(m["inter_chunk_latency"]["value"]) for m in metrics)


def in_turns(options: argparse.Namespace, base: str) -> dict[str, Any]:
    """Prints a table; returns every round."""
    model = model_of(base)
    report: dict[str, Any] = {"facts": facts(base), "requests": options.requests, "rows": []}
    ours(base, 1, 4, 2)
    print(f"{'streams':>7} {'measure':>16} {'ours':>9} {'AIPerf':>9} {'ratio':>7} {'server':>8}")
    with tqdm(total=2 * options.rounds * len(options.concurrency), unit="run", file=sys.stderr) as bar:
        for users in options.concurrency:
            rounds: dict[str, list[Numbers]] = {"ours": [], "theirs": []}
            before = counters(base)
            for number in range(options.rounds):
                # In turns, so that a slow minute of the machine falls on both; who is first changes too.
                for tool in sorted(rounds, reverse=bool(number % 2)):
                    if tool == "ours":
                        rounds[tool].append(ours(base, 1, options.requests, users))
                    else:
                        arguments = (base, model, 1, options.requests, users)
                        rounds[tool].append(theirs(options.aiperf, options.tokenizer, *arguments))
                    bar.update()
            tokens, steps = (after - old for after, old in zip(counters(base), before, strict=True))
            report[str(users)] = {**rounds, "server_acceptance": tokens / steps if steps else None}
            report["rows"] += compared(users, rounds, tokens / steps if steps else float("nan"))
            sys.stdout.flush()
    return report


def compared(users: int, rounds: dict[str, list[Numbers]], served: float) -> list[dict[str, Any]]:
    """Prints and returns one row a measure: the mean of the rounds by both tools, theirs over ours."""
    rows = []
    for name, room in MEASURES.items():
        a, b = (statistics.mean(numbers[name] for numbers in rounds[tool]) for tool in ("ours", "theirs"))
        agrees = abs(b / a - 1) <= room
        rows.append({"streams": users, "measure": name, "ours": a, "aiperf": b, "ratio": b / a, "agrees": agrees})
        third = f"{served:8.3f}" if name == "acceptance" else " " * 8
        print(f"{users:>7} {name:>16} {a:>9.4f} {b:>9.4f} {b / a:>7.3f} {third}{'' if agrees else '  APART'}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server on this machine; without it one is started")
    parser.add_argument("--aiperf", type=Path, required=True, help="its command")
    default = cache_root() / "models" / "smollm2-135m"
    parser.add_argument("--tokenizer", type=Path, default=default, help="a directory; AIPerf wants one (%(default)s)")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="every round as JSON")
    options = parser.parse_args()
    if options.url:
        report = in_turns(options, check_loopback(options.url))
    else:
        with started() as (base, _):
            report = in_turns(options, base)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(not all(row["agrees"] for row in report["rows"]))


if __name__ == "__main__":
    main()
