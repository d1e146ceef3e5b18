"""A run as files: report.json for machines, requests.csv and summary.csv for spreadsheets, report.html for people.

What this module does not do: lay out the page (see `page`) or draw (see `plots`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from load_tests.page import flat, render
from load_tests.timeline import Outcome

SCHEMA = 1
COLUMNS = (
    "workload", "started", "users", "late_s", "connect_s", "status", "stream", "failure", "abandoned", "ttft_s",
    "tpot_s", "end_s", "frames", "prompt_tokens", "completion_tokens", "tokens_per_frame", "request_id", "gaps",
)  # fmt: skip


def write(folder: Path, report: Mapping[str, Any], outcomes: Sequence[Outcome], pictures: Mapping[str, bytes]) -> None:
    """All files into `folder`, which is made. `pictures`: title → SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    with (folder / "requests.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        rows.writerows([_cell(getattr(outcome, column)) for column in COLUMNS] for outcome in outcomes)
    with (folder / "summary.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("group", "measure", "value"))
        for group, summary in {"all": report["summary"], **report["workloads"]}.items():
            rows.writerows((group, name, value) for name, value in flat(summary).items())
    (folder / "report.html").write_text(render(report, pictures))


def _cell(value: Any) -> Any:
    """Lists as numbers with spaces between: a comma would be a cell of its own to some readers."""
    return " ".join(f"{number:.6f}" for number in value) if isinstance(value, list) else value
