"""Pictures of a run, as SVG.

What this module does not do: compute; it draws what the report holds.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from load_tests.summary import percentile
from load_tests.timeline import Outcome

BINS = 40


def draw(report: Mapping[str, Any], outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """title → SVG, of what there is data for."""
    done = [outcome for outcome in outcomes if outcome.ok and outcome.stream]
    pictures: dict[str, bytes] = {}
    if done:
        pictures["Percentiles"] = _figure(lambda a, b: _percentiles(a, b, done), "requests, %", "requests, %")
        pictures["Over time"] = _figure(lambda a, b: _over_time(a, b, done, report), "s", "s")
    if report["levels"]:
        pictures["Knee"] = _figure(lambda a, b: _knee(a, b, report), "users", "users")
    if report["series"]:
        title = "Acceptance and fallbacks next to latency"
        pictures[title] = _figure(lambda a, b: _server(a, b, report["series"], done), "s", "s")
    return pictures


def _figure(paint: Callable[[Axes, Axes], None], left: str, right: str) -> bytes:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    paint(*axes)
    for axis, label in zip(axes, (left, right), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _percentiles(left: Axes, right: Axes, done: Sequence[Outcome]) -> None:
    shares = [q / 2 for q in range(201)]
    for axis, lines in (
        (left, {"TTFT": [o.ttft_s for o in done], "whole answer": [o.end_s for o in done]}),
        (right, {"TPOT": [o.tpot_s for o in done], "chunk gap": [g for o in done for g in o.gaps]}),
    ):
        for name, values in lines.items():
            ordered = sorted(1e3 * value for value in values if value is not None)
            if ordered:
                axis.plot(shares, [percentile(ordered, q) for q in shares], label=name)
        axis.set_ylabel("ms")
        axis.set_yscale("log")
        # Less than two decades would else be labelled 3 × 10¹, or not at all.
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())


def _over_time(left: Axes, right: Axes, done: Sequence[Outcome], report: Mapping[str, Any]) -> None:
    left.scatter([o.started for o in done], [1e3 * (o.ttft_s or 0) for o in done], s=8, label="TTFT, ms")
    times = [row["t"] for row in report["series"]]
    twin = left.twinx()
    # An open loop has no users, but as many requests in flight as its server lets pile up.
    open_loop = report["config"]["shape"]["kind"] in ("poisson", "trace")
    load = [(row["t"], row["in_flight"]) for row in report["series"]] if open_loop else [*report["users"]]
    load += [(report["summary"]["elapsed_s"], load[-1][1])] if load and not open_loop else []
    twin.step([t for t, _ in load], [count for _, count in load], where="post", color="grey")
    twin.set_ylabel("requests in flight" if open_loop else "users")
    twin.yaxis.set_major_locator(MaxNLocator(integer=True))
    rate = [row["tok_per_s"] for row in report["series"]]
    right.plot(times, [value if value is not None else float("nan") for value in rate], label="tok/s, server")
    width = max(report["summary"]["elapsed_s"] / BINS, 0.5)
    sums: dict[int, int] = {}
    for outcome in done:
        place = int((outcome.started + outcome.end_s) / width)
        sums[place] = sums.get(place, 0) + (outcome.completion_tokens or 0)
    places = range(max(sums) + 1)
    right.step([p * width for p in places], [sums.get(p, 0) / width for p in places], label="tok/s, completed answers")


def _knee(left: Axes, right: Axes, report: Mapping[str, Any]) -> None:
    rows = [row for row in report["levels"] if row["completed"]]
    users = [row["users"] for row in rows]
    left.plot(users, [row["output_tok_per_s"] for row in rows], marker="o", label="output tok/s")
    for name, q in (("ttft_s", "p50"), ("ttft_s", "p95"), ("e2e_s", "p95")):
        values = [(row[name] or {}).get(q, float("nan")) for row in rows]
        right.plot(users, values, marker="o", label=f"{name[:-2]} {q}, s")
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if report["knee"] is not None:
            axis.axvline(report["knee"], color="grey", linestyle=":", label="knee")


def _server(left: Axes, right: Axes, series: Sequence[Mapping[str, Any]], done: Sequence[Outcome]) -> None:
    times = [row["t"] for row in series]
    seen = [(o.started + o.end_s, o.tokens_per_frame) for o in done if o.tokens_per_frame is not None]
    left.scatter([t for t, _ in seen], [v for _, v in seen], s=6, alpha=0.4, label="tokens per chunk, client")
    values = [row["acceptance"] for row in series]
    left.plot(times, [v if v is not None else float("nan") for v in values], label="acceptance, server", color="C1")
    reasons = sorted({reason for row in series for reason in row["fallbacks"]})
    for reason in reasons:
        right.plot(times, [row["fallbacks"].get(reason, 0) for row in series], label=f"fallbacks {reason}")
    right.plot(times, [row["replays"] for row in series], label="graph replays", linestyle="--")
    twin = right.twinx()
    points = [(o.started, 1e3 * o.tpot_s) for o in done if o.tpot_s is not None]
    twin.scatter([t for t, _ in points], [v for _, v in points], s=6, color="grey", alpha=0.5)
    twin.set_ylabel("TPOT, ms")
