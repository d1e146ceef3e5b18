"""On how many replicas a beginning that many chats share (a system prompt) should live: by its share of the requests.

On every replica, all system prompts together may fill a prefix cache, and leave little for the chats behind them. Where
they do, one that brings a small share of the requests lives on few. Otherwise each lives everywhere: to keep chats
together that need not be only crowds replicas.

What this module does not do: choose those replicas (the ring does, for all routers alike), or know their loads.
"""

from __future__ import annotations

# A beginning gets so many times the replicas that its share of the requests would keep busy, or all of them where that
# is more than one in `ROOM`: fewer would be crowded (benchmarks/routing.py).
TIMES, ROOM = 2, 2
# Of a replica's cache, what all beginnings may take before they are kept apart.
MOST_OF_CACHE = 0.45
# Requests that are remembered; half of them when so many more have come.
WINDOW = 2048
# So many must have come before a share says anything.
ENOUGH = 64


class Beginnings:
    """Counts requests by their beginning, and forgets what has not come for long: at most 1.5 `WINDOW` are known."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._total = 0.0
        # How long each is, and all together.
        self._blocks: dict[str, int] = {}
        self._all_blocks = 0
        self._spread: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def seen(self, beginning: str, blocks: int) -> None:
        """A request with it was sent. `blocks`: how long it is."""
        self._counts[beginning] = self._counts.get(beginning, 0) + 1
        self._all_blocks += blocks - self._blocks.get(beginning, 0)
        self._blocks[beginning] = blocks
        self._total += 1
        if self._total >= WINDOW:
            # Those that are forgotten were requests all the same.
            self._total /= 2
            self._counts = {known: count / 2 for known, count in self._counts.items() if count >= 1}
            self._blocks = {known: self._blocks[known] for known in self._counts}
            self._all_blocks = sum(self._blocks.values())
            self._spread = {known: spread for known, spread in self._spread.items() if known in self._counts}

    def spread(self, beginning: str, replicas: int, cache_blocks: float) -> int:
        """On how many of so many replicas. It is halved or doubled when the share has clearly changed, since a chat's
        home may change with it. `cache_blocks`: what a replica's cache holds; 0 where that is not known."""
        if not cache_blocks or self._all_blocks <= MOST_OF_CACHE * cache_blocks or self._total < ENOUGH:
            return replicas
        wanted = TIMES * replicas * self._counts.get(beginning, 0) / self._total
        spread = self._spread.get(beginning, replicas)
        while spread < replicas and wanted > 1.5 * spread:
            spread *= 2
        while spread > 1 and wanted < 0.375 * spread:
            spread //= 2
        if beginning in self._counts:
            self._spread[beginning] = spread
        return spread if spread * ROOM <= replicas else replicas
