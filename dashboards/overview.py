"""The first look: is it serving, how fast, and with how much room left."""

from __future__ import annotations

from dashboards.grafana import Dashboard, Panel, Query
from dashboards.promql import (
    ALL_UP,
    ENGINE,
    ENGINES_UP,
    GATEWAY,
    JOB,
    MODEL,
    PROCESS,
    REPLICA,
    mean,
    quantile,
    rate,
    ratio,
    select,
    total,
)

GENERATIONS = 'route=~"/v1/chat/completions|/v1/completions"'
# Probes and scrapes come whether or not there are clients.
CLIENTS = 'route=~"/v1/.*|/tokenize|/detokenize|unmatched"'
FAILED = 'status=~"5.."'
QUANTILES = (0.5, 0.95, 0.99)
LOW_IS_GOOD = ((None, "green"), (0.01, "orange"), (0.05, "red"))


def percentiles(title: str, name: str, what: str, extra: str = "") -> Panel:
    queries = [Query(quantile(q, name, GATEWAY, extra), f"p{q * 100:g}") for q in QUANTILES]
    return Panel("timeseries", title, what, queries, unit="s")


def failed(by: str = "") -> str:
    return rate("gateway_requests_total", GATEWAY, by, f"{GENERATIONS},{FAILED}")


def by_route(*extra: str) -> str:
    return rate("gateway_requests_total", GATEWAY, "route", ",".join((CLIENTS, *extra)))


GLANCE = [
    Panel("stat", "Requests", "Finished generations per second, whatever their outcome.",
          [Query(rate("gateway_requests_total", GATEWAY, extra=GENERATIONS))], unit="reqps", width=3, height=4),
    Panel("stat", "Tokens", "Tokens delivered per second. Falls while requests do not: look at acceptance and "
          "fallbacks.",
          [Query(rate("ddtree_emitted_tokens_total", ENGINE))], unit="short", width=3, height=4),
    Panel("stat", "TTFT p95", "Time to first token of streams, as a client sees it. High with a queue: add replicas. "
          "High without one: long prompts, or prefill starved by decoding.",
          [Query(quantile(0.95, "gateway_ttft_seconds", GATEWAY))], unit="s", width=3, height=4),
    Panel("stat", "ITL p95", "Time per token within a stream. Rises when acceptance falls or forwards run eagerly.",
          [Query(quantile(0.95, "gateway_itl_seconds", GATEWAY))], unit="s", width=3, height=4),
    Panel("stat", "Errors", "Share of generations that ended with a 5xx status. Look at the errors by route below.",
          [Query(ratio(f"({failed()} or vector(0))", rate("gateway_requests_total", GATEWAY, extra=GENERATIONS)))],
          unit="percentunit", width=3, height=4, steps=LOW_IS_GOOD, decimals=2),
    Panel("stat", "Acceptance length", "Tokens per verify step. Near 1 speculation costs more than it gives: see the "
          "Speculation board.", [Query(mean("ddtree_acceptance_length", ENGINE))], width=3, height=4, decimals=2),
    Panel("stat", "Engine replicas", "Engines whose exporter answers. Fewer than wanted: see the table below.",
          [Query(f"sum ({ENGINES_UP})")], width=3, height=4),
    Panel("stat", "Waiting", "Requests without a slot in any engine's batch.",
          [Query(total("ddtree_queued_requests", ENGINE))], width=3, height=4),
]  # fmt: skip

TRAFFIC = [
    Panel("timeseries", "Requests by status", "Finished requests. 499 is a client that left, 429 and 503 are refusals.",
          [Query(rate("gateway_requests_total", GATEWAY, "route, status", CLIENTS), "{{status}} {{route}}")],
          unit="reqps", stacked=True),
    Panel("timeseries", "Tokens", "Tokens delivered by verify steps and by prefill (each answer's first), and prompt "
          "tokens computed.",
          [Query(rate("ddtree_emitted_tokens_total", ENGINE, "phase"), "delivered by {{phase}}"),
           Query(rate("ddtree_prefill_tokens_total", ENGINE), "prompt tokens computed")]),
    Panel("timeseries", "In flight", "Requests being served, and of those the ones without any answer yet.",
          [Query(total("gateway_inflight_requests", GATEWAY), "in flight"),
           Query(total("gateway_queued_requests", GATEWAY), "not answered yet")]),
]  # fmt: skip

