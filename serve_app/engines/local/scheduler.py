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
        self._probes: deque[Sequence] = deque()
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
        return not self._running and not self._waiting and not self._probes

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Probes have a queue of their own, and neither waits for the other."""
        (self._probes if sequence.probe else self._waiting).append(sequence)

    def admit(self) -> None:
        """Give waiting sequences the free slots, in order."""
        if self._probes and self._probe_free:
            self._probe_free = False
            self._run(self._probes.popleft(), self._slots)
        while self._waiting and self._free:
            # Left the queue before it takes a slot: other threads that look at both never count it twice.
            sequence = self._waiting.popleft()
            self._run(sequence, heapq.heappop(self._free))

    def _run(self, sequence: Sequence, slot: int) -> None:
        sequence.slot = slot
        sequence.ledger.admitted_ns = time.time_ns()
        self._running.append(sequence)

    def prefill(self) -> list[PrefillPiece]:
        """The pieces of prompt to compute now: one padded batch of at most `prefill_chunk` rows, oldest first; a
        probe's single row before all, since long prompts would keep it from telling in time that the engine is well."""
        pieces: list[PrefillPiece] = []
        widest = 0
        for sequence in sorted(self._running, key=lambda one: not one.probe):
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
        for queue in (self._waiting, self._probes):
            if sequence in queue:
                queue.remove(sequence)
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
        return [*self._probes, *self._waiting, *self._running]
