"""The run: phases one after the other, each an application and its stages; the report is written after every stage.

What this module does not do: measure or judge.
"""

from __future__ import annotations

import shutil
import signal
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.gpu_e2e import panels, report, stages
from deploy.gpu_e2e.clients import Clients
from deploy.gpu_e2e.closed_loop import Timing
from deploy.gpu_e2e.phases import Phase
from deploy.gpu_e2e.settings import Machine

# Kept for ending processes and packing logs.
CLOSING_S = 30.0
LOG_BYTES = 14_000_000


class OutOfTime(BaseException):
    """The alarm rang: of a stage, or of the run. No Exception, so that nothing below swallows it."""


@dataclass
class Options:
    """What was asked for. `seconds`: of the whole run. `requests`: of a stream in a round. `ready_s`: what an engine
    may take to start."""

    out: Path
    work: Path
    seconds: float
    stages: Sequence[str]
    levels: Sequence[int]
    tokens: int
    rounds: int
    requests: int
    locust_s: float
    ready_s: float
    kill_streams: int = 8


class Run:
    """See the module. Its report is `report`, in `options.out` after every stage."""

    def __init__(self, machine: Machine, options: Options, facts: dict[str, Any]) -> None:
        self._machine, self._options = machine, options
        self._began = time.monotonic()
        self._end = self._began + options.seconds
        self._logs = options.work / "logs"
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir(parents=True)
        options.out.mkdir(parents=True, exist_ok=True)
        self.report: dict[str, Any] = {"facts": facts, "targets": [], "stages": {}, "seconds": {}}
        self._started: list[Phase] = []
        self._closing: list[threading.Thread] = []
        self._prometheus: panels.Prometheus | None = None
        self._first: dict[str, dict[str, list[Timing]]] = {}

    def left(self) -> float:
        """Seconds for stages."""
        return self._end - CLOSING_S - time.monotonic()

    def run(self, phases: Sequence[Phase]) -> None:
        signal.signal(signal.SIGALRM, _ring)
        signal.signal(signal.SIGTERM, self._terminate)
        try:
            for number, phase in enumerate(phases):
                self._phase(phase, phases[number + 1 :])
        except OutOfTime:
            self.report["facts"]["cut"] = "the run's time was over"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._close()

    def _terminate(self, *_: object) -> None:
        """No stage begins any more."""
        self._end = time.monotonic()
        raise OutOfTime

    def _phase(self, phase: Phase, following: Sequence[Phase]) -> None:
        if self.left() < 20:
            self._note(f"{phase.name}-start", {"failed": "no time left"}, 0.0)
            return
        self._start([phase, *following])
        if self._stage(f"{phase.name}-start", lambda: self._ready(phase), self._options.ready_s):
            self._settle()
            before = panels.scrape(phase.app.url) if phase.app and "panels" in phase.stages else {}
            for name in phase.stages:
                if name in PRESTART:
                    # What follows here is not timed: the next engine may take its share of the CPU.
                    self._start(following)
                self._stage(name, lambda name=name: self._do(name, phase, before), LIMITS_S.get(name, 150.0))
        self._end_phase(phase)

    def _end_phase(self, phase: Phase) -> None:
        """In the background: the next one need not wait for it before it starts."""
        self._closing.append(threading.Thread(target=phase.close, args=(self._logs,), daemon=True))
        self._closing[-1].start()

    def _start(self, phases: Sequence[Phase]) -> None:
        """The first of them, and those that start with it."""
        for number, phase in enumerate(phases):
            if number and not phase.early:
                return
            if phase not in self._started:
                self._started.append(phase)
                phase.start(self._logs)

    def _settle(self) -> None:
        """Until nothing else starts or ends any more, which would take the CPU from what is timed; within bounds."""
        self._join_closing()
        others = [phase for phase in self._started if not phase.closed]
        self._stage("settle", lambda: {phase.name: phase.settle(90.0) for phase in others}, 100.0)

    def _ready(self, phase: Phase) -> dict[str, Any]:
        assert phase.app is not None
        end = time.monotonic() + min(self.left(), self._options.ready_s)
        phase.app.wait_ready(end - time.monotonic())
        found: dict[str, Any] = {"http_s": phase.app.start_s, "in_front": phase.app.in_front}
        if phase.child is not None:
            try:
                if phase.child.start_s is None:
                    phase.child.wait_ready(max(1.0, end - time.monotonic()))
                found["in_process_s"] = phase.child.start_s
            except RuntimeError as error:  # the application can be measured by itself
                found["in_process_failed"] = str(error)[-2000:]
                phase.child.close()
                phase.child = None
        if "panels" in phase.stages:
            data = self._options.work / "prometheus"
            self._prometheus = panels.Prometheus.start(phase.app.url, data, self._logs / "prometheus.log")
        return found

    def _do(self, name: str, phase: Phase, before: panels.Scrape) -> dict[str, Any]:
        app, options, left = phase.app, self._options, self.left()
        assert app is not None
        if name in ("openai", "cases"):
            return stages.openai_client(app) if name == "openai" else stages.engine_cases(app, not self._machine.cpu)
        if name == "locust":
            return stages.locust(app, max(options.levels), options.locust_s, self._logs, left)
        if name == "panels":
            return stages.dashboards(app, before, self._prometheus)
        if name in ("kill", "nodes"):
            # Long enough that they still run when the last of them has begun.
            tokens = options.tokens * (1 if self._machine.cpu else 2)
            found: dict[str, Any] = {}
            self.report["stages"][name] = found  # kept as far as it came
            return stages.killed(app, options.kill_streams, tokens, min(left, 145.0), found)
        with Clients(app.url, self._logs, stages.CLIENTS) as clients:
            load = stages.Throughput(app, phase.child, clients, options)
            self.report["stages"][name] = load.result  # likewise
            self._first[name] = load.first
            return load.run(left)

    def _stage(self, name: str, work: Callable[[], dict[str, Any]], limit_s: float) -> bool:
        """Run it within its time, keep its result or its failure, save. Whether it came to its end."""
        began, failure = time.monotonic(), None
        result: dict[str, Any] = {}
        limit = min(limit_s, self.left())
        print(f"{name} …", flush=True)
        try:
            if limit < 3:
                raise TimeoutError("no time left")
            signal.setitimer(signal.ITIMER_REAL, limit)
            result = work()
        except OutOfTime:
            failure = f"not done within {limit:.0f} s"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"[-4000:]
            traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if failure is not None:
            result = {**self.report["stages"].get(name, {}), "failed": failure}
        self._note(name, result, time.monotonic() - began)
        print(
            f"{name}: {'FAILED ' + failure[:300] if failure else 'done'} ({time.monotonic() - began:.0f} s)", flush=True
        )
        return failure is None

    def _compare_answers(self) -> None:
        """What drafts must not change: whether each mode's answers are those that a token a step gives."""
        plain = self._first.get("ar", {})
        for name, answers in self._first.items():
            for streams in answers.keys() & plain.keys() if name != "ar" else ():
                level = self.report["stages"][name]["levels"][streams]
                level["as_ar"] = stages.same_texts(answers[streams], plain[streams])

    def _note(self, name: str, result: dict[str, Any], seconds: float) -> None:
        self.report["stages"][name] = result
        self._compare_answers()
        self.report["seconds"][name] = round(seconds, 1)
        report.write(self.report, self._options.out)

    def _close(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends within CLOSING_S
        if self._prometheus is not None:
            self._prometheus.close()
        for phase in self._started:
            self._end_phase(phase)
        self._join_closing()
        self.report["facts"]["took_s"] = round(time.monotonic() - self._began, 1)
        report.write(self.report, self._options.out)
        pack(self._logs, self._options.out / "logs.tar.xz", LOG_BYTES)

    def _join_closing(self) -> None:
        end = time.monotonic() + CLOSING_S
        for thread in self._closing:
            thread.join(max(0.1, end - time.monotonic()))


# Seconds, where a stage may take more than usual.
LIMITS_S = {"throughput": 300.0, "ar": 200.0, "dflash": 200.0, "tp2": 200.0}
# Stages before which the next phase may start.
PRESTART = ("openai", "kill")


def _ring(*_: object) -> None:
    raise OutOfTime


def pack(folder: Path, archive: Path, limit: int, each: int = 1_000_000) -> None:
    """The ends of all logs as one compressed file of at most `limit` bytes; the longest go first if it is larger."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    for path in files:
        data = path.read_bytes()
        if len(data) > each:
            path.write_bytes(data[: each // 4] + b"\n[...]\n" + data[-each:])
    while True:
        with tarfile.open(archive, "w:xz", preset=1) as tar:
            for path in files:
                tar.add(path, path.relative_to(folder).as_posix())
        if archive.stat().st_size <= limit or not files:
            return
        files.pop()
