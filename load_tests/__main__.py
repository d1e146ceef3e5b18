"""`python -m load_tests run | compare | soak`.

Exit codes: 0 the gate holds, 1 it does not, 2 nothing could be tested.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from load_tests import compare, slo
from load_tests.arrivals import arrivals_of
from load_tests.shapes import SHAPES, Shape
from load_tests.target import TargetError, check_loopback, facts, model_of, somebody_at, started
from load_tests.workloads import DEFAULT_MIX, WORKLOADS, draw, parse_mix


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    # So that a server that was started here is stopped in every case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return int(options.do(options))
    except (TargetError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m load_tests", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser(
        "run", help="one load, one report", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    run.set_defaults(do=_run)
    run.add_argument("--url", default="http://127.0.0.1:8000", help="a server on this machine")
    run.add_argument("--start", action="store_true", help="start the application for this run if none answers there")
    run.add_argument("--mix", default=DEFAULT_MIX, help=f"workloads and weights, of {', '.join(WORKLOADS)}")
    run.add_argument("--scale", type=float, default=1.0, help="factor on all lengths")
    run.add_argument("--seed", type=int, default=1, help="the same seed asks the same")
    run.add_argument("--shape", choices=SHAPES, default="constant")
    run.add_argument("--users", type=int, default=4, help="largest number of users (closed loop)")
    run.add_argument("--duration", type=float, default=60.0, help="seconds")
    run.add_argument(
        "--requests", type=int, help="end after so many conversations, if the duration does not come first"
    )
    run.add_argument("--step-users", type=int, default=1, help="users that each step adds")
    run.add_argument("--step", type=float, default=15.0, help="seconds of a step")
    run.add_argument("--rate", type=float, default=1.0, help="arrivals per second (poisson)")
    run.add_argument("--trace", type=Path, help="JSON lines to replay (trace)")
    run.add_argument("--speed", type=float, default=1.0, help="how much faster than recorded (trace)")
    run.add_argument("--timeout", type=float, default=120.0, help="seconds after which a request is stuck")
    run.add_argument("--drain", type=float, default=60.0, help="seconds that open answers have at the end")
    run.add_argument("--slo", action="append", help=f"condition on the summary, repeatable (default {slo.DEFAULT[0]})")
    run.add_argument("--goodput", default="", help="what a good answer is, for example ttft=1.0,tpot=0.1")
    run.add_argument("--api-key", help="sent as a bearer token; never written to a report")
    run.add_argument("--out", type=Path, default=Path("load-report"), help="folder of the report")
    run.add_argument("--quiet", action="store_true", help="no progress display")
    pair = commands.add_parser("compare", help="two reports as ratios")
    pair.set_defaults(do=_compare)
    pair.add_argument("first", type=Path, help="folder of a report")
    pair.add_argument("second", type=Path, help="another, which is divided by the first")
    long = commands.add_parser(
        "soak", help="load and chaos against a server of its own",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    long.set_defaults(do=_soak)
    long.add_argument("--duration", type=float, default=1800.0, help="seconds; at least one round of each kind runs")
    long.add_argument("--round", type=float, default=30.0, help="seconds of load in a round")
    long.add_argument("--users", type=int, default=4, help="of each round")
    long.add_argument("--seed", type=int, default=1, help="the same seed asks the same")
    long.add_argument("--out", type=Path, default=Path("load-report"), help="folder of soak.json")
    return parser


@contextlib.contextmanager
def _server(url: str, start: bool) -> Iterator[str]:
    base = check_loopback(url)
    if not start or somebody_at(base):
        yield base
        return
    print("no server there: starting one, which takes half a minute or more", file=sys.stderr)
    with started() as (base, _):
        print(f"started on {base}", file=sys.stderr)
        yield base


def _run(options: argparse.Namespace) -> int:
    shape = Shape(
        options.shape, options.users, options.duration, options.step_users, options.step, options.rate
    )  # fmt: skip
    mix, goodput = parse_mix(options.mix), slo.parse_goodput(options.goodput)
    conditions = options.slo or list(slo.DEFAULT)
    for condition in conditions:
        slo.check(condition, {})  # readable, before anything runs
    # Before anything starts a thread or a process: Locust patches the standard library.
    from load_tests.drive import run
    from load_tests.outcome_report import build
    from load_tests.recorder import Load

    with _server(options.url, options.start) as base:
        model, about = model_of(base, options.api_key), facts(base, options.api_key)
        load = Load(
            model, draw(mix, options.seed, options.scale), budget=options.requests,
            request_timeout_s=options.timeout, api_key=options.api_key,
        )  # fmt: skip
        timed = arrivals_of(shape, load, options) if shape.open_loop else None
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        result = run(base, load, shape, arrivals=timed, drain_s=options.drain, progress=not options.quiet)
    report = build(result, shape, _config(options, mix, base), about | {"model": model}, goodput, conditions, when)
    _save(options.out, report, result)
    return 0 if all(verdict["holds"] for verdict in report["slo"]) else 1


def _config(options: argparse.Namespace, mix: dict[str, float], base: str) -> dict[str, Any]:
    """What a report says of its settings; `base`: the server that was loaded, which may be one started for it."""
    kept = {name: value for name, value in vars(options).items() if name not in ("do", "api_key", "quiet", "start")}
    said = {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}
    return said | {"mix": mix, "url": base}


def _save(out: Path, report: dict[str, Any], result: Any) -> None:
    from load_tests.page import number
    from load_tests.plots import draw as pictures
    from load_tests.report import write

    write(out, report, result.recorder.outcomes, pictures(report, result.recorder.outcomes))
    summary = report["summary"]
    for name in ("requests", "completed", "abandoned", "failed", "output_tok_per_s", "acceptance"):
        print(f"{name:<20}{number(summary[name])}")
    for kind, count in summary["failures"].items():
        print(f"  failed: {count} × {kind}")
    for verdict in report["slo"]:
        found = "not measured" if verdict["value"] is None else number(verdict["value"])
        print(f"{'holds ' if verdict['holds'] else 'BROKEN'} {verdict['condition']} (is {found})")
    print(f"report: {out / 'report.html'}")


def _compare(options: argparse.Namespace) -> int:
    print(compare.text(compare.load(options.first), compare.load(options.second)))
    return 0


def _soak(options: argparse.Namespace) -> int:
    from load_tests.soak import soak

    return soak(options.duration, options.round, options.users, options.out, options.seed)


if __name__ == "__main__":
    sys.exit(main())
