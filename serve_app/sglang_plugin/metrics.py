"""Counters of the scheduler process, written through Prometheus's multiprocess files; see `serve_app.metrics`.

Made at the first use: prometheus_client decides at its import whether values live in files, and SGLang sets that
directory up later than it loads plugins. Only the first rank counts. Everything here works on host values that SGLang
already has; nothing synchronises with the GPU.

What this module does not do: expose HTTP.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serve_app.sglang_plugin.args import Options

if TYPE_CHECKING:
    from serve_app.metrics import StepMetrics

logger = logging.getLogger(__name__)


@dataclass
class Exporter:
    """The process's metrics and the widths they are counted with."""

    metrics: StepMetrics
    chosen: Options


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


def graph_replay(role: str, padding_rows: int, bucket: int) -> None:
    if _exporter is not None:
        _exporter.metrics.graph_replay(role, padding_rows, bucket)


def preparation(how: str) -> None:
    if _exporter is not None:
        _exporter.metrics.step_preparation(str(how))


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


def phase(name: str, seconds: float) -> None:
    """Host time of a step's part; with overlap the device works behind it."""
    if _exporter is not None:
        _exporter.metrics.step_phase(name, seconds)


@dataclass
class StepRecord:
    """A verify step's requests as they were before the scheduler trimmed what they got.

    Attributes:
        requests: (index in the batch, request, its output length before) of those still running.
    """

    requests: list[tuple[int, Any, int]]

    @staticmethod
    def before(batch: Any) -> StepRecord:
        if _exporter is None:
            return StepRecord([])
        running = enumerate(batch.reqs)
        return StepRecord([(i, r, len(r.output_ids)) for i, r in running if not (r.finished() or r.is_retracted)])

    def after(self, result: Any) -> None:
        """Count the steps. `result`: SGLang's GenerationBatchResult, processed."""
        accepted_by_request = result.num_correct_drafts_per_req_cpu
        if _exporter is None or accepted_by_request is None:
            return
        for index, request, length in self.requests:
            accepted = accepted_by_request[index]
            end = len(request.output_ids) if request.finished_len is None else request.finished_len
            emitted = min(max(end - length, 0), accepted + 1)
            _exporter.metrics.verify_step(accepted, emitted, accepted + 1, _exporter.chosen.budget)
