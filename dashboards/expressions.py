"""The expressions of the checked-in dashboards, as Grafana would send them with "All" chosen everywhere.

What this module does not do: read panels' other properties, or ask a Prometheus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dashboards.__main__ import JSON_DIRECTORY

# Not `$1`, which belongs to PromQL's own label_replace.
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Expression:
    """One query of one panel. `text`: as stored, with the dashboard's variables."""

    board: str
    panel: str
    text: str
    legend: str

    def filled(self, rate_interval: str) -> str:
        """With every variable's value in place."""
        return fill(self.text, rate_interval)


def fill(text: str, rate_interval: str) -> str:
    values = {"__rate_interval": rate_interval}
    return _VARIABLE.sub(lambda match: values.get(match[1], ".*"), text)


def boards() -> dict[str, dict[str, Any]]:
    """uid → dashboard, as checked in."""
    loaded = [json.loads(path.read_text()) for path in sorted(JSON_DIRECTORY.glob("*.json"))]
    return {board["uid"]: board for board in loaded}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[Expression]:
    for uid, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield Expression(uid, panel["title"], target["expr"], target["legendFormat"])
