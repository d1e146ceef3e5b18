"""Every time series of the product, declared once. Dashboards, alerts and docs are checked against this module.

Registries are passed in: one per process that exports. Labels are bounded: models are the configured ones, routes
are templates, reasons are enumerations. Means are always Δsum/Δcount of counters, never gauges reset per interval.

What this module does not do: expose HTTP (see `exporter`), or know engines and Ray.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
RESUME_OUTCOMES = ("resumed", "refused", "exhausted")
OUTCOMES = ("stop", "length", "abort", "error")
# Opened over the channel; opened by Serve's own transport, with items over the channel; else wholly by that, because a
# connection is being made, cannot be made, or is not offered.
CHANNEL_WAYS = ("opened", "channel", "connecting", "unreachable", "no_offer")
REJECT_REASONS = ("auth", "rate", "overload", "invalid", "deadline")
ROLES = ("target", "draft")
PHASES = ("prefill", "draft", "verify", "accept")
# OpenMetrics allows an exemplar 128 characters, its label's name included.
_EXEMPLAR_LABEL = "request_id"
_EXEMPLAR_ROOM = 128 - len(_EXEMPLAR_LABEL)


def exemplar(request_id: str) -> dict[str, str] | None:
    """What links a sample to one request's log lines and trace; None for an id that is too long for the format."""
    return {_EXEMPLAR_LABEL: request_id} if 0 < len(request_id) <= _EXEMPLAR_ROOM else None


def observe_gaps(histogram: Histogram, gaps: Sequence[tuple[float, int]]) -> None:
    """`histogram.observe(seconds / count)`, `count` times for each of `gaps`, with one write per bucket.

    Args:
        gaps: seconds, and how many tokens share them.
    """
    buckets: dict[int, int] = {}
    for seconds, count in gaps:
        at = bisect_left(histogram._upper_bounds, seconds / count)
        buckets[at] = buckets.get(at, 0) + count
    histogram._sum.inc(sum(seconds for seconds, _ in gaps))
    for at, count in buckets.items():
        histogram._buckets[at].inc(count)


def _gauge(registry: CollectorRegistry, name: str, help: str, *labels: str) -> Gauge:
    """The mode matters where values live in files: only living processes count, without a label of their own."""
    return Gauge(name, help, ("model", *labels), registry=registry, multiprocess_mode="livesum")


