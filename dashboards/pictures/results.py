"""What a Prometheus answers to the queries of every panel of a board.

What this module does not do: draw.
"""

from __future__ import annotations

import json
import math
import urllib.parse
import urllib.request
from typing import Any

from dashboards.expressions import fill, panels

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def board_results(board: dict[str, Any], prometheus: str, start: float, end: float, rate_interval: str) -> list[Any]:
    """One list of series for each panel: {"labels", "legend", "points": [[unix time, value], …]}."""
    step = max(1, math.ceil((end - start) / 240))
    return [
        [one for target in panel["targets"] for one in _series(target, prometheus, start, end, step, rate_interval)]
        for panel in panels(board)
    ]


def _series(
    target: dict[str, Any], prometheus: str, start: float, end: float, step: int, interval: str
) -> list[dict[str, Any]]:
    query = {"query": fill(target["expr"], interval)}
    if target["instant"]:
        found = _ask(prometheus, "query", {**query, "time": str(end)})
        points = [(one["metric"], [one["value"]]) for one in found]
    else:
        found = _ask(prometheus, "query_range", {**query, "start": str(start), "end": str(end), "step": str(step)})
        points = [(one["metric"], one["values"]) for one in found]
    return [
        {"labels": labels, "legend": legend(target["legendFormat"], labels), "points": _finite(values)}
        for labels, values in points
    ]


def legend(template: str, labels: dict[str, str]) -> str:
    """`{{label}}` filled in; `__auto` is whatever labels there are."""
    if template == "__auto":
        return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template


def _finite(values: list[Any]) -> list[list[float]]:
    # JSON has no NaN.
    return [[float(at), float(value)] for at, value in values if math.isfinite(float(value))]


def _ask(prometheus: str, path: str, params: dict[str, str]) -> list[Any]:
    url = f"{prometheus.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(params)}"
    with _DIRECT.open(url, timeout=60) as answer:
        result: list[Any] = json.load(answer)["data"]["result"]
    return result
