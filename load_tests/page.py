"""report.html: one page that needs nothing else. The verdict first, then what decides it, pictures, and all numbers.

What this module does not do: compute or draw.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

# Later than this at its p95, the client's own loop says more about the client than the server.
LAG_SHOWN_S = 0.005
# Measure → (its name for people, factor, unit).
LATENCIES = {
    "ttft_s": ("TTFT", 1e3, "ms"), "tpot_s": ("TPOT", 1e3, "ms"), "chunk_gap_s": ("chunk gap", 1e3, "ms"),
    "e2e_s": ("whole answer", 1e3, "ms"), "tokens_per_chunk": ("tokens per chunk", 1.0, ""),
    "connect_s": ("connecting", 1e3, "ms"), "late_s": ("sent late by", 1e3, "ms"),
}  # fmt: skip
SUMMARY = {
    "requests": "requests", "completed": "completed", "abandoned": "left", "failed": "failed",
    "requests_per_s": "requests/s", "prompt_tokens": "prompt tokens", "output_tokens": "output tokens",
    "output_tok_per_s": "output tok/s", "acceptance": "acceptance", "goodput_rate": "goodput share",
}  # fmt: skip
CAPTIONS = {
    "Percentiles": "How many of the requests (or gaps) took at most so long. A steep right end is a tail.",
    "Over time": "Left: each answer's TTFT when it was asked, users (of an open loop: requests in flight) in grey. "
    "Right: what the server emitted, and what completed answers add up to.",
    "Knee": "More users than at the knee add waiting faster than tokens.",
    "Acceptance and fallbacks next to latency": "Left: acceptance by client and server. Right: forwards that did not "
    "replay from a graph, each answer's time per token in grey; if both rise together, the fallbacks cost time.",
}


def render(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page. `pictures`: title → SVG."""
    groups = {"all": report["summary"], **report["workloads"]}
    parts = [*_head(report), *_notes(report), _tiles(report)]
    for title, picture in pictures.items():
        svg = picture.decode()
        parts += [f"<h2>{_text(title)}</h2>", f"<p>{_text(CAPTIONS.get(title, ''))}</p>", svg[svg.index("<svg") :]]
    if report["levels"]:
        parts += [f"<h2>Steps: knee at {_users(report['knee'])}</h2>", _levels(report["levels"])]
    parts += ["<h2>By workload</h2>", _summaries(groups), "<h2>Latency</h2>", _latencies(groups)]
    if report["summary"]["failures"]:
        parts += ["<h2>Failures</h2>", _table(("kind", "requests"), list(report["summary"]["failures"].items()))]
    if report["server"]:
        rows = list(flat(report["server"]).items())
        parts += ["<h2>Server, over the run</h2>", _table(("series", "value"), rows)]
    parts += [
        "<h2>Configuration</h2>",
        f"<pre>{_text(json.dumps([report['config'], report['facts']], indent=1))}</pre>",
    ]
    return _PAGE.format(body="\n".join(parts))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a summary by dotted path."""
    out: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out[f"{prefix}{key}"] = value
    return out


def _head(report: Mapping[str, Any]) -> list[str]:
    passed = all(verdict["holds"] for verdict in report["slo"])
    badge = '<span class="good">passed</span>' if passed else '<span class="bad">FAILED</span>'
    shape, facts = report["config"]["shape"], report["facts"]
    load = {"poisson": f"poisson, {shape['rate']:g} requests/s", "trace": "trace"}
    where = [
        report["started"], f"{report['summary']['elapsed_s']:.1f} s", facts.get("model"),
        load.get(shape["kind"], f"{shape['kind']}, up to {_users(shape['users'])}"),
        f"version {facts['version']}", f"commit {str(facts['commit'])[:12]}",
    ]  # fmt: skip
    rows = [(v["condition"], v["value"], "holds" if v["holds"] else "BROKEN") for v in report["slo"]]
    about = " · ".join(_text(part) for part in where if part is not None)
    return [f"<h1>Load test {badge}</h1>", f"<p>{about}</p>", _table(("condition", "value", ""), rows)]


def _notes(report: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing a number."""
    notes = []
    lag, late = report["client_lag_s"], report["summary"]["late_s"]
    if lag is not None and lag["p95"] > LAG_SHOWN_S:
        ms = f"{1e3 * lag['p95']:.1f} ms"
        notes.append(f"This client's own event loop woke up late, by {ms} at its p95: no latency is known better.")
    if late is not None and late["p95"] > LAG_SHOWN_S:
        notes.append(f"Requests were sent late, by {1e3 * late['p95']:.1f} ms at the p95: the client was too slow.")
    if report["config"]["shape"]["kind"] not in ("poisson", "trace"):
        notes.append("A closed loop: users wait for their answers, so a slow server is asked less.")
    return [f'<p class="note">{_text(note)}</p>' for note in notes]


