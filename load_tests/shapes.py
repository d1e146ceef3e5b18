"""How load goes over time: users of a closed loop as a function of time, or arrival times of an open loop.

A closed loop's users wait for their answers, so a slow server is asked less; only an open loop shows what a service
does to people who do not know each other. State an SLO for open loops.

What this module does not do: know Locust; see `drive`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHAPES = ("constant", "ramp", "steps", "spike", "soak", "poisson", "trace")
MAX_DURATION_S = 7200.0


@dataclass(frozen=True)
class Shape:
    """`users`, `duration_s` as the command line has them; what each means is in `users_at`."""

    kind: str
    users: int = 4
    duration_s: float = 60.0
    step_users: int = 1
    step_s: float = 15.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            raise ValueError(f"unknown shape {self.kind!r}; there are {', '.join(SHAPES)}")
        if not 0 < self.duration_s <= MAX_DURATION_S:
            raise ValueError(f"a run lasts more than 0 and at most {MAX_DURATION_S:g} s")
        if min(self.users, self.step_users) < 1 or min(self.step_s, self.rate) <= 0:
            raise ValueError("users, steps and rates must be positive")

    @property
    def open_loop(self) -> bool:
        return self.kind in ("poisson", "trace")

    def users_at(self, t: float) -> int | None:
        """Users at `t` seconds; None when the run is over."""
        if t >= self.duration_s:
            return None
        if self.open_loop:
            return 1  # the dispatcher
        if self.kind == "ramp":
            return max(1, round(self.users * min(1.0, t / (0.8 * self.duration_s))))
        if self.kind == "steps":
            return min(self.users, self.step_users * (1 + int(t / self.step_s)))
        if self.kind == "spike":
            # A quarter of the users, all of them in the middle fifth.
            return self.users if 0.4 <= t / self.duration_s < 0.6 else max(1, self.users // 4)
        return self.users

    def steps(self) -> list[tuple[float, float, int]]:
        """(begin, end, users) of each step of a stepped load."""
        if self.kind != "steps":
            return []
        out: list[tuple[float, float, int]] = []
        t = 0.0
        while t < self.duration_s:
            users, end = self.users_at(t) or 0, min(t + self.step_s, self.duration_s)
            if out and out[-1][2] == users:
                out[-1] = (out[-1][0], end, users)
            else:
                out.append((t, end, users))
            t = end
        return out


def poisson(rate: float, duration_s: float, seed: int) -> Iterator[float]:
    """Arrival times with exponential gaps."""
    rng, t = random.Random(seed), 0.0
    while True:
        t += rng.expovariate(rate)
        if t >= duration_s:
            return
        yield t


@dataclass(frozen=True)
class TraceRow:
    """One request of a recorded trace. `blocks`: ids of the prompt's blocks; equal ids stand for equal text."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, speed: float = 1.0) -> list[TraceRow]:
    """JSON lines with `timestamp` (milliseconds), `input_length`, `output_length`, and perhaps `hash_ids`, as the
    published Mooncake traces have them; `speed` 2 replays twice as fast. Raises ValueError naming the line."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            blocks = tuple(int(block) for block in row.get("hash_ids", ()))
            at_s = float(row["timestamp"]) / 1000 / speed
            rows.append(TraceRow(at_s, int(row["input_length"]), int(row["output_length"]), blocks))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a row of a trace ({error})") from None
    if not rows:
        raise ValueError(f"{path} holds no requests")
    rows.sort(key=lambda row: row.at_s)
    return rows


def trace_text(row: TraceRow, scale: float, passage: Callable[[random.Random, int], str]) -> str:
    """A prompt of about the row's length in words; blocks with the same id have the same text."""
    words = max(1, round(row.input_tokens * scale * 0.75))
    blocks = row.blocks or (round(1e3 * row.at_s),)
    each = max(1, words // len(blocks))
    return "\n".join(passage(random.Random(block), each) for block in blocks)
