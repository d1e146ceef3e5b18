"""Spans as a collector receives them, and that nobody pays for what is off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import load_config
from serve_app.engines.base import Chunk, Trail, Usage
from serve_app.errors import ConfigError
from serve_app.ingress.generation import Gateway
from serve_app.protocol import Origin
from serve_app.tracing import Tracer, check, make_tracer
from tests.conftest import chat
from tests.direct import direct_client, make_gateway
from tests.otlp import Collector, attributes

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="the extra `tracing` is not installed"
    )
    collector = Collector()
    yield collector
    collector.close()


async def traced(collector: Collector, body: Any, **headers: str) -> Gateway:
    """One request through ingress and replica, whose spans have all arrived."""
    config = load_config({"tracing": {"endpoint": collector.url}}, use_env=False).tracing
    gateway = await make_gateway({"tracing": {"endpoint": collector.url}})
    gateway.tracer = make_tracer(config, "ingress")
    async with direct_client(gateway) as client:
        await client.post(CHAT, json=body, headers=headers)
    gateway.tracer.close()
    gateway.backend.replica._tracer.close()  # type: ignore[attr-defined]
    return gateway


async def test_a_clients_trace_goes_on_through_ingress_and_replica(collector: Collector) -> None:
    await traced(collector, chat("a b", stream=True), traceparent=TRACEPARENT)
    ingress, route = collector.named(f"POST {CHAT}"), collector.named("route")
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert ingress.parent_span_id.hex() == PARENT
    assert route.parent_span_id == ingress.span_id


async def test_a_request_without_a_trace_begins_one(collector: Collector) -> None:
    await traced(collector, chat("a"))
    assert collector.named(f"POST {CHAT}").parent_span_id == b""


async def test_a_client_that_does_not_sample_is_not_sampled(collector: Collector) -> None:
    await traced(collector, chat("a"), traceparent=TRACEPARENT[:-2] + "00")
    assert collector.spans == []


async def test_the_ingress_tells_the_outcome_and_the_request_id(collector: Collector) -> None:
    await traced(collector, chat("refuse=EngineFailed"), **{"x-request-id": "mine"})
    span = collector.named(f"POST {CHAT}")
    said = attributes(span)
    assert said["http.response.status_code"] == 500 and said["request.id"] == "mine"
    assert span.status.code == 2


async def test_no_span_holds_the_prompt(collector: Collector) -> None:
    await traced(collector, chat("confidential words"))
    assert "confidential" not in str(collector.spans)


def choice(collector: Collector, trail: Trail) -> None:
    tracer = Tracer(load_config({"tracing": {"endpoint": collector.url}}, use_env=False).tracing, "engine")
    chunk = Chunk(0, (5,), "x", finish_reason="stop", usage=Usage(7, 9), trail=trail)
    tracer.choice(Origin("mine", {"traceparent": TRACEPARENT}), chunk)
    tracer.close()


def test_queue_prefill_and_decode_follow_each_other(collector: Collector) -> None:
    choice(
        collector, Trail(queued_ns=10, admitted_ns=20, first_token_ns=50, finished_ns=90, steps=2, accepted=6, nodes=30)
    )
    times = {span.name: (span.start_time_unix_nano, span.end_time_unix_nano) for span in collector.spans}
    assert times == {"queue": (10, 20), "prefill": (20, 50), "decode": (50, 90)}


def test_decode_tells_steps_acceptance_and_fallbacks(collector: Collector) -> None:
    choice(collector, Trail(10, 90, 20, 50, steps=2, accepted=6, nodes=30, eager_forwards=4))
    said = attributes(collector.named("decode"))
    assert {name: said[f"ddtree.{name}"] for name in ("steps", "accepted", "nodes", "eager_forwards")} == {
        "steps": 2, "accepted": 6, "nodes": 30, "eager_forwards": 4
    }  # fmt: skip
    assert said["ddtree.acceptance_length"] == 4.0 and said["gen_ai.usage.output_tokens"] == 9


def test_what_was_never_reached_has_no_span(collector: Collector) -> None:
    choice(collector, Trail(queued_ns=10, finished_ns=30))
    assert [span.name for span in collector.spans] == ["queue"]


async def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, serve_app.build as build; build.build_app({});"
        "sys.exit('opentelemetry.sdk.trace' in sys.modules and 'opentelemetry.exporter.otlp.proto.http' in sys.modules)"
    )
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_a_missing_package_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"ddtree-serve\[tracing\]") as caught:
        check(load_config({"tracing": {"endpoint": "http://127.0.0.1:4318"}}, use_env=False).tracing)
    assert caught.value.param == "tracing.endpoint"
