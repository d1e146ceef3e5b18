"""A run as files: report.json for machines, requests.csv and summary.csv for spreadsheets, report.html for people.

What this module does not do: draw (see `plots`).
"""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from load_tests.timeline import Outcome

SCHEMA = 1
COLUMNS = (
    "workload", "started", "users", "late_s", "status", "stream", "failure", "abandoned", "ttft_s", "tpot_s", "end_s",
    "frames", "prompt_tokens", "completion_tokens", "tokens_per_frame", "request_id",
)  # fmt: skip
SHOWN = ("ttft_s", "tpot_s", "chunk_gap_s", "tokens_per_chunk", "e2e_s", "late_s")


def write(folder: Path, report: Mapping[str, Any], outcomes: Sequence[Outcome], pictures: Mapping[str, bytes]) -> None:
    """All files into `folder`, which is made. `pictures`: title → SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    with (folder / "requests.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        rows.writerows([getattr(outcome, column) for column in COLUMNS] for outcome in outcomes)
    with (folder / "summary.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("group", "measure", "value"))
        for group, summary in {"all": report["summary"], **report["workloads"]}.items():
            rows.writerows((group, name, value) for name, value in flat(summary).items())
    (folder / "report.html").write_text(render(report, pictures))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a summary by dotted path."""
    out: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out[f"{prefix}{key}"] = value
    return out


def render(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """One page that needs nothing else."""
    passed = all(verdict["holds"] for verdict in report["slo"])
    parts = [
        f"<h1>Load test: {_text(report['config']['shape']['kind'])}, {'passed' if passed else 'FAILED'}</h1>",
        f"<p>{_text(report['started'])}, {report['summary']['elapsed_s']:.1f} s, version "
        f"{_text(report['facts']['version'])}, commit {_text(report['facts']['commit'])}</p>",
        _table(("condition", "value", "holds"), [(v["condition"], v["value"], v["holds"]) for v in report["slo"]]),
        "<h2>Summary</h2>", _summaries({"all": report["summary"], **report["workloads"]}),
        "<h2>Latency</h2>", _latencies({"all": report["summary"], **report["workloads"]}),
    ]  # fmt: skip
    if report["levels"]:
        parts += [f"<h2>Steps, knee at {report['knee']} users</h2>", _levels(report["levels"])]
    if report["summary"]["failures"]:
        parts += ["<h2>Failures</h2>", _table(("kind", "requests"), list(report["summary"]["failures"].items()))]
    if report["server"]:
        server = report["server"]
        parts += ["<h2>Server, over the run</h2>", _table(("series", "value"), list(flat(server).items()))]
    for title, picture in pictures.items():
        svg = picture.decode()
        parts.append(f"<h2>{_text(title)}</h2>{svg[svg.index('<svg') :]}")
    parts += [
        "<h2>Configuration</h2>",
        f"<pre>{_text(json.dumps([report['config'], report['facts']], indent=1))}</pre>",
    ]
    return _PAGE.format(body="\n".join(parts))


def _summaries(groups: Mapping[str, Any]) -> str:
    names = (
        "requests", "completed", "abandoned", "failed", "requests_per_s", "output_tok_per_s",
        "output_tok_per_s_per_user", "acceptance", "goodput_rate",
    )  # fmt: skip
    return _table(("group", *names), [(group, *(s[name] for name in names)) for group, s in groups.items()])


def _latencies(groups: Mapping[str, Any]) -> str:
    head = ("group", "measure", "n", "mean", "p50", "p90", "p95", "p99", "max")
    rows = [
        (group, name, *(summary[name][key] for key in head[2:]))
        for group, summary in groups.items()
        for name in SHOWN
        if summary[name] is not None and (name != "late_s" or summary[name]["max"] > 0)
    ]
    return _table(head, rows)


def _levels(levels: Sequence[Mapping[str, Any]]) -> str:
    head = ("users", "completed", "failed", "output_tok_per_s", "ttft p50", "ttft p95", "tpot p50", "e2e p95")
    rows = [
        (
            *(row[name] for name in head[:4]),
            *((row[f"{name}_s"] or {}).get(q) for name, q in (label.split() for label in head[4:])),
        )
        for row in levels
    ]
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = ["".join(f"<td>{_text(_number(value))}</td>" for value in row) for row in rows]
    return f"<table><tr>{cells}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(value: Any) -> str:
    return html.escape(str(value))


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Load test</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }}
table {{ border-collapse: collapse }}
th, td {{ padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }} svg {{ max-width: 100%; height: auto }} pre {{ overflow: auto }}
</style>
{body}
</html>
"""
