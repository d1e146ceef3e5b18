"""Runs one load: Locust's runner under a shape, the scraper, the watch on our own slowness, and the progress display.

What this module does not do: judge or write reports.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# First: it patches the standard library.
import gevent  # isort: skip
from locust.env import Environment  # isort: skip

from tqdm import tqdm

from load_tests import scrape
from load_tests.recorder import Load, Recorder
from load_tests.shapes import Shape
from load_tests.target import get
from load_tests.users import Dispatcher, LoadUser
from load_tests.workloads import Ask

TICK_S = 0.1
LAG_PROBE_S = 0.05


@dataclass
class Result:
    """A finished run. `series`: one row per scrape; `levels`: (time, users) at each change. `window_s`: until the load
    stopped; `drained_s`: until its last answer."""

    recorder: Recorder
    window_s: float = 0.0
    drained_s: float = 0.0
    levels: list[tuple[float, int]] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)
    server: dict[str, Any] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """What rates divide by: from the first request until the last answer, since all of them count."""
        first = min((outcome.started for outcome in self.recorder.outcomes), default=0.0)
        return self.drained_s - first

    @property
    def mean_users(self) -> float:
        """Requests in flight, averaged over the run (Little's law)."""
        busy = sum(outcome.end_s for outcome in self.recorder.outcomes)
        return busy / self.elapsed_s if self.elapsed_s > 0 else 0.0


def run(
    base: str,
    load: Load,
    shape: Shape,
    *,
    arrivals: Iterator[tuple[float, Ask]] | None = None,
    drain_s: float = 60.0,
    scrape_s: float = 2.0,
    progress: bool = True,
) -> Result:
    """Loads `base` until the shape, or the budget, is over; then waits up to `drain_s` for open answers."""
    user = LoadUser if arrivals is None else Dispatcher
    environment = Environment(user_classes=[user], host=base, stop_timeout=drain_s, reset_stats=False)
    environment.load, environment.arrivals = load, arrivals  # type: ignore[attr-defined]
    runner = environment.create_local_runner()
    # The clock of the run starts with the load, not with the process.
    load.recorder.started = time.perf_counter()
    result = Result(load.recorder)
    helpers = [gevent.spawn(_scraper, base, result, load, scrape_s), gevent.spawn(_watch_lag, load.recorder)]
    try:
        with tqdm(total=round(shape.duration_s), unit="s", disable=not progress, file=sys.stderr) as bar:
            _follow(runner, load, shape, result, bar)
            load.stopping = True
            result.window_s = load.recorder.now()
            bar.set_description("draining")
            runner.quit()
    finally:
        gevent.killall(helpers)
    ends = [outcome.started + outcome.end_s for outcome in load.recorder.outcomes]
    result.drained_s = max(ends, default=result.window_s)
    result.server = _whole(base, result)
    return result


def _follow(runner: Any, load: Load, shape: Shape, result: Result, bar: Any) -> None:
    recorder, shown = load.recorder, 0
    while (users := shape.users_at(recorder.now())) is not None:
        if load.exhausted and not recorder.in_flight:
            return
        if not result.levels or result.levels[-1][1] != users:
            result.levels.append((recorder.now(), users))
            runner.start(users, spawn_rate=max(users, 100))
        gevent.sleep(TICK_S)
        if int(recorder.now()) > shown:
            bar.update(int(recorder.now()) - shown)
            shown = int(recorder.now())
            bar.set_postfix_str(_state(recorder, users))


def _state(recorder: Recorder, users: int) -> str:
    recent = [o for o in recorder.outcomes[-200:] if o.ok and o.started + o.end_s > recorder.now() - 10]
    tokens = sum(o.completion_tokens or 0 for o in recent)
    failed = sum(o.failure is not None for o in recorder.outcomes)
    done = len(recorder.outcomes)
    return f"users {users}, open {recorder.in_flight}, done {done}, failed {failed}, {tokens / 10:.0f} tok/s"


def _watch_lag(recorder: Recorder) -> None:
    """How late this process's own event loop is: what a measured time may be wrong by."""
    while True:
        begin = time.perf_counter()
        gevent.sleep(LAG_PROBE_S)
        recorder.client_lags.append(time.perf_counter() - begin - LAG_PROBE_S)


def _page(base: str) -> scrape.Page:
    return scrape.parse((get(f"{base}/metrics") or b"").decode(errors="replace"))


def _scraper(base: str, result: Result, load: Load, every_s: float) -> None:
    before, at = _page(base), load.recorder.now()
    result.server["first"] = before
    while True:
        gevent.sleep(every_s)
        after, now = _page(base), load.recorder.now()
        if after:
            users = result.levels[-1][1] if result.levels else 0
            row = {"t": now, "users": users, "in_flight": load.recorder.in_flight}
            result.series.append(row | scrape.change(before, after, now - at))
            before, at = after, now


def _whole(base: str, result: Result) -> dict[str, Any]:
    """The server's change over the whole run; empty where it has no /metrics."""
    first, last = result.server.get("first"), _page(base)
    return scrape.change(first, last, result.elapsed_s) if first and last else {}
