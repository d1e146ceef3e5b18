"""The stages: each asks a running application for one thing and returns what the report shall say of it.

What this module does not do: order them, or limit their time (`run` does).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.gateway import cpu_s
from benchmarks.sglang_fleet import Child
from deploy.gpu_e2e import cases, checks, kill, panels
from deploy.gpu_e2e.application import ROOT, Application
from deploy.gpu_e2e.clients import QUESTIONS, Clients
from deploy.gpu_e2e.closed_loop import Timing, summary
from deploy.gpu_e2e.report import SIDES, compare
from load_tests import scrape
from load_tests.target import get

# Between the starts of two streams. All at once would stay in step, each of them waiting for the others' prompts.
STAGGER_S = 0.01
CLIENTS = 4
# So many more turns where a turn is eight requests: less than a second, in which a busy host counts for much.
SHORT_TURNS = 3


def load_child(
    child: Child, through: str, streams: int, requests: int, tokens: int, left_s: float, stagger_s: float = 0.0
) -> list[Timing]:
    asked = {"through": through, "streams": streams, "requests": requests, "tokens": tokens, "questions": QUESTIONS}
    return [Timing(**timing) for timing in child.ask("load", left_s, stagger_s=stagger_s, **asked)["timings"]]


class Work(NamedTuple):
    """What a side did in one turn: its series before and after, CPU seconds by role, and how long it took."""

    before: scrape.Page
    after: scrape.Page
    cpu_s: Counter[str]
    took_s: float


def worked(turns: Sequence[Work]) -> dict[str, Any]:
    """`batches`: SGLang's, of prompts, of those how many replayed graphs, and of steps. `host_ms`: DDTREE's own time of
    one such batch as the scheduler's thread sees it, by part. `cores`: CPU by role, where it is a hundredth of one or
    more."""

    def grew(name: str, label: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for turn in turns:
            total.update(scrape.growth(turn.before, turn.after, name, label))
        return total

    passes, phases = grew("sglang:cuda_graph_passes_total", "mode"), grew("ddtree_step_seconds_total", "phase")
    prompts, steps = (sum(n for mode, n in passes.items() if mode.startswith(kind)) for kind in ("prefill", "decode"))
    batches = {phase: prompts if phase == "prefill" else steps for phase in phases}
    used: Counter[str] = sum((turn.cpu_s for turn in turns), Counter())
    took_s = sum(turn.took_s for turn in turns)
    return {
        "batches": {"prompts": round(prompts), "in_graphs": round(passes["prefill_cuda_graph"]), "steps": round(steps)},
        "host_ms": {phase: round(1e3 * s / batches[phase], 3) for phase, s in phases.items() if batches[phase]},
        "cores": {role: round(s / took_s, 2) for role, s in used.most_common() if s / took_s >= 0.01},
    }


class Load(Protocol):
    """What `Throughput` reads of the run's options."""

    levels: Sequence[int]
    tokens: int
    rounds: int
    requests: int


