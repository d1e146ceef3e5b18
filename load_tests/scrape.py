"""The server's own series while the load runs, as differences over each interval.

What this module does not do: parse all of Prometheus's format; it reads the few series it names, cheaply, because the
reading happens in the process that measures.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

NAMES = (
    "ddtree_acceptance_length_sum", "ddtree_acceptance_length_count", "ddtree_emitted_tokens_total",
    "ddtree_graph_replays_total", "ddtree_graph_fallbacks_total", "ddtree_running_requests", "ddtree_queued_requests",
    "ddtree_kv_tokens_used", "ddtree_requests_total", "gateway_inflight_requests", "gateway_requests_total",
    "sglang:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_count",
    "ddtree_step_seconds_total", "sglang:cuda_graph_passes_total", "gateway_resumes_total",
)  # fmt: skip
_SAMPLE = re.compile(rf"^({'|'.join(NAMES)})(?:\{{(.*?)\}})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Sample = tuple[dict[str, str], float]
Page = dict[str, list[Sample]]


def parse(text: str) -> Page:
    """name → samples, of the names above."""
    page: Page = defaultdict(list)
    for name, labels, value in _SAMPLE.findall(text):
        page[name].append((dict(_LABEL.findall(labels)), float(value)))
    return page


def total(page: Page, name: str, **labels: str) -> float:
    """Sum over all samples with these labels."""
    return sum(value for has, value in page.get(name, ()) if labels.items() <= has.items())


def by_label(page: Page, name: str, *keys: str) -> dict[str, float]:
    """Sums by the values of some labels, joined with a slash."""
    sums: dict[str, float] = defaultdict(float)
    for labels, value in page.get(name, ()):
        sums["/".join(labels.get(key, "") for key in keys)] += value
    return dict(sums)


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Increase by key. A counter that fell belongs to a process that was replaced: it counts from zero."""
    out = {
        key: value - before.get(key, 0.0) if value >= before.get(key, 0.0) else value for key, value in after.items()
    }
    return {key: value for key, value in out.items() if value}


def growth(before: Page, after: Page, name: str, *keys: str) -> dict[str, float]:
    """Increase between two pages by the values of some labels, as `by_label` has them."""
    return grown(by_label(before, name, *keys), by_label(after, name, *keys))


def change(before: Page, after: Page, seconds: float) -> dict[str, Any]:
    """What the server did between two pages."""

    def delta(name: str, **labels: str) -> float:
        old, new = total(before, name, **labels), total(after, name, **labels)
        return new - old if new >= old else new

    steps = delta("ddtree_acceptance_length_count")
    return {
        "acceptance": delta("ddtree_acceptance_length_sum") / steps if steps else None,
        "tok_per_s": delta("ddtree_emitted_tokens_total") / seconds if seconds > 0 else None,
        "verify_steps": steps,
        "replays": delta("ddtree_graph_replays_total"),
        "fallbacks": growth(before, after, "ddtree_graph_fallbacks_total", "role", "reason"),
        "running": total(after, "ddtree_running_requests"),
        "queued": total(after, "ddtree_queued_requests"),
        "kv_tokens": total(after, "ddtree_kv_tokens_used"),
    }
