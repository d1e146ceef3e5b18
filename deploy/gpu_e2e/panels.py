"""Whether every panel of the dashboards has data: asked of a real Prometheus where there is one, else read off scrapes.

Without a Prometheus, the exporters that the application announces are scraped as Prometheus would, twice, and each
expression's selectors are matched against what came. That shows a series that nobody exports, or a label that differs;
what it cannot show is a wrong expression over series that exist (tests/dashboards does).
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

from dashboards.boards import ABSENT_ON_CPU
from dashboards.expressions import Expression, expressions
from dashboards.selectors import names
from deploy.monitoring.binaries import Unavailable, find
from deploy.monitoring.run import command, configuration
from load_tests.target import free_port, get, get_json

_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_DIVISOR = re.compile(r"/ \(([^>]*?)> 0")
Key = tuple[str, frozenset[tuple[str, str]]]
Scrape = dict[Key, float]
# They come from another exporter, which is no part of the application.
_FOREIGN = "DCGM"
COUNTERS = ("_total", "_bucket", "_count", "_sum")


@dataclass(frozen=True)
class Finding:
    """One expression. `state`: data, empty, or foreign. `why`: what it lacks. `still`: counters that did not grow, so
    that its line is there and lies at zero."""

    board: str
    panel: str
    state: str
    why: str = ""
    still: tuple[str, ...] = ()


def scrape(url: str) -> Scrape:
    """Every exporter's series, with the labels that service discovery gives them, and `up`."""
    found: Scrape = {}
    for group in get_json(f"{url}/-/prometheus/targets") or ():
        labels = {"job": "ddtree", **group["labels"]}
        for target in group["targets"]:
            path = labels.get("__metrics_path__", "/metrics")
            page = get(f"http://{target}{path}")
            own = {name: value for name, value in labels.items() if not name.startswith("__")} | {"instance": target}
            found["up", frozenset(own.items())] = float(page is not None)
            for family in text_string_to_metric_families((page or b"").decode()):
                for sample in family.samples:
                    # A series' own label stays.
                    found[sample.name, frozenset((own | sample.labels).items())] = sample.value
    return found


def judge(before: Scrape, after: Scrape, wanted: Iterable[Expression] | None = None) -> list[Finding]:
    """Every expression of the dashboards over two scrapes of one life of the application."""
    by_name: dict[str, list[Key]] = {}
    for key in after:
        by_name.setdefault(key[0], []).append(key)
    return [_one(expression, before, after, by_name) for expression in wanted or expressions()]


def _one(expression: Expression, before: Scrape, after: Scrape, by_name: Mapping[str, list[Key]]) -> Finding:
    text = expression.filled("15s")
    selectors = names(text).selectors
    if any(name.startswith(_FOREIGN) for name, _, _ in selectors):
        return Finding(expression.board, expression.panel, "foreign", ABSENT_ON_CPU.get(_where(expression), _FOREIGN))
    missing, still = [], []
    grew = {
        name for name, _, selector in selectors for key in by_name.get(name, ())
        if matches(selector, dict(key[1])) and after[key] > before.get(key, 0.0)
    }  # fmt: skip
    for name, _, selector in selectors:
        matching = [key for key in by_name.get(name, ()) if matches(selector, dict(key[1]))]
        if not matching:
            missing.append(f"{selector} has no series" if name in by_name else f"{name} is not exported")
        elif name.endswith(COUNTERS) and not any(after[key] > before.get(key, 0.0) for key in matching):
            (missing if _needs_growth(text, name, grew) else still).append(f"{selector} did not grow")
    state = "empty" if missing else "data"
    return Finding(expression.board, expression.panel, state, "; ".join(missing), tuple(still))


def _where(expression: Expression) -> tuple[str, str]:
    return expression.board, expression.panel


def _needs_growth(text: str, name: str, grew: set[str]) -> bool:
    """A quantile of nothing and a ratio to nothing are empty; a rate of nothing is zero, and so is a part of a divisor
    of which another part grew."""
    if name.endswith("_bucket"):
        return "histogram_quantile" in text
    divisors = [divisor for divisor in _DIVISOR.findall(text) if re.search(rf"\b{re.escape(name)}\b", divisor)]
    return any(not any(re.search(rf"\b{re.escape(one)}\b", divisor) for one in grew) for divisor in divisors)


def matches(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether a series with these labels is one of the selector's, by PromQL's rules: anchored, absent is empty."""
    for label, operator, value in _MATCHER.findall(selector):
        has = labels.get(label, "")
        same = has == value if operator in ("=", "!=") else re.fullmatch(value, has) is not None
        if same != (operator in ("=", "=~")):
            return False
    return True


def summarise(findings: Iterable[Finding], how: str) -> dict[str, Any]:
    """Panels by what they have; one that lacks part of its data is without."""
    empty, foreign, still, full = {}, {}, {}, set()
    for finding in findings:
        where = f"{finding.board}/{finding.panel}"
        if finding.still:
            still[where] = "; ".join(finding.still)
        if finding.state == "foreign":
            foreign[where] = finding.why
        elif finding.state == "empty":
            empty[where] = finding.why
        else:
            full.add(where)
    return {"how": how, "with_data": len(full - set(empty)), "without_data": empty, "foreign": foreign, "still": still}


class Prometheus:
    """A real one that watches the application; `None` from `start` where there is no binary."""

    def __init__(self, binary: Path, application: str, data: Path, log: Path) -> None:
        data.mkdir(parents=True, exist_ok=True)
        (data / "prometheus.yml").write_text(configuration(application, "1s"))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        with log.open("w") as out:
            line = command(binary, data.resolve(), f"127.0.0.1:{port}")
            self._process = subprocess.Popen(line, stdout=out, stderr=out, start_new_session=True)

    @staticmethod
    def start(application: str, data: Path, log: Path) -> Prometheus | None:
        try:
            binary = find("prometheus", fetch=False)
        except Unavailable:
            return None
        return Prometheus(binary, application, data, log)

    def judge(self, seconds: float) -> list[Finding]:
        """Every expression over the last seconds."""
        return [self._one(expression, seconds) for expression in expressions()]

    def _one(self, expression: Expression, seconds: float) -> Finding:
        text, now = expression.filled("15s"), time.time()
        if _FOREIGN in text:
            why = ABSENT_ON_CPU.get(_where(expression), _FOREIGN)
            return Finding(expression.board, expression.panel, "foreign", why)
        asked = {"query": text, "start": now - seconds, "end": now, "step": "2"}
        body = get(f"{self._url}/api/v1/query_range?{urlencode(asked)}", 30)
        series = json.loads(body)["data"]["result"] if body else []
        values = [float(value) for one in series for _, value in one["values"]]
        finite = any(value == value and abs(value) != float("inf") for value in values)
        return Finding(expression.board, expression.panel, "data" if finite else "empty", "" if finite else text)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
