"""How far our measuring is from the truth: a server that streams by a timetable and writes down what it did.

    python benchmarks/load_truth.py [--requests 64] [--users 1 8 32]

Per request, what the load test measured against what the server did: time to first token, time per token, and the whole
answer. An error is small when it is at most 2 ms or 2 %. The lag of the client's own event loop stands beside it: on a
busy machine it is the larger part.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from load_tests.summary import percentile
from load_tests.target import get_json

ROOT = Path(__file__).resolve().parent.parent
SMALL_S, SMALL_SHARE = 0.002, 0.02


def measured(url: str, requests: int, users: int) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Rows of requests.csv, and the report."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [sys.executable, "-m", "load_tests", "run", "--url", url, "--mix", "fixed", "--quiet", "--duration", "600",
             "--requests", str(requests), "--users", str(users), "--out", out],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=900,
        )  # fmt: skip
        rows = list(csv.DictReader((Path(out) / "requests.csv").open()))
        return rows, json.loads((Path(out) / "report.json").read_text())


def errors(rows: list[dict[str, str]], told: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """measure → (error, truth) of each request, in seconds."""
    out: dict[str, list[tuple[float, float]]] = {"ttft": [], "tpot": [], "last": []}
    for row in rows:
        truth = told[row["request_id"]]
        first, last, tokens = truth["times"][0], truth["times"][-1], truth["tokens"]
        per_token = (last - first) / (tokens - 1)
        ttft, tpot = float(row["ttft_s"]), float(row["tpot_s"])
        out["ttft"].append((ttft - first, first))
        out["tpot"].append((tpot - per_token, per_token))
        out["last"].append((ttft + tpot * (tokens - 1) - last, last))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    command = [sys.executable, "-m", "tests.load_tests.truth", "--ttft", "0.1", "--gap", "0.04", "--chunks", "20"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    report: dict[str, Any] = {}
    head = ("users", "measure", "measured/true", "error p50, ms", "error p95, ms", "small", "client lag p95, ms")
    print("".join(f"{name:>19}" for name in head))
    try:
        for users in tqdm(options.users, unit="run", file=sys.stderr):
            rows, run = measured(url, options.requests, users)
            for name, pairs in errors(rows, get_json(f"{url}/truth")).items():
                sizes = sorted(abs(error) for error, _ in pairs)
                ratio = sum(error + truth for error, truth in pairs) / sum(truth for _, truth in pairs)
                small = sum(abs(e) <= max(SMALL_S, SMALL_SHARE * t) for e, t in pairs) / len(pairs)
                numbers = (1e3 * percentile(sizes, 50), 1e3 * percentile(sizes, 95), small)
                lag = 1e3 * run["client_lag_s"]["p95"]
                print(f"{users:>19}{name:>19}{ratio:>19.4f}" + "".join(f"{n:>19.3f}" for n in (*numbers, lag)))
                report[f"{users}.{name}"] = {"ratio": ratio, "small": small, "p50_ms": numbers[0], "p95_ms": numbers[1]}
            sys.stdout.flush()
    finally:
        server.kill()
        server.communicate()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
