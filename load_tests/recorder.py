"""What happened in one run, and the clock it is told on.

What this module does not do: aggregate (see `summary`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from load_tests.timeline import Outcome
from load_tests.workloads import Ask


@dataclass
class Recorder:
    """Every request that was sent ends here exactly once, whatever became of it."""

    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    in_flight: int = 0
    started: float = field(default_factory=time.perf_counter)
    client_lags: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.at(time.perf_counter())

    def at(self, moment: float) -> float:
        """A moment of `time.perf_counter` on the run's clock."""
        return moment - self.started

    def opened(self) -> None:
        self.sent += 1
        self.in_flight += 1

    def closed(self, outcome: Outcome) -> None:
        self.in_flight -= 1
        self.outcomes.append(outcome)


@dataclass
class Load:
    """What the users of one run share.

    Attributes:
        asks: what to ask. budget: conversations to begin at most, None for no end.
        request_timeout_s: a request that takes longer is stuck, and fails.
        stopping: no new request begins.
    """

    model: str
    asks: Iterator[Ask]
    recorder: Recorder = field(default_factory=Recorder)
    budget: int | None = None
    request_timeout_s: float = 120.0
    api_key: str | None = None
    stopping: bool = False

    @property
    def exhausted(self) -> bool:
        return self.budget is not None and self.budget <= 0

    def next_ask(self) -> Ask | None:
        if self.stopping or self.exhausted:
            return None
        if self.budget is not None:
            self.budget -= 1
        return next(self.asks, None)
