"""A finished run → the report's tree.

What this module does not do: write or draw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from load_tests import slo
from load_tests.report import SCHEMA
from load_tests.shapes import Shape
from load_tests.summary import by_workload, knee, levels, spread, summarise

if TYPE_CHECKING:
    from load_tests.drive import Result


def build(
    result: Result,
    shape: Shape,
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
    goodput: dict[str, float],
    conditions: Sequence[str],
    when: str,
) -> dict[str, Any]:
    """See docs/load-testing.md for what each part means."""
    outcomes = result.recorder.outcomes
    summary = summarise(outcomes, result.elapsed_s, result.mean_users, goodput)
    summary["mean_in_flight"] = result.mean_users
    rows = levels(outcomes, [step for step in shape.steps() if step[0] < result.window_s], goodput)
    return {
        "schema": SCHEMA,
        "started": when,
        "config": {**config, "shape": asdict(shape)},
        "facts": dict(facts),
        "summary": summary,
        "workloads": by_workload(outcomes, result.elapsed_s, goodput),
        "levels": rows,
        "knee": knee(rows),
        "users": result.levels,
        "series": result.series,
        "server": result.server,
        "client_lag_s": spread(result.recorder.client_lags),
        "slo": [verdict.as_dict() for verdict in slo.gate(conditions, summary)],
    }