LATENCY = [
    percentiles("Time to first token", "gateway_ttft_seconds", "Streams only. The SLO and its alert: 99 % within 2.5 "
    "s."),
    percentiles("Time per token", "gateway_itl_seconds", "Streams only; a chunk's gap is shared by its tokens. The SLO "
                "and its alert: 99 % within 0.1 s."),
    percentiles("Whole answer", "gateway_request_duration_seconds", "Until the last byte, streams and others."),
    Panel("heatmap", "Time to first token, distribution", "Two bands mean two kinds of requests: long prompts, or some "
          "that queued.", [Query(f"sum by (le) (increase({select('gateway_ttft_seconds_bucket', GATEWAY)}"
                                 "[$__rate_interval]))", "{{le}}")], unit="s", width=24, height=7),
]  # fmt: skip

TROUBLE = [
    Panel("timeseries", "Errors by route", "Share of each route's requests that ended with a 5xx status.",
          [Query(f"({by_route(FAILED)} or 0 * {by_route()}) / ({by_route()} > 0)", "{{route}}")],
          unit="percentunit", width=6),
    Panel("timeseries", "Refused", "Requests refused before they ran, by reason. `overload`: add replicas or lower the "
          "demand; `deadline`: the queue is longer than clients wait.",
          [Query(rate("gateway_rejected_total", PROCESS, "reason"), "{{reason}}")], unit="reqps", width=6,
          stacked=True),
    Panel("timeseries", "Streams that broke off", "Answers that ended with an error event after they had begun. The "
          "engine's log has the reason under the request id.",
          [Query(rate("gateway_stream_errors_total", GATEWAY), "broken")], unit="reqps", width=6),
    Panel("timeseries", "Saturation", "Slots and KV cache in use. At 100 % requests queue: add replicas, or slots "
          "where "
          "memory allows.",
          [Query(ratio(total("ddtree_running_requests", ENGINE), total("ddtree_request_slots", ENGINE)), "slots"),
           Query(ratio(total("ddtree_kv_tokens_used", ENGINE), total("ddtree_kv_tokens_capacity", ENGINE)), "KV "
           "cache")],
          unit="percentunit", width=6, ceiling=1),
]  # fmt: skip

REPLICAS = [
    Panel("table", "Processes and their nodes", "Every exporter that service discovery names. `Up` 0: it is listed and "
          "does not answer.",
          [Query("max by (deployment, node, replica, model) ("
                 f"{ALL_UP})", instant=True)],
          columns={"deployment": "Deployment", "node": "Node", "replica": "Replica", "model": "Model", "Value": "Up"}),
    Panel("timeseries", "Replicas", "Engines that answer, and how many the configuration asks for.",
          [Query(f"sum ({ENGINES_UP})", "up"),
           Query(total("gateway_replicas_wanted", GATEWAY, how="max"), "wanted")]),
    Panel("timeseries", "Age of processes", "Time since each began to export. A saw-tooth is a process that restarts "
          "again and again: look into its log.",
          [Query(f"time() - max by (replica) ({select('ddtree_start_time_seconds', PROCESS)})", "{{replica}}")],
          unit="s"),
]  # fmt: skip

OVERVIEW = Dashboard(
    "ddtree-overview", "DDTree / Overview", "Traffic, latency, errors, saturation, replicas.", (JOB, MODEL, REPLICA),
    {"At a glance": GLANCE, "Traffic": TRAFFIC, "Latency": LATENCY, "Trouble": TROUBLE, "Replicas": REPLICAS},
)  # fmt: skip
