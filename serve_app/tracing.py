"""OpenTelemetry spans of a request: the ingress's own, and behind it route, queue, prefill and decode.

Off unless `tracing.endpoint` names an OTLP collector; needs the extra `tracing`. A W3C traceparent that a client sends
is continued, and travels with the job. The replica's spans are made after the fact, from times that the engine kept:
nothing is opened or closed on the token path.

What this module does not do: touch OpenTelemetry's global provider, which belongs to whoever embeds the application.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app import __version__
from serve_app.config import TracingConfig
from serve_app.engines.base import Chunk
from serve_app.errors import ConfigError
from serve_app.protocol import Origin

_HEADERS = ("traceparent", "tracestate")


def make_tracer(config: TracingConfig, instance: str) -> Tracer | None:
    """None where tracing is off. `instance`: which process this is.

    Raises:
        ConfigError: the extra is not installed.
    """
    return None if config.endpoint is None else Tracer(config, instance)


def check(config: TracingConfig) -> None:
    """Raises ConfigError where tracing is on and its packages are missing; imports nothing where it is off."""
    if config.endpoint is not None:
        _packages()


def _packages() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk import trace
    except ImportError as error:
        reason = f"tracing.endpoint needs OpenTelemetry: pip install 'ddtree-serve[tracing]' ({error})"
        raise ConfigError(reason, param="tracing.endpoint") from None
    return trace, trace_exporter


class Tracer:
    """Makes this process's spans and sends them in batches from a thread of its own."""

    def __init__(self, config: TracingConfig, instance: str) -> None:
        trace, otlp = _packages()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        names = {
            "service.name": config.service_name, "service.version": __version__, "service.instance.id": instance
        }  # fmt: skip
        self._provider = trace.TracerProvider(
            resource=Resource.create(names), sampler=ParentBased(TraceIdRatioBased(config.sample_ratio))
        )
        endpoint = f"{str(config.endpoint).rstrip('/')}/v1/traces"
        self._provider.add_span_processor(BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("serve_app", __version__)
        self._propagator = TraceContextTextMapPropagator()

    # -- in the ingress --------------------------------------------------------------------------------------------

    def begin(self, method: str, headers: Mapping[str, str]) -> Any:
        """The span of an HTTP request, a child of the client's own where the headers name one."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract({name: headers[name] for name in _HEADERS if name in headers})
        return self._tracer.start_span(method, context=context, kind=SpanKind.SERVER)

    def carry(self, span: Any) -> dict[str, str]:
        """The W3C headers by which another process continues the span."""
        from opentelemetry.trace import set_span_in_context

        headers: dict[str, str] = {}
        self._propagator.inject(headers, context=set_span_in_context(span))
        return headers

    def finish(self, span: Any, method: str, route: str, status: int, attributes: Mapping[str, Any]) -> None:
        from opentelemetry.trace import StatusCode

        span.update_name(f"{method} {route}")
        span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    # -- in the replica --------------------------------------------------------------------------------------------

    def route(self, origin: Origin, arrived_ns: int) -> None:
        """From the ingress's hands into the replica's. Two machines' clocks: it may look shorter than it was."""
        self._span("route", origin, origin.sent_ns, arrived_ns, {"request.id": origin.request_id})

    def choice(self, origin: Origin, chunk: Chunk) -> None:
        """Queue, prefill and decode of one choice, whose last chunk this is."""
        trail = chunk.trail
        if trail is None:
            return
        where = {"request.id": origin.request_id, "ddtree.choice": chunk.index}
        self._span("queue", origin, trail.queued_ns, trail.admitted_ns or trail.finished_ns, where)
        if trail.admitted_ns is None:
            return
        usage = chunk.usage
        tokens = {} if usage is None else {"gen_ai.usage.input_tokens": usage.prompt_tokens}
        self._span("prefill", origin, trail.admitted_ns, trail.first_token_ns or trail.finished_ns, where | tokens)
        if trail.first_token_ns is None:
            return
        decoded: dict[str, Any] = {
            "ddtree.steps": trail.steps,
            "ddtree.accepted": trail.accepted,
            "ddtree.nodes": trail.nodes,
            "ddtree.acceptance_length": 1 + trail.accepted / trail.steps if trail.steps else 0.0,
            "ddtree.eager_forwards": trail.eager_forwards,
            "gen_ai.response.finish_reasons": (chunk.finish_reason or "",),
        }
        if usage is not None:
            decoded["gen_ai.usage.output_tokens"] = usage.completion_tokens
        self._span("decode", origin, trail.first_token_ns, trail.finished_ns, where | decoded)

    def _span(self, name: str, origin: Origin, start_ns: int, end_ns: int, attributes: Mapping[str, Any]) -> None:
        context = self._propagator.extract(origin.trace)
        span = self._tracer.start_span(name, context=context, start_time=start_ns, attributes=dict(attributes))
        span.end(end_time=max(start_ns, end_ns))

    def close(self) -> None:
        """Send what is left. Blocks, for a collector that does not answer as long as its exporter waits."""
        self._provider.shutdown()
