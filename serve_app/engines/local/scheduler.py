"""Who runs: a queue, a fixed number of KV slots, and how much prompt one step computes.

First come, first served. A request keeps its slot until it ends; nothing is preempted, because a slot holds the whole
context. The lowest free slot is taken first, so that running requests stay neighbours in the cache.

What this module does not do: touch torch, or deliver anything.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass

from serve_app.engines.local.sequence import Sequence


@dataclass(frozen=True)
class PrefillPiece:
    """Given tokens (`Sequence.given`) start … end of one request, computed by one step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def tokens(self) -> list[int]:
        return self.sequence.given[self.start : self.end]


class Scheduler:
    """Queue and slots.

    Args:
        slots: requests that run together; slot `slots` itself is kept for health probes.
        prefill_chunk: rows, padding included, that one prefill forward computes at most.
    """

    def __init__(self, slots: int, prefill_chunk: int) -> None:
        self._slots, self._chunk = slots, prefill_chunk
        self._free = list(range(slots))
        self._probe_free = True
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def running(self) -> list[Sequence]:
        return list(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; a probe goes first."""
        if sequence.probe:
            self._waiting.appendleft(sequence)
        else:
            self._waiting.append(sequence)

    def admit(self) -> None:
        """Give waiting sequences the free slots, in order."""
        while self._waiting and (self._probe_free if self._waiting[0].probe else self._free):
            # Left the queue before it takes a slot: other threads that look at both never count it twice.
            sequence = self._waiting.popleft()
            if sequence.probe:
                self._probe_free, sequence.slot = False, self._slots
            else:
                sequence.slot = heapq.heappop(self._free)
            sequence.ledger.admitted_ns = time.time_ns()
            self._running.append(sequence)

    def prefill(self) -> list[PrefillPiece]:
        """The pieces of prompt to compute now: one padded batch of at most `prefill_chunk` rows, oldest first, but for
        a probe, which asks whether steps are made and must not wait for a long prompt's last one."""
        pieces: list[PrefillPiece] = []
        widest = 0
        for sequence in sorted(self._running, key=lambda sequence: not sequence.probe):
            if sequence.prefilled:
                continue
            size = min(len(sequence.given) - sequence.committed, self._chunk)
            if pieces and max(widest, size) * (len(pieces) + 1) > self._chunk:
                break
            widest = max(widest, size)
            pieces.append(PrefillPiece(sequence, sequence.committed, sequence.committed + size))
        return sorted(pieces, key=lambda piece: piece.sequence.slot or 0)

    def decode(self) -> list[Sequence]:
        """Sequences with a root to verify, by slot."""
        ready = (sequence for sequence in self._running if sequence.prefilled)
        return sorted(ready, key=lambda sequence: sequence.slot or 0)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out, wherever it is, and free its slot. False if it was gone already."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return True
        if sequence not in self._running:
            return False
        self._running.remove(sequence)
        slot, sequence.slot = sequence.slot, None
        if sequence.probe:
            self._probe_free = True
        elif slot is not None:
            heapq.heappush(self._free, slot)
        return True

    def everything(self) -> list[Sequence]:
        """All that is queued or running."""
        return [*self._waiting, *self._running]
