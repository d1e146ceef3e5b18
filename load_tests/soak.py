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
from collections import Counter
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
    """What was done and found. `clients`, `server`: their `Books`; a killed engine's counts died with it."""

    kind: str
    requests: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    invalid: int = 0
    killed: int | None = None
    recovered_s: float | None = None
    series: int = 0
    clients: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
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
    done.failures = dict(Counter(outcome.failure for outcome in outcomes if outcome.failure is not None))
    excused = EXCUSED if kind == "deadly" else ()
    done.problems += [f"{n} × {what}" for what, n in done.failures.items() if not what.endswith(excused or "\0")]
    done.problems += vandal.wrong
    _audit(done, before, books.of_clients(outcomes, vandal.got), base, root)
    return done


def _audit(done: Round, before: scrape.Page, clients: books.Books, base: str, root: int) -> None:
    """Once the stack is whole again: what still is held, what does not agree, and how large it all is."""
    since = time.monotonic()
    if not _whole(base, root, RECOVER_S):
        done.problems.append(f"not whole again within {RECOVER_S:g} s")
    if done.killed is not None:
        done.recovered_s = time.monotonic() - since
    done.clients = asdict(clients)

    def compare() -> list[str]:
        page = _page(base)
        server = books.of_server(before, page)
        done.server = asdict(server)
        apart = books.disagreements(clients, server, engines=done.killed is None, tokens=done.kind == "calm")
        return apart + books.still_held(page)

    done.problems += _until_none(compare, SETTLE_S)
    done.series = _series(base)
    done.samples = [one for one in sample(root) if one.role in SERVE_ROLES]


def _strike(root: int, done: Round) -> None:
    """Kills the youngest replica: the other lives through the whole soak, and shows what grows."""
    victims = engines(root)
    if victims:
        done.killed = victims[-1]
        kill(victims[-1])


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


def lives(rounds: list[Round]) -> dict[int, tuple[Sample, Sample]]:
    """Process id → the process after its first full round and after its last. One that came in mid-round, in a killed
    one's place, had not yet done a round's work: its caches were empty."""
    out: dict[int, tuple[Sample, Sample]] = {}
    there: set[int] | None = None
    for one in rounds:
        for here in one.samples:
            if there is None or here.pid in there:
                out[here.pid] = (out.get(here.pid, (here, here))[0], here)
        there = {here.pid for here in one.samples}
    return out


def growth(rounds: list[Round]) -> list[str]:
    """What grew from a process's first full round to its last, and series from the first cycle to the end."""
    found: list[str] = []
    for pid, (begin, end) in lives(rounds).items():
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
    print(f"{sum(one.requests for one in rounds)} requests, {sum(one.invalid for one in rounds)} invalid bodies, "
          f"{sum(one.killed is not None for one in rounds)} replicas killed")  # fmt: skip
    alive = {here.pid for here in rounds[-1].samples}
    for pid, (begin, end) in lives(rounds).items():
        if pid in alive:
            memory = f"memory {begin.rss_kib // 1024} → {end.rss_kib // 1024} MiB"
            print(f"{end.role:<16}{memory}, descriptors {begin.fds} → {end.fds}")
    print("\n".join(f"PROBLEM {problem}" for problem in found) or "no problems")
