"""The same closed loop on both sides: so many streams, each asking anew when its answer has ended; and its numbers.

What this module does not do: know what an answer is made of; `one(number)` streams one and gives its Timing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from load_tests.summary import percentile

QUANTILES = (50, 95, 99)


@dataclass
class Timing:
    """One streamed answer; `time.perf_counter` seconds. `sent`: when its stream was free to ask. `stamps`: when each
    chunk with text came."""

    number: int
    sent: float = 0.0
    end: float = 0.0
    stamps: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    text: str = ""

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.stamps, self.stamps[1:], strict=False)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def closed_loop(
    one: Callable[[int], Awaitable[Timing]],
    streams: int,
    numbers: Sequence[int],
    stagger_s: float = 0.0,
    began: float | None = None,
) -> list[Timing]:
    """The answers of these numbers, `streams` at a time, which begin `stagger_s` apart, the first at `began`
    (`time.perf_counter`, which all processes of a machine share; default: now).

    A request counts from when its stream was free to ask, not from when the event loop came to it: where the requests
    of many streams are made one after the other, the last one has waited.
    """
    left, timings = iter(numbers), []
    began = time.perf_counter() if began is None else began

    async def stream(index: int) -> None:
        due = began + index * stagger_s
        await asyncio.sleep(due - time.perf_counter())
        for number in left:
            timing = await one(number)
            timing.sent, due = due, timing.end
            timings.append(timing)

    await asyncio.gather(*(stream(index) for index in range(min(streams, len(numbers)))))
    return sorted(timings, key=lambda timing: timing.number)


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p95, p99 and the mean, in milliseconds; None where there is nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {f"p{q}": round(1e3 * percentile(ordered, q), 3) for q in QUANTILES}
    return found | {"mean": round(1e3 * sum(ordered) / len(ordered), 3), "n": len(ordered)}


def summary(rounds: Sequence[Sequence[Timing]]) -> dict[str, Any]:
    """Numbers of several rounds of one load: rates divide by the sum of the rounds' times, first byte to last.

    TTFT: to the first text. ITL: gaps between chunks, each of which holds a step's tokens or several steps'. TPOT: from
    the first text to the end, by token after the first.
    """
    rounds = [timings for timings in rounds if timings]
    timings = [timing for group in rounds for timing in group]
    if not timings:
        return {"requests": 0}
    seconds = sum(max(t.end for t in group) - min(t.sent for t in group) for group in rounds)
    tokens = sum(timing.tokens for timing in timings)
    steps = sum(timing.steps for timing in timings)
    return {
        "requests": len(timings),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tok_s": round(tokens / seconds, 1),
        "tok_s_by_round": [_rate(group) for group in rounds],
        "ttft_ms": spread_ms([t.stamps[0] - t.sent for t in timings if t.stamps]),
        "itl_ms": spread_ms([gap for t in timings for gap in t.gaps]),
        "tpot_ms": spread_ms([(t.end - t.stamps[0]) / (t.tokens - 1) for t in timings if t.stamps and t.tokens > 1]),
        "tokens_per_chunk": round(tokens / max(1, sum(len(t.stamps) for t in timings)), 3),
        "acceptance_length": round((tokens - len(timings)) / steps, 3) if steps else None,
    }


def _rate(timings: Sequence[Timing]) -> float:
    return round(sum(t.tokens for t in timings) / (max(t.end for t in timings) - min(t.sent for t in timings)), 1)
