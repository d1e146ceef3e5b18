"""How many replicas there should be: a pure function of how busy they say they are, and Serve's policy around it.

What this module does not do: delays and bounds, which Serve applies to what comes out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.engines.base import EngineStats

BUSY = "busy"


def busy(stats: EngineStats) -> float:
    """Share of an engine's capacity that is asked for; above 1 requests wait in it. Long contexts fill its KV memory
    before its slots: what is nearer to full counts."""
    asked = (stats.running + stats.queued) / max(1, stats.slots)
    held = stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0
    return max(asked, held)


def desired(shares: Sequence[float], outside: float, target: float) -> float:
    """Replicas, a fraction included, that would each be `target` busy.

    Args:
        shares: how busy each is. outside: requests that wait for a replica, as a share of one replica's capacity.
    """
    return (sum(shares) + outside) / target


class BusyPolicy:
    """Called by Serve's controller. `target`: how busy a replica should be. `slots`: requests that one runs at once."""

    def __init__(self, target: float, slots: int) -> None:
        self._target, self._slots = target, slots

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        reported = (ctx.aggregated_metrics or {}).get(BUSY) or {}
        if not reported:
            # Nobody has said anything yet.
            return ctx.target_num_replicas, {}
        mean = sum(reported.values()) / len(reported)
        # Those that have not reported yet are taken to be like the others.
        shares = [*reported.values(), *[mean] * max(0, ctx.current_num_replicas - len(reported))]
        return desired(shares, ctx.total_queued_requests / self._slots, self._target), {}
