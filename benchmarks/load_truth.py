"""How far our measuring is from the truth: a server that streams by a timetable and writes down what it did.

    python -m benchmarks.load_truth [--requests 64] [--users 1 8 32]

What the load test measured against what the server did: per request the time to the first token, per token and to the
last one, each gap between two chunks, and the rate of tokens of the run. An error is small when it is at most 2 ms or
2 %. Two things stand beside it, since on a busy machine they are the larger part: the lag of the client's own event
loop, and the error of a bare blocking socket in the same minute.
"""

from __future__ import annotations

import argparse
import csv
import json
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from load_tests.summary import percentile
from load_tests.target import get_json

ROOT = Path(__file__).resolve().parent.parent
SMALL_S, SMALL_SHARE = 0.002, 0.02
Pair = tuple[float, float]


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


def errors(rows: list[dict[str, str]], run: dict[str, Any], told: dict[str, Any]) -> dict[str, list[Pair]]:
    """measure → (error, truth): of each request in seconds, of each gap in seconds, of the run in tokens per second."""
    out: dict[str, list[Pair]] = {"ttft": [], "tpot": [], "chunk gap": [], "last": []}
    for row in rows:
        truth = told[row["request_id"]]
        times, tokens = truth["times"], truth["tokens"]
        first, last = times[0], times[-1]
        per_token = (last - first) / (tokens - 1)
        ttft, tpot = float(row["ttft_s"]), float(row["tpot_s"])
        out["ttft"].append((ttft - first, first))
        out["tpot"].append((tpot - per_token, per_token))
        out["last"].append((ttft + tpot * (tokens - 1) - last, last))
        true_gaps = [after - before for before, after in pairwise(times)]
        seen = [float(gap) for gap in row["gaps"].split()]
        out["chunk gap"] += [(gap - true, true) for gap, true in zip(seen, true_gaps, strict=True)]
    mine = [told[row["request_id"]] for row in rows]
    begin, end = min(one["arrived"] for one in mine), max(one["arrived"] + one["times"][-1] for one in mine)
    rate = sum(one["tokens"] for one in mine) / (end - begin)
    out["tok/s"] = [(run["summary"]["output_tok_per_s"] - rate, rate)]
    return out


def bare(url: str, requests: int) -> dict[str, list[Pair]]:
    """The least a client can do: one blocking socket, one request after another. Its error is the machine's."""
    where = urlsplit(url)
    body = json.dumps({"messages": [], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
    seen: dict[str, float] = {}
    with socket.create_connection((where.hostname or "", where.port or 80)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(requests):
            begin, got, first = time.perf_counter(), b"", None
            connection.sendall(head.encode() + body)
            while not got.endswith(b"0\r\n\r\n"):
                got += connection.recv(65536)
                if first is None and b"choices" in got:
                    first = time.perf_counter() - begin
            name = got.split(b"x-request-id: ")[1].split(b"\r\n")[0].decode()
            seen[name] = first or 0.0
    told = get_json(f"{url}/truth")
    return {"ttft": [(at - told[name]["times"][0], told[name]["times"][0]) for name, at in seen.items()]}


def show(client: str, name: str, pairs: list[Pair], lag_ms: float) -> dict[str, float]:
    """Prints one row and returns it."""
    sizes = sorted(abs(error) for error, _ in pairs)
    of_time = name != "tok/s"
    unit, least = (1e3, SMALL_S) if of_time else (1.0, 0.0)
    row = {
        "ratio": sum(error + truth for error, truth in pairs) / sum(truth for _, truth in pairs),
        "error_p50": unit * percentile(sizes, 50),
        "error_p95": unit * percentile(sizes, 95),
        "small": sum(abs(error) <= max(least, SMALL_SHARE * truth) for error, truth in pairs) / len(pairs),
        "lag_p95_ms": lag_ms,
    }
    print(f"{client:>19}{name:>19}" + "".join(f"{number:>19.4f}" for number in row.values()))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--out", type=Path, help="the rows as JSON")
    options = parser.parse_args()
    command = [sys.executable, "-m", "tests.load_tests.truth", "--ttft", "0.1", "--gap", "0.04", "--chunks", "20"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    report: list[dict[str, Any]] = []
    head = ("client", "measure", "measured/true", "error p50, ms", "error p95, ms", "small", "client lag p95, ms")
    print("".join(f"{name:>19}" for name in head))
    try:
        for users in tqdm(options.users, unit="run", file=sys.stderr):
            rows, run = measured(url, options.requests, users)
            lag = 1e3 * run["client_lag_s"]["p95"]
            for label, found in ((str(users), errors(rows, run, get_json(f"{url}/truth"))), ("bare", bare(url, 12))):
                for name, pairs in found.items():
                    report[f"{users}.{label}.{name}"] = show(label, name, pairs, lag)
            sys.stdout.flush()
    finally:
        server.kill()
        server.communicate()
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