class LoadMetrics:
    """How full an engine is and how requests end, as the process that takes them sees it.

    Args:
        registry: where to declare; declaring twice in one registry raises. model: the served model's id.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model

        def gauge(name: str, help: str) -> Gauge:
            return _gauge(registry, name, help)

        self._requests = Counter(
            "ddtree_requests_total",
            "Choices that ended, by how; no health probes.",
            ("model", "outcome"),
            registry=registry,
        )
        self._running = gauge("ddtree_running_requests", "Requests in the running batch.")
        self._queued = gauge("ddtree_queued_requests", "Requests waiting for a slot.")
        self._kv_used = gauge("ddtree_kv_tokens_used", "Tokens held in the KV cache.")
        self._kv_capacity = gauge("ddtree_kv_tokens_capacity", "Tokens that the KV cache can hold.")
        self._slots = gauge("ddtree_request_slots", "Requests that can run together.")
        for outcome in OUTCOMES:
            self._requests.labels(model, outcome)

    def ended(self, outcome: str) -> None:
        """One choice is over, as one of `OUTCOMES`."""
        self._requests.labels(self._model, outcome).inc()

    def capacity(self, slots: int, kv_tokens: int) -> None:
        self._slots.labels(self._model).set(slots)
        self._kv_capacity.labels(self._model).set(kv_tokens)

    def load(self, running: int, queued: int, kv_tokens: int) -> None:
        self._running.labels(self._model).set(running)
        self._queued.labels(self._model).set(queued)
        self._kv_used.labels(self._model).set(kv_tokens)


class StepMetrics:
    """What an engine's steps do: acceptance, trees, graphs. SGLang takes its steps in a process of their own.

    Args:
        registry: where to declare; declaring twice in one registry raises.
        model: the served model's id, the only value of label `model` here.
        max_acceptance: longest possible acceptance length (the drafter's block size); one histogram bucket each.
        fallback_reasons: every reason a forward can run eagerly for, so that all series exist from the start.
    """

    def __init__(
        self, registry: CollectorRegistry, model: str, max_acceptance: int, fallback_reasons: Sequence[str]
    ) -> None:
        self._model = model

        def counter(name: str, help: str, *labels: str) -> Callable[..., Counter]:
            """The series of given label values; looked up once, since steps take well under a millisecond each."""
            family = Counter(name, help, ("model", *labels), registry=registry)
            return cache(lambda *values: family.labels(model, *values))

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return _gauge(registry, name, help, *labels)

        self._acceptance = Histogram(
            "ddtree_acceptance_length",
            "Tokens committed by one verify step of one request, bonus token included.",
            ("model",),
            buckets=tuple(float(n) for n in range(1, max_acceptance + 1)),
            registry=registry,
        ).labels(model)
        self._steps = counter("ddtree_verify_steps_total", "Verify steps, counted per request.")()
        self._accepted = counter("ddtree_accepted_tokens_total", "Draft tokens accepted and emitted.")()
        self._bonus = counter("ddtree_bonus_tokens_total", "Bonus tokens emitted.")()
        self._trimmed = counter(
            "ddtree_trimmed_tokens_total", "Tokens cut by a stop or a length limit after they were accepted."
        )()
        self._depth = counter("ddtree_accepted_depth_total", "Draft tokens accepted, by depth in the tree.", "depth")
        self._nodes = counter("ddtree_tree_nodes_total", "Draft-tree nodes verified, roots excluded.")()
        self._prefill = counter("ddtree_prefill_tokens_total", "Prompt tokens computed.")()
        self._emitted = counter(
            "ddtree_emitted_tokens_total", "Tokens emitted, by prefill (the first) and by verify steps.", "phase"
        )
        self._replays = counter("ddtree_graph_replays_total", "Forwards served by graph replay.", "role")
        self._fallbacks = counter(
            "ddtree_graph_fallbacks_total", "Forwards that ran eagerly, by the reason.", "role", "reason"
        )
        self._padding = counter(
            "ddtree_graph_padding_rows_total", "Rows replayed only to fill a captured batch size.", "role"
        )
        self._bucket_rows = counter(
            "ddtree_graph_bucket_rows_total",
            "Rows of replays by the captured batch size that held them, real or padding.",
            "role", "bucket", "kind",
        )  # fmt: skip
        self._captured = gauge("ddtree_graph_captured", "Graphs that can be replayed.", "role")
        self._capture_seconds = gauge("ddtree_graph_capture_seconds", "Time that capturing took.", "role")
        self._capture_bytes = gauge("ddtree_graph_capture_bytes", "Device memory that capturing reserved.", "role")
        self._budgets = counter("ddtree_budget_steps_total", "Verify steps, by the tree's budget in nodes.", "budget")
        self._phases = counter("ddtree_step_seconds_total", "Time of the step loop as the host sees it.", "phase")
        self._preparations = counter(
            "ddtree_step_preparations_total", "Steps by how their replays were prepared, or why in another way.", "how"
        )
        for phase in PHASES:
            self._phases(phase)
        for role in ROLES:
            self._replays(role)
            self._padding(role)
            for made in (self._captured, self._capture_seconds, self._capture_bytes):
                made.labels(model, role)
            for reason in fallback_reasons:
                self._fallbacks(role, reason)
        for phase in ("prefill", "verify"):
            self._emitted(phase)
        for depth in range(1, max_acceptance):
            self._depth(str(depth))

    def verify_step(self, accepted: int, emitted: int, committed: int, nodes: int, times: int = 1) -> None:
        """One verify step of one request, or `times` equal ones.

        Args:
            accepted: drafts accepted before any trimming (acceptance length − 1).
            emitted: tokens that reached the client, after trimming by stop or length.
            committed: accepted + 1 (the bonus token).
            nodes: tree nodes verified, root excluded.
        Acceptance length counts what was emitted, so that its sum equals the tokens delivered by verify steps.
        """
        self._steps.inc(times)
        self._nodes.inc(nodes * times)
        self._budgets(str(nodes)).inc(times)
        self._trimmed.inc((committed - emitted) * times)
        for _ in range(times):
            self._acceptance.observe(emitted)
        self._emitted("verify").inc(emitted * times)
        kept = min(accepted, emitted)
        self._accepted.inc(kept * times)
        self._bonus.inc((emitted - kept) * times)
        for depth in range(1, accepted + 1):
            self._depth(str(depth)).inc(times)

    def prefill(self, tokens: int, emitted: int) -> None:
        """Prompt tokens computed, and first tokens emitted by it."""
        self._prefill.inc(tokens)
        self._emitted("prefill").inc(emitted)

    def step_phase(self, phase: str, seconds: float) -> None:
        """Time spent in one of `PHASES`. Where a device works ahead of the host, it shows up in whichever waits."""
        self._phases(phase).inc(seconds)

    def step_preparation(self, how: str, times: int = 1) -> None:
        """The forwards of `times` steps were prepared `how`."""
        self._preparations(how).inc(times)

    def graph_replay(self, role: str, padding_rows: int, bucket: int, times: int = 1) -> None:
        """`times` replays. `bucket`: the captured batch size; `padding_rows` of it held no request."""
        self._replays(role).inc(times)
        self._padding(role).inc(padding_rows * times)
        self._bucket_rows(role, str(bucket), "real").inc((bucket - padding_rows) * times)
        self._bucket_rows(role, str(bucket), "padding").inc(padding_rows * times)

    def graph_capture(self, role: str, graphs: int, seconds: float, reserved_bytes: int) -> None:
        """A capture of `graphs` shapes has ended; the last one counts."""
        self._captured.labels(self._model, role).set(graphs)
        self._capture_seconds.labels(self._model, role).set(seconds)
        self._capture_bytes.labels(self._model, role).set(reserved_bytes)

    def graph_fallback(self, role: str, reason: str) -> None:
        self._fallbacks(role, reason).inc()


class EngineMetrics(StepMetrics, LoadMetrics):
    """Both, for an engine that takes requests and steps in one process."""

    def __init__(
        self, registry: CollectorRegistry, model: str, max_acceptance: int, fallback_reasons: Sequence[str]
    ) -> None:
        StepMetrics.__init__(self, registry, model, max_acceptance, fallback_reasons)
        LoadMetrics.__init__(self, registry, model)


class GatewayMetrics:
    """Series of one ingress process, as a client sees the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "gateway_requests_total", "Finished HTTP requests.", ("route", "status", "model"), registry=registry
        )
        per_model = ("model", "stream")
        self.duration = Histogram(
            "gateway_request_duration_seconds",
            "Time from request line to last byte.",
            per_model,
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.ttft = Histogram(
            "gateway_ttft_seconds",
            "Time from request line to the first content.",
            per_model,
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.itl = Histogram(
            "gateway_itl_seconds",
            "Time between tokens: a chunk's gap shared by its tokens, one observation per token.",
            per_model,
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        self.inflight = Gauge("gateway_inflight_requests", "Requests being served.", ("model",), registry=registry)
        self.queued = Gauge("gateway_queued_requests", "Requests without a token yet.", ("model",), registry=registry)
        self.rejected = Counter("gateway_rejected_total", "Requests refused.", ("reason",), registry=registry)
        self.stream_errors = Counter(
            "gateway_stream_errors_total", "Streams that ended with an error frame.", ("model",), registry=registry
        )
        self.replicas_wanted = Gauge(
            "gateway_replicas_wanted", "Engine replicas that the configuration asks for.", ("model",), registry=registry
        )
        self.resumes = Counter(
            "gateway_resumes_total",
            "Answers whose replica was lost: resumed on another, refused (policy or sampling), exhausted (lost again).",
            ("outcome",),
            registry=registry,
        )
        self.channel_streams = Counter(
            "gateway_channel_streams_total",
            "Answers by how they began: opened over the connection to the replica (opened), opened by Serve's own "
            "transport with items over the connection (channel), or wholly by that, because the connection is being "
            "made (connecting), cannot be made (unreachable), or is not offered (no_offer).",
            ("way",),
            registry=registry,
        )
        self.waiting = Gauge(
            "gateway_waiting_requests", "Requests that wait for admission.", ("priority",), registry=registry
        )
        self.key_tokens = Counter(
            "gateway_key_tokens_total", "Tokens used, by API key.", ("key", "kind"), registry=registry
        )
        for reason in REJECT_REASONS:
            self.rejected.labels(reason)
        for outcome in RESUME_OUTCOMES:
            self.resumes.labels(outcome)
        for way in CHANNEL_WAYS:
            self.channel_streams.labels(way)

    def serves(self, model: str, replicas: int) -> None:
        """Series of the configured model exist from the start, so that nothing looks like a gap."""
        self.replicas_wanted.labels(model).set(replicas)
        for gauge in (self.inflight, self.queued):
            gauge.labels(model)
        self.stream_errors.labels(model)
        for stream in ("true", "false"):
            self.duration.labels(model, stream)
        for latency in (self.ttft, self.itl):
            latency.labels(model, "true")


class ProcessMetrics:
    """What every exporting process says about itself, beside prometheus_client's own `process_*` series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ProcessCollector(registry=registry)
        Gauge("ddtree_start_time_seconds", "Unix time at which this process began to export.", registry=registry).set(
            time.time()
        )
