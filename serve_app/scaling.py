"""How many replicas there should be: a pure function of what they say of their load, and Serve's policy around it.

Two signals. How busy an engine is follows from its slots and its memory, and moves the number both ways. How long first
tokens take shows what that misses, such as long prompts that wait for each other while slots are free: it asks for
more, keeps what is there while it is near its target, and lets go of a few at a time.

What this module does not do: delays and bounds, which Serve applies to what comes out of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from serve_app.engines.base import EngineStats

BUSY, TTFT = "busy", "ttft"
# At most so many times the replicas at once: a queue makes first tokens late out of all proportion.
MOST_GROWTH = 1.5
# Below this share of the target replicas may go, down to so many times what there are: nobody knows how late first
# tokens of fewer would be.
HOLD, LEAST_REST = 0.5, 0.8
# What a target bounds: that of nine requests in ten.
QUANTILE, ROUNDING = 0.9, 1e-9
MOST_SAMPLES = 1000


def busy(stats: EngineStats) -> float:
    """Share of an engine's capacity that is asked for; above 1 requests wait in it. Long contexts fill its KV memory
    before its slots: what is nearer to full counts."""
    asked = (stats.running + stats.queued) / max(1, stats.slots)
    held = stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0
    return max(asked, held)


class FirstTokens:
    """Times to first token at one replica within the last `window_s`.

    Of a queue that stands still only those who wait are seen. One of them says that its time is longer than what it has
    waited, and nothing else: the estimate is Kaplan and Meier's (1958), to whom it is a censored observation.
    """

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self._clock = window_s, clock
        self._waiting: dict[object, float] = {}
        self._seen: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)

    def arrived(self, key: object) -> None:
        self._waiting[key] = self._clock()

    def came(self, key: object) -> None:
        """Its first token."""
        since = self._waiting.pop(key, None)
        if since is not None:
            self._seen.append((self._clock(), self._clock() - since))

    def left(self, key: object) -> None:
        """It waits no longer; one that failed before its first token says nothing."""
        self._waiting.pop(key, None)

    def late(self) -> float | None:
        """Seconds within which nine of ten come; None where nobody asked. Where too many still wait to tell, as long
        as the longest has waited, which is less than it will be."""
        now = self._clock()
        while self._seen and now - self._seen[0][0] > self._window_s:
            self._seen.popleft()
        # (seconds, whether it still waits); who has waited exactly as long as another one took was late enough to tell.
        times = sorted([*((took, False) for _, took in self._seen), *((now - t, True) for t in self._waiting.values())])
        left = 1.0
        for at, (seconds, waits) in enumerate(times):
            if not waits:
                others = len(times) - at - 1
                left *= others / (others + 1)
                if left <= 1 - QUANTILE + ROUNDING:
                    return seconds
        return times[-1][0] if times else None


def desired(shares: Sequence[float], outside: float, target: float) -> float:
    """Replicas, a fraction included, that would each be `target` busy.

    Args:
        shares: how busy each is. outside: requests that wait for a replica, as a share of one replica's capacity.
    """
    return (sum(shares) + outside) / target


def hurried(wanted: float, replicas: int, ttft_s: float, target_s: float) -> float:
    """`wanted` replicas, or as many as first tokens that take `ttft_s` at `replicas` ask for."""
    if ttft_s > target_s:
        factor = min(ttft_s / target_s, MOST_GROWTH)
    else:
        factor = 1.0 if ttft_s > HOLD * target_s else LEAST_REST
    # Of a few, one may always go.
    return max(wanted, replicas * factor if factor >= 1 else min(replicas * factor, replicas - 1))


class BusyPolicy:
    """Called by Serve's controller. `target`: how busy a replica should be. `slots`: requests that one runs at once.
    `target_ttft_s`: what first tokens may take, None for any time."""

    def __init__(self, target: float, slots: int, target_ttft_s: float | None = None) -> None:
        self._target, self._slots, self._target_ttft_s = target, slots, target_ttft_s

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        metrics = ctx.aggregated_metrics or {}
        reported = metrics.get(BUSY) or {}
        if not reported:
            # Nobody has said anything yet.
            return ctx.target_num_replicas, {}
        mean = sum(reported.values()) / len(reported)
        # Those that have not reported yet are taken to be like the others.
        shares = [*reported.values(), *[mean] * max(0, ctx.current_num_replicas - len(reported))]
        wanted = desired(shares, ctx.total_queued_requests / self._slots, self._target)
        waits = metrics.get(TTFT) or {}
        if self._target_ttft_s is not None and waits:
            ttft_s = sum(waits.values()) / len(waits)
            wanted = hurried(wanted, ctx.current_num_replicas, ttft_s, self._target_ttft_s)
        return wanted, {}
