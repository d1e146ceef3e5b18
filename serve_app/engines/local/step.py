"""The step loop's body: schedule → draft → build tree → verify → accept → commit.

Without a drafter the tree is its root alone, which makes the same loop decode autoregressively.

What this module does not do: threads, asyncio, HTTP; see `engine`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from serve_app.ddtree.accept import Accepted, committed_tokens
from serve_app.ddtree.tree import DraftTree, root_tree
from serve_app.engines.base import Chunk, Usage
from serve_app.engines.local.acceptance import accept, next_token
from serve_app.engines.local.logprobs import token_logprobs
from serve_app.engines.local.runner import ModelRunner, Pending
from serve_app.engines.local.scheduler import PrefillPiece, Scheduler
from serve_app.engines.local.sequence import Sequence
from serve_app.engines.local.speculation import TreePlan
from serve_app.engines.local.stopping import Ending
from serve_app.engines.local.vocabulary import Vocabulary
from serve_app.errors import EngineFailed
from serve_app.metrics import EngineMetrics

logger = logging.getLogger(__name__)


class Stepper:
    """Owns the scheduler and drives the models; one thread calls it.

    Args:
        plan: how drafts become trees, None without a drafter.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        plan: TreePlan | None,
        vocabulary: Vocabulary,
        metrics: EngineMetrics | None,
    ) -> None:
        self._runner, self.scheduler, self.plan = runner, scheduler, plan
        self._vocabulary, self._metrics = vocabulary, metrics
        self.faults = 0  # steps in a row that raised

    def step(self, deliver: Callable[[], None] = lambda: None) -> None:
        """Advance everything that runs by one step. A fault ends the sequences it touched, and no others.

        Args:
            deliver: hands what sinks were given to its readers. Called when prompts have been computed: their first
                tokens must not wait for the first tree, which takes as long again.
        """
        self.scheduler.admit()
        pieces = self.scheduler.prefill()
        if pieces:
            self._guarded([piece.sequence for piece in pieces], lambda: self._prefill(pieces))
            self._report_load()  # whoever has its first token is seen to run
            deliver()
        ready = self.scheduler.decode()
        if ready:
            self._guarded(ready, lambda: self._decode(ready))
        self._report_load()

    def _report_load(self) -> None:
        if self._metrics is not None:
            running = self.scheduler.running
            held = sum(sequence.committed for sequence in running)
            self._metrics.load(len(running), self.scheduler.queued, held)

    def _guarded(self, sequences: Seq[Sequence], work: Callable[[], None]) -> None:
        try:
            work()
            self.faults = 0
        except Exception as error:
            logger.exception("a step over %d requests failed", len(sequences))
            self.faults += 1
            for sequence in sequences:
                if self.scheduler.remove(sequence):
                    self._count(sequence, "error")
                    sequence.sink(EngineFailed(f"generation failed: {type(error).__name__}"))

    @contextlib.contextmanager
    def _phase(self, name: str, sequences: Seq[Sequence]) -> Iterator[None]:
        """Books the time of a part of a step, and on every sequence the forwards in it that no graph served."""
        started, eager = time.perf_counter(), self._runner.eager_forwards
        yield
        for sequence in sequences:
            sequence.ledger.eager_forwards += self._runner.eager_forwards - eager
        if self._metrics is not None:
            self._metrics.step_phase(name, time.perf_counter() - started)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, pieces: Seq[PrefillPiece]) -> None:
        slots = [_slot(piece.sequence) for piece in pieces]
        with self._phase("prefill", [piece.sequence for piece in pieces]):
            logits = self._runner.prefill(slots, [piece.start for piece in pieces], [piece.tokens for piece in pieces])
        for piece, row in zip(pieces, logits, strict=True):
            sequence = piece.sequence
            sequence.committed = piece.end
            emitted = 0
            if sequence.prefilled:
                emitted = self._emit(sequence, [next_token(sequence, row)], row[None])
            if self._metrics is not None:
                self._metrics.prefill(piece.end - piece.start, emitted)

    # -- decode ----------------------------------------------------------------------------------------------------

    def _decode(self, sequences: Seq[Sequence]) -> None:
        slots = [_slot(sequence) for sequence in sequences]
        starts = [sequence.committed for sequence in sequences]
        with self._phase("draft", sequences):
            tree = self._draft_tree(sequences, slots, starts)
        with self._phase("verify", sequences):
            verified = self._runner.verify(slots, starts, tree)
        with self._phase("accept", sequences):
            accepted = accept(sequences, tree, verified.logits, self.plan.depth if self.plan else 0)
            self._runner.commit(slots, starts, accepted)
            self._keep_features(sequences, accepted, verified.features)
        for row, tokens in enumerate(committed_tokens(tree.tokens, accepted)):
            self._commit(sequences[row], tokens, verified.logits[row], accepted.indices[row], tree.width - 1)

    def _draft_tree(self, sequences: Seq[Sequence], slots: list[int], starts: list[int]) -> DraftTree:
        roots = [sequence.root for sequence in sequences]
        if self.plan is None:
            return root_tree(torch.tensor(roots, device=self._runner.target.device))
        pending = [Pending(sequence.pending, sequence.pending_len) for sequence in sequences]
        tokens, logps = self._runner.draft(slots, starts, roots, pending, self.plan.block(len(roots)))
        return self.plan.tree(roots, tokens, logps)

    def _keep_features(self, sequences: Seq[Sequence], accepted: Accepted, features: Tensor) -> None:
        """The next draft needs the features of what was just accepted: root … last accepted node."""
        if self.plan is None:
            return
        index = accepted.indices.clamp_min(0)[:, :, None].expand(-1, -1, features.shape[2])
        gathered = features.gather(1, index)
        for row, sequence in enumerate(sequences):
            sequence.pending = gathered[row]

    def _commit(self, sequence: Sequence, tokens: list[int], logits: Tensor, path: Tensor, nodes: int) -> None:
        sequence.committed += len(tokens)
        sequence.pending_len = len(tokens)
        sequence.ledger.verified(len(tokens) - 1, nodes)
        rows = logits[path[: len(tokens)]] if sequence.params.logprobs is not None else None
        emitted = self._emit(sequence, tokens, rows)
        if self._metrics is not None:
            self._metrics.verify_step(len(tokens) - 1, emitted, len(tokens), nodes)

    def _emit(self, sequence: Sequence, tokens: list[int], rows: Tensor | None) -> int:
        """Hand tokens to the reader, trimmed at the first stop; returns how many were kept."""
        kept, text, ending = sequence.text.push(tokens)
        tokens = tokens[:kept]
        sequence.output.extend(tokens)
        if sequence.rules is not None:
            sequence.rules.commit(tokens)
        logprobs = None
        if sequence.params.logprobs is not None and rows is not None:
            logprobs = token_logprobs(rows[:kept], tokens, sequence.params.logprobs, self._vocabulary)
        if sequence.ledger.first_token_ns is None:
            sequence.ledger.first_token_ns = time.time_ns()
        if ending is not None:
            self.scheduler.remove(sequence)
            self._count(sequence, ending.reason)
        sequence.sink(
            Chunk(
                sequence.index,
                tuple(tokens),
                text,
                logprobs,
                ending.reason if ending else None,
                ending.detail if ending else None,
                _usage(sequence) if ending else None,
                trail=sequence.ledger.close() if ending else None,
            )
        )
        return kept

    def abort(self, sequence: Sequence) -> bool:
        """Take a sequence out and end its stream with finish_reason "abort"."""
        if not self.scheduler.remove(sequence):
            return False
        # No step may follow that would report it.
        self._report_load()
        ending = Ending("abort")
        self._count(sequence, ending.reason)
        usage, trail = _usage(sequence), sequence.ledger.close()
        sequence.sink(Chunk(sequence.index, (), "", None, ending.reason, None, usage, trail=trail))
        return True

    def _count(self, sequence: Sequence, outcome: str) -> None:
        if self._metrics is not None and not sequence.probe:
            self._metrics.ended(outcome)


def _usage(sequence: Sequence) -> Usage:
    return Usage(len(sequence.prompt), len(sequence.output))


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