class Throughput:
    """One mode's closed loops, HTTP and in process in turns, the other side idle meanwhile.

    Args:
        app, child: ready; no child measures HTTP alone. clients: of that app. asked: its levels are numbers of streams,
            its tokens those of each answer, its requests those of a stream in a round.

    Attributes:
        result: filled as it goes, so that what was measured is kept whatever happens.
        first: each level's first round over HTTP, by number of streams.
    """

    def __init__(self, app: Application, child: Child | None, clients: Clients, asked: Load) -> None:
        self._app, self._child, self._clients, self._levels = app, child, clients, asked.levels
        self._tokens, self._rounds, self._requests = asked.tokens, asked.rounds, asked.requests
        self.result: dict[str, Any] = {"levels": {}, "start_s": {"http": app.start_s}}
        self.first: dict[str, list[Timing]] = {}
        if child is not None:
            self.result["start_s"]["engine"] = child.start_s

    def warm_up(self, left_s: float) -> None:
        """Every batch size on every side, and every question: kernels are compiled and prompts cached alike. The engine
        in process and SGLang alone share a prefix cache, so whichever came second would find the other's prompts."""
        for streams in sorted(self._levels):
            for side in self._sides():
                self._load(side, streams, max(2, streams), min(32, self._tokens), left_s)
        for side in self._sides():
            self._load(side, max(self._levels), len(QUESTIONS), 1, left_s)

    def run(self, left_s: float) -> dict[str, Any]:
        self.warm_up(left_s)
        before, inside = self._counters("http"), self._counters("engine")
        for streams in self._levels:
            self._level(streams, left_s)
        self.result["http_counters"] = _change(before, self._counters("http"))
        if self._child is not None:
            self.result["engine_counters"] = _change(inside, self._counters("engine"))
        return self.result

    def _level(self, streams: int, left_s: float) -> None:
        # The streams begin apart and end one by one; what lies between must be the greater part.
        requests = max(8, self._requests * streams)
        timings: dict[str, list[list[Timing]]] = {side: [] for side in self._sides()}
        work: dict[str, list[Work]] = {side: [] for side in self._sides()}
        level: dict[str, Any] = {"compared": compare({}, {})}
        self.result["levels"][str(streams)] = level
        before, self._clients.busiest = self._counters("http"), 0.0
        for number in range(self._rounds * (SHORT_TURNS if requests < 16 else 1)):
            # The sides take turns in who is first.
            for side in self._sides() if number % 2 == 0 else reversed(self._sides()):
                counted, used, began = self._counters(side), self._cpu_s(side), time.monotonic()
                timings[side].append(self._load(side, streams, requests, self._tokens, left_s, STAGGER_S))
                took, used = time.monotonic() - began, self._cpu_s(side) - used
                work[side].append(Work(counted, self._counters(side), used, took))
            level |= {
                side: summary(rounds) | _outside(rounds, work[side]) | {"work": worked(work[side])}
                for side, rounds in timings.items()
            }
            self.first.setdefault(str(streams), timings["http"][0])
            level["client_cpu"] = self._clients.busiest
            level["http"]["acceptance_length"] = _change(before, self._counters("http"))["acceptance_length"]
            if self._child is not None:
                level["compared"] = compare(level["http"], level["engine"])
                level["compared_with_sglang"] = compare(level["http"], level["sglang"])
                level["same_texts"] = same_texts(timings["http"][0], timings["engine"][0])
        # All at the same moment, which is what the first token waits for most.
        level["burst_ttft_ms"] = {
            side: summary([self._load(side, streams, streams, 1, left_s)]).get("ttft_ms") for side in self._sides()
        }

    def _sides(self) -> Sequence[str]:
        return SIDES if self._child is not None else SIDES[:1]

    def _load(
        self, side: str, streams: int, requests: int, tokens: int, left_s: float, stagger_s: float = 0.0
    ) -> list[Timing]:
        if side == "http":
            return self._clients.load(streams, requests, tokens, left_s, stagger_s)
        assert self._child is not None
        return load_child(self._child, side, streams, requests, tokens, left_s, stagger_s)

    def _cpu_s(self, side: str) -> Counter[str]:
        """CPU seconds of that side's processes, by role."""
        return cpu_s(self._app.pid if side == "http" or self._child is None else self._child.pid)

    def _counters(self, side: str) -> scrape.Page:
        if side == "http":
            return scrape.parse((get(f"{self._app.url}/metrics", 30) or b"").decode())
        # The engine in process and SGLang alone are one.
        return scrape.parse(self._child.ask("counters", 30)["text"] if self._child is not None else "")


def _change(before: scrape.Page, after: scrape.Page) -> dict[str, Any]:
    """Replays, fallbacks by role and reason, verify steps and acceptance between two pages; a reason that did not occur
    is left out."""
    found = scrape.change(before, after, 1.0)
    length = found["acceptance"]
    return {
        "replays": found["replays"],
        "fallbacks": found["fallbacks"],
        "verify_steps": found["verify_steps"],
        "acceptance_length": None if length is None else round(length, 3),
    }


def _first_tokens(before: scrape.Page, after: scrape.Page) -> tuple[float, float]:
    """How many first tokens SGLang counted between two pages, and the seconds that they took by its own clock."""
    name = "sglang:time_to_first_token_seconds"
    count, seconds = (scrape.total(after, name + s) - scrape.total(before, name + s) for s in ("_count", "_sum"))
    return count, seconds