def _tiles(report: Mapping[str, Any]) -> str:
    """The few numbers that most people want."""
    summary = report["summary"]
    asked = [(name, q) for name in ("ttft_s", "tpot_s") for q in ("p50", "p95")]
    tiles = [
        ("completed", f"{summary['completed']} of {summary['requests']}"),
        ("failed", summary["failed"]), ("left on purpose", summary["abandoned"]),
        ("output tok/s", summary["output_tok_per_s"]), ("tok/s per user", summary["output_tok_per_s_per_user"]),
        *((f"{LATENCIES[name][0]} {q}, ms", _of(summary, name, q)) for name, q in asked),
        ("acceptance, client", summary["acceptance"]), ("acceptance, server", report["server"].get("acceptance")),
        ("goodput share", summary["goodput_rate"]),
    ]  # fmt: skip
    cells = "".join(f"<div><strong>{_text(number(value))}</strong>{_text(name)}</div>" for name, value in tiles)
    return f'<div class="tiles">{cells}</div>'


def _of(summary: Mapping[str, Any], name: str, q: str) -> float | None:
    return None if summary[name] is None else summary[name][q] * LATENCIES[name][1]


def _summaries(groups: Mapping[str, Any]) -> str:
    rows = [(group, *(summary[name] for name in SUMMARY)) for group, summary in groups.items()]
    return _table(("", *SUMMARY.values()), rows)


def _latencies(groups: Mapping[str, Any]) -> str:
    head = ("n", "mean", "p50", "p90", "p95", "p99", "max")
    rows: list[tuple[Any, ...]] = []
    for name, (title, factor, unit) in LATENCIES.items():
        for group, summary in groups.items():
            if summary[name] is not None and (name != "late_s" or summary[name]["max"] > 0):
                values = [summary[name][key] * (1 if key == "n" else factor) for key in head]
                rows.append((f"{title}, {unit}" if unit else title, group, *values))
    return _table(("", "workload", *head), rows)


def _levels(levels: Sequence[Mapping[str, Any]]) -> str:
    asked = [("ttft_s", "p50"), ("ttft_s", "p95"), ("tpot_s", "p50"), ("tpot_s", "p95"), ("e2e_s", "p95")]
    first = ("users", "completed", "failed", "output_tok_per_s")
    rows = [(*(row[name] for name in first), *(_of(row, name, q) for name, q in asked)) for row in levels]
    names = [f"{LATENCIES[name][0]} {q}, ms" for name, q in asked]
    return _table((*first[:3], "output tok/s", *names), rows)


def _users(count: int | None) -> str:
    return "no number of users" if count is None else f"{count} user{'s' * (count != 1)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = ["".join(_cell(value) for value in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    style = {"holds": ' class="good"', "BROKEN": ' class="bad"'}.get(value, "") if isinstance(value, str) else ""
    return f"<td{style}>{_text(number(value))}</td>"


def number(value: Any) -> str:
    """Four digits, and an exponent only where there is no other way."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(value: Any) -> str:
    return html.escape(str(value))


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Load test</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1f24 }}
h2 {{ margin: 2rem 0 .3rem }} p {{ margin: .3rem 0 .6rem }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }}
th {{ font-weight: 600; color: #57606a }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0 }}
.wide, pre {{ overflow-x: auto }} pre {{ background: #f6f8fa; padding: .8rem }}
svg {{ width: 100%; height: auto }}
.good {{ color: #116329 }} .bad {{ color: #b3261e; font-weight: 600 }}
.note {{ border-left: 4px solid #d4a72c; padding-left: .7rem }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .6rem; margin: 1.2rem 0 }}
.tiles div {{ border: 1px solid #ddd; border-radius: 6px; padding: .5rem .8rem; color: #57606a }}
.tiles strong {{ display: block; font-size: 1.35rem; color: #1b1f24 }}
</style>
{body}
</html>
"""
