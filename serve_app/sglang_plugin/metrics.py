"""Counters of the scheduler process, written through Prometheus's multiprocess files; see `serve_app.metrics`.

Made at the first use: prometheus_client decides at its import whether values live in files, and SGLang sets that
directory up later than it loads plugins. Only the first rank counts. Everything here works on host values that SGLang
already has; nothing synchronises with the GPU. A step adds to a tally in memory; the series get it every few steps, and
always when a request ends, so that nothing is owed once the server is idle.

What this module does not do: expose HTTP.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serve_app.sglang_plugin.args import Options

if TYPE_CHECKING:
    from serve_app.metrics import StepMetrics

logger = logging.getLogger(__name__)


# Steps that may be owed to the series while requests run.
STEPS_OWED = 32


@dataclass
class Tally:
    """What the series have not got yet.

    Attributes:
        replays: by role, padding rows and bucket. preparations: by how. phases: host seconds.
        steps: verify steps of one request, by drafts accepted and tokens emitted.
    """

    replays: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    preparations: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass
class Exporter:
    """The process's metrics, the widths they are counted with, and what is owed to them."""

    metrics: StepMetrics
    chosen: Options
    tally: Tally = field(default_factory=Tally)
    owed: int = 0


_exporter: Exporter | None = None


def start(model: str, chosen: Options, enabled: bool) -> None:
    """Called by the worker: from here on this process counts, if `enabled` (metrics are on and it is rank 0)."""
    global _exporter
    if not enabled or _exporter is not None:
        return
    from prometheus_client import CollectorRegistry

    from serve_app.metrics import StepMetrics
    from serve_app.sglang_plugin.graph import Fallback

    # The registry is this process's own: readers merge the files.
    _exporter = Exporter(StepMetrics(CollectorRegistry(), model, chosen.path, [str(r) for r in Fallback]), chosen)


def settle() -> None:
    """Give the series what they are owed."""
    if _exporter is None:
        return
    series, tally = _exporter.metrics, _exporter.tally
    _exporter.tally, _exporter.owed = Tally(), 0
    for (role, padding, bucket), times in tally.replays.items():
        series.graph_replay(role, padding, bucket, times)
    for how, times in tally.preparations.items():
        series.step_preparation(how, times)
    for name, seconds in tally.phases.items():
        series.step_phase(name, seconds)
    for (accepted, emitted), times in tally.steps.items():
        series.verify_step(accepted, emitted, accepted + 1, _exporter.chosen.budget, times)


def graph_replay(role: str, padding_rows: int, bucket: int) -> None:
    if _exporter is not None:
        _exporter.tally.replays[role, padding_rows, bucket] += 1


def preparation(how: str) -> None:
    """One step was prepared `how` (`direct.Preparation`)."""
    if _exporter is not None:
        _exporter.tally.preparations[how] += 1


def graph_fallback(role: str, reason: str) -> None:
    if _exporter is not None:
        _exporter.metrics.graph_fallback(role, str(reason))
    # Rare by design, and the first question when it is not.
    logger.debug("DDTREE: eager %s forward: %s", role, reason)


def graph_capture(role: str, graphs: int, seconds: float, reserved_bytes: int) -> None:
    if _exporter is not None:
        _exporter.metrics.graph_capture(role, graphs, seconds, reserved_bytes)


def prefill(tokens: int, emitted: int) -> None:
    if _exporter is not None:
        _exporter.metrics.prefill(tokens, emitted)
        settle()


def phase(name: str, seconds: float) -> None:
    """Host time of a step's part; with overlap the device works behind it."""
    if _exporter is not None:
        _exporter.tally.phases[name] += seconds  # type: ignore[assignment]


@dataclass
class StepRecord:
    """A verify step's requests as they were before the scheduler trimmed what they got.

    Attributes:
        requests: (index in the batch, request, its output length before) of those still running.
        ended: whether there were others.
    """

    requests: list[tuple[int, Any, int]]
    ended: bool = False

    @staticmethod
    def before(batch: Any) -> StepRecord:
        if _exporter is None:
            return StepRecord([])
        running = enumerate(batch.reqs)
        kept = [(i, r, len(r.output_ids)) for i, r in running if not (r.finished() or r.is_retracted)]
        return StepRecord(kept, ended=len(kept) < len(batch.reqs))

    def after(self, result: Any) -> None:
        """Count the steps. `result`: SGLang's GenerationBatchResult, processed."""
        accepted_by_request = result.num_correct_drafts_per_req_cpu
        if _exporter is None or accepted_by_request is None:
            return
        steps, ended = _exporter.tally.steps, self.ended
        for index, request, length in self.requests:
            accepted = accepted_by_request[index]
            end = len(request.output_ids) if request.finished_len is None else request.finished_len
            steps[accepted, min(max(end - length, 0), accepted + 1)] += 1
            ended = ended or request.finished()
        _exporter.owed += 1
        if ended or _exporter.owed >= STEPS_OWED:
            settle()