def _outside(rounds: Sequence[Sequence[Timing]], work: Sequence[Work]) -> dict[str, Any]:
    """`ttft_in_sglang_ms`: the mean by SGLang's own clock; `ttft_outside_ms`: what the same requests waited beyond it,
    which is what the side adds, whatever the engine took. None where SGLang did not count every request."""
    count, seconds = (sum(column) for column in zip(*(_first_tokens(w.before, w.after) for w in work), strict=True))
    waits = [timing.stamps[0] - timing.sent for timings in rounds for timing in timings if timing.stamps]
    if not count or count != len(waits):
        return {"ttft_in_sglang_ms": None, "ttft_outside_ms": None}
    mean = seconds / count
    return {
        "ttft_in_sglang_ms": round(1e3 * mean, 3),
        "ttft_outside_ms": round(1e3 * (sum(waits) / len(waits) - mean), 3),
    }


def same_texts(one: Sequence[Timing], other: Sequence[Timing]) -> dict[str, int]:
    """How many answers read the same in both. Greedy, but batches differ in shape and near-ties fall anew."""
    texts = [(a.text, b.text) for a, b in zip(one, other, strict=False)]
    return {"equal": sum(a == b for a, b in texts), "of": len(texts)}


def openai_client(app: Application) -> dict[str, Any]:
    import openai

    return {"client": f"openai {openai.__version__}", "checks": checks.run_all(checks.CHECKS, checks.client(app.url))}


def engine_cases(app: Application, drafts: bool) -> dict[str, Any]:
    return {"checks": checks.run_all(cases.CASES, cases.server(app.url, drafts))}


def locust(app: Application, users: int, seconds: float, logs: Path, left_s: float) -> dict[str, Any]:
    """Rising users through the product's own load test; a fresh closed loop of ours where Locust left no report."""
    out, step = logs / "locust", max(1, users // 4)
    line = [sys.executable, "-m", "load_tests", "run", "--url", app.url, "--shape", "steps", "--users", str(users),
            "--step-users", str(step), "--step", str(seconds / 4), "--duration", str(seconds), "--drain", "20",
            "--scale", "0.5", "--timeout", "60", "--quiet", "--out", str(out)]  # fmt: skip
    with (logs / "locust.log").open("w") as log:
        done = subprocess.run(line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=left_s, check=False)
    if not (out / "report.json").exists():
        said = (logs / "locust.log").read_text()[-1500:]
        return {"failed": f"exit code {done.returncode}: {said}", "instead": _rising(app, users, step, logs, left_s)}
    report = json.loads((out / "report.json").read_text())
    return {
        "gate": report["slo"],
        "summary": _short(report["summary"]),
        "steps": [_short(level) for level in report["levels"]],
        "knee": report["knee"],
        "server": report["server"],
        "client_lag_s": report["client_lag_s"],
    }


def _short(summarised: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("users", "requests", "completed", "abandoned", "failed", "failures", "output_tok_per_s", "acceptance",
            "ttft_s", "tpot_s", "chunk_gap_s", "e2e_s")  # fmt: skip
    return {name: summarised[name] for name in kept if name in summarised}


def _rising(app: Application, users: int, step: int, logs: Path, left_s: float) -> dict[str, Any]:
    levels = range(step, users + 1, step)
    with Clients(app.url, logs, CLIENTS) as clients:
        return {str(n): summary([clients.load(n, 2 * n, 64, left_s)]) for n in levels}


def dashboards(app: Application, before: panels.Scrape, prometheus: panels.Prometheus | None) -> dict[str, Any]:
    if prometheus is not None:
        return panels.summarise(prometheus.judge(300), "a Prometheus that scraped every second")
    after = panels.scrape(app.url)
    found = panels.summarise(panels.judge(before, after), "two scrapes of every exporter")
    return {**found, "series": len(after)}


def killed(app: Application, streams: int, tokens: int, left_s: float, found: dict[str, Any]) -> dict[str, Any]:
    """`found` is filled as it goes, and returned."""
    kill.run(app.url, app.pid, QUESTIONS[:streams], tokens, left_s, found)
    return found
