"""Every time series of the product, declared once. Dashboards, alerts and docs are checked against this module.

Registries are passed in: one per process that exports. Labels are bounded: models are the configured ones, routes
are templates, reasons are enumerations. Means are always Δsum/Δcount of counters, never gauges reset per interval.

What this module does not do: expose HTTP (see `exporter`), or know engines and Ray.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
OUTCOMES = ("stop", "length", "abort", "error")
REJECT_REASONS = ("auth", "rate", "overload", "invalid", "deadline")


class EngineMetrics:
    """Series of one engine process; see design: acceptance, tree, graphs.

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

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, ("model", *labels), registry=registry)

        self._acceptance = Histogram(
            "ddtree_acceptance_length",
            "Tokens committed by one verify step of one request, bonus token included.",
            ("model",),
            buckets=tuple(float(n) for n in range(1, max_acceptance + 1)),
            registry=registry,
        ).labels(model)
        self._steps = counter("ddtree_verify_steps_total", "Verify steps, counted per request.").labels(model)
        self._accepted = counter("ddtree_accepted_tokens_total", "Draft tokens accepted and emitted.").labels(model)
        self._bonus = counter("ddtree_bonus_tokens_total", "Bonus tokens emitted.").labels(model)
        self._trimmed = counter(
            "ddtree_trimmed_tokens_total", "Tokens cut by a stop or a length limit after they were accepted."
        ).labels(model)
        self._depth = counter("ddtree_accepted_depth_total", "Draft tokens accepted, by depth in the tree.", "depth")
        self._nodes = counter("ddtree_tree_nodes_total", "Draft-tree nodes verified, roots excluded.").labels(model)
        self._prefill = counter("ddtree_prefill_tokens_total", "Prompt tokens computed.").labels(model)
        self._emitted = counter(
            "ddtree_emitted_tokens_total", "Tokens emitted, by prefill (the first) and by verify steps.", "phase"
        )
        self._requests = counter("ddtree_requests_total", "Choices that ended, by how; no health probes.", "outcome")
        self._replays = counter("ddtree_graph_replays_total", "Forwards served by graph replay.", "role")
        self._fallbacks = counter(
            "ddtree_graph_fallbacks_total", "Forwards that ran eagerly, by the reason.", "role", "reason"
        )
        self._padding = counter(
            "ddtree_graph_padding_rows_total", "Rows replayed only to fill a captured batch size.", "role"
        )
        self._running = Gauge(
            "ddtree_running_requests", "Requests in the running batch.", ("model",), registry=registry
        )
        self._queued = Gauge("ddtree_queued_requests", "Requests waiting for a slot.", ("model",), registry=registry)
        self._kv_used = Gauge("ddtree_kv_tokens_used", "Tokens held in the KV cache.", ("model",), registry=registry)
        for role in ("target", "draft"):
            self._replays.labels(model, role)
            self._padding.labels(model, role)
            for reason in fallback_reasons:
                self._fallbacks.labels(model, role, reason)
        for phase in ("prefill", "verify"):
            self._emitted.labels(model, phase)
        for outcome in OUTCOMES:
            self._requests.labels(model, outcome)
        for depth in range(1, max_acceptance):
            self._depth.labels(model, str(depth))

    def verify_step(self, accepted: int, emitted: int, committed: int, nodes: int) -> None:
        """One verify step of one request.

        Args:
            accepted: drafts accepted before any trimming (acceptance length − 1).
            emitted: tokens that reached the client, after trimming by stop or length.
            committed: accepted + 1 (the bonus token).
            nodes: tree nodes verified, root excluded.
        Acceptance length counts what was emitted, so that its sum equals the tokens delivered by verify steps.
        """
        self._steps.inc()
        self._nodes.inc(nodes)
        self._trimmed.inc(committed - emitted)
        self._acceptance.observe(emitted)
        self._emitted.labels(self._model, "verify").inc(emitted)
        kept = min(accepted, emitted)
        self._accepted.inc(kept)
        self._bonus.inc(emitted - kept)
        for depth in range(1, accepted + 1):
            self._depth.labels(self._model, str(depth)).inc()

    def ended(self, outcome: str) -> None:
        """One choice is over, as one of `OUTCOMES`."""
        self._requests.labels(self._model, outcome).inc()

    def prefill(self, tokens: int, emitted: int) -> None:
        """Prompt tokens computed, and first tokens emitted by it."""
        self._prefill.inc(tokens)
        self._emitted.labels(self._model, "prefill").inc(emitted)

    def graph_replay(self, role: str, padding_rows: int) -> None:
        self._replays.labels(self._model, role).inc()
        self._padding.labels(self._model, role).inc(padding_rows)

    def graph_fallback(self, role: str, reason: str) -> None:
        self._fallbacks.labels(self._model, role, reason).inc()

    def load(self, running: int, queued: int, kv_tokens: int) -> None:
        self._running.labels(self._model).set(running)
        self._queued.labels(self._model).set(queued)
        self._kv_used.labels(self._model).set(kv_tokens)


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
        self.queued = Gauge("gateway_queued_requests", "Requests not answered yet.", ("model",), registry=registry)
        self.rejected = Counter("gateway_rejected_total", "Requests refused.", ("reason",), registry=registry)
        self.stream_errors = Counter(
            "gateway_stream_errors_total", "Streams that ended with an error frame.", ("model",), registry=registry
        )
        for reason in REJECT_REASONS:
            self.rejected.labels(reason)
