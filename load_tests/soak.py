"""Soak and chaos: rounds of load against a laptop stack of its own, with the books compared after each.

Rounds take turns: in a calm one everybody reads to the end, so that tokens can be compared too; in a rough one readers
leave and invalid bodies arrive; in a deadly one an engine replica is killed as well, and its own counts die with it.
After each, nothing may be held; at the end, nothing may have grown.

What this module does not do: touch a server that it did not start.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from load_tests import books, scrape
from load_tests.chaos import Vandal, kill
from load_tests.processes import Sample, engines, sample
from load_tests.shapes import Shape
from load_tests.target import TargetError, facts, get, model_of, started
from load_tests.workloads import draw, parse_mix

KINDS = ("calm", "rough", "deadly")
REPLICAS = 2
CALM_MIX = "chat=4,multi_turn=1,code=1,whole=2,shared_prefix=1"
ROUGH_MIX = CALM_MIX + ",abandon=4"
SCALE = 0.25
SETTLE_S = 60.0
RECOVER_S = 300.0
SERVE_ROLES = ("engine", "ingress", "exporters", "ProxyActor", "ServeController")
# What a process may keep more after its first round: caches fill, allocators round up.
RSS_ROOM_KIB, RSS_ROOM_RATIO, FD_ROOM = 96 * 1024, 1.15, 12
# Of a deadly round: what a client may see of a replica that died under its request.
EXCUSED = ("replica_lost", "overloaded", "not_ready", "aborted", "engine_error")
ENV = {
    "DDTREE_REPLICA__NUM_REPLICAS": str(REPLICAS), "DDTREE_REPLICA__NUM_CPUS": "0.1", "DDTREE_ENGINE__THREADS": "1",
    "DDTREE_METRICS__HEARTBEAT_S": "1",
}  # fmt: skip


@dataclass
class Round:
    kind: str
    requests: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    invalid: int = 0
    killed: int | None = None
    recovered_s: float | None = None
    series: int = 0
    problems: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def soak(duration_s: float, round_s: float, users: int, out: Path, seed: int = 1) -> int:
    """0 when everything held; the rounds are written to `out` in any case."""
    # First: it patches the standard library, which must not happen once a thread or a child process is there.
    from load_tests import drive  # noqa: F401  # isort: skip
    from tqdm import tqdm

    rounds: list[Round] = []
    with started(env=ENV) as (base, root), tqdm(total=round(duration_s), unit="s", file=sys.stderr) as bar:
        about, model = facts(base), model_of(base)
        if not _whole(base, root, RECOVER_S):
            raise TargetError(f"the stack did not have {REPLICAS} replicas within {RECOVER_S:g} s")
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < duration_s or len(rounds) < len(KINDS) + 1:
            kind = KINDS[len(rounds) % len(KINDS)]
            bar.set_postfix_str(f"round {len(rounds) + 1}, {kind}, problems {sum(len(r.problems) for r in rounds)}")
            rounds.append(_round(kind, base, root, model, round_s, users, seed + len(rounds)))
            bar.update(min(round(time.monotonic() - begin - passed), bar.total - bar.n))
    found = [f"round {i}, {r.kind}: {p}" for i, r in enumerate(rounds, 1) for p in r.problems] + growth(rounds)
    out.mkdir(parents=True, exist_ok=True)
    report = {"facts": about, "problems": found, "rounds": [asdict(one) for one in rounds]}
    (out / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    _say(rounds, found)
    return 1 if found else 0


def _round(kind: str, base: str, root: int, model: str, round_s: float, users: int, seed: int) -> Round:
    import gevent

    from load_tests.drive import run
    from load_tests.recorder import Load

    done, before = Round(kind), _page(base)
    mix = parse_mix(CALM_MIX if kind == "calm" else ROUGH_MIX)
    load = Load(model, draw(mix, seed, SCALE), request_timeout_s=120.0)
    vandal, helpers = Vandal(base, model), []
    if kind != "calm":
        helpers.append(gevent.spawn(vandal.run, lambda: gevent.sleep(0.5), lambda: not load.stopping))
    if kind == "deadly":
        helpers.append(gevent.spawn_later(round_s / 3, _strike, root, done))
    result = run(base, load, Shape("constant", users, round_s), drain_s=130.0, progress=False)
    gevent.joinall(helpers)
    outcomes = result.recorder.outcomes
    done.requests, done.invalid = len(outcomes), vandal.got.total()
    for outcome in outcomes:
        if outcome.failure is not None:
            done.failures[outcome.failure] = done.failures.get(outcome.failure, 0) + 1
    excused = EXCUSED if kind == "deadly" else ()
    done.problems += [f"{n} × {what}" for what, n in done.failures.items() if not what.endswith(excused or "\0")]
    done.problems += vandal.wrong
    since = time.monotonic()
    if not _whole(base, root, RECOVER_S):
        done.problems.append(f"not whole again within {RECOVER_S:g} s")
    if done.killed is not None:
        done.recovered_s = time.monotonic() - since
    clients = books.of_clients(outcomes, vandal.got)
    calm = {"engines": done.killed is None, "tokens": kind == "calm"}

    def compare() -> list[str]:
        page = _page(base)
        return books.disagreements(clients, books.of_server(before, page), **calm) + books.still_held(page)

    done.problems += _until_none(compare, SETTLE_S)
    done.series = _series(base)
    done.samples = [one for one in sample(root) if one.role in SERVE_ROLES]
    return done


def _strike(root: int, done: Round) -> None:
    victims = engines(root)
    if victims:
        done.killed = victims[0]
        kill(victims[0])


def _until_none(find: Callable[[], list[str]], seconds: float) -> list[str]:
    """What `find` still finds after `seconds`: counters are a moment behind the last byte."""
    end = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def _page(base: str) -> scrape.Page:
    return scrape.parse((get(f"{base}/metrics") or b"").decode(errors="replace"))


def _series(base: str) -> int:
    """Series on /metrics, but for the one that has a row for every status of every route once it was seen."""
    lines = (get(f"{base}/metrics") or b"").decode().splitlines()
    return sum(not line.startswith(("#", "gateway_requests_total")) for line in lines)


def _whole(base: str, root: int, seconds: float) -> bool:
    """Until every replica is there, exports, and a token came."""

    def missing() -> list[str]:
        names = {labels["replica"] for labels, _ in _page(base)["ddtree_running_requests"]}
        alive = len(engines(root))
        there = len(names) == alive == REPLICAS and get(f"{base}/ready", 30) is not None
        return [] if there else ["a replica"]

    return not _until_none(missing, seconds)


def growth(rounds: list[Round]) -> list[str]:
    """What grew from a process's first full round to its last, and series from the first cycle to the end."""
    found: list[str] = []
    first: dict[int, Sample] = {}
    last: dict[int, Sample] = {}
    for one in rounds:
        for here in one.samples:
            first.setdefault(here.pid, here)
            last[here.pid] = here
    for pid, end in last.items():
        begin = first[pid]
        if end.fds > begin.fds + FD_ROOM:
            found.append(f"{end.role} {pid}: file descriptors from {begin.fds} to {end.fds}")
        if end.rss_kib > begin.rss_kib * RSS_ROOM_RATIO + RSS_ROOM_KIB:
            found.append(f"{end.role} {pid}: memory from {begin.rss_kib} to {end.rss_kib} KiB")
    settled = max((one.series for one in rounds[: len(KINDS)]), default=0)
    if rounds and rounds[-1].series > settled:
        found.append(f"series from {settled} to {rounds[-1].series}")
    return found


def _say(rounds: list[Round], found: list[str]) -> None:
    for number, one in enumerate(rounds, 1):
        state: dict[str, Any] = {"requests": one.requests, "invalid": one.invalid, "failures": one.failures}
        rss = sum(here.rss_kib for here in one.samples) // 1024
        fds = sum(here.fds for here in one.samples)
        print(f"{number:>3} {one.kind:<7}{state} series {one.series} memory {rss} MiB fds {fds}", end="")
        print("" if one.recovered_s is None else f" whole again {one.recovered_s:.0f} s after the round")
    print("\n".join(f"PROBLEM {problem}" for problem in found) or "no problems")
