"""The part of Grafana's dashboard schema (version 42) that these dashboards use.

What this module does not do: know any series.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 42
COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["timeseries", "stat", "heatmap", "bargauge", "table"]
Json = dict[str, Any]


@dataclass(frozen=True)
class Query:
    """`legend`: a template over labels. `instant`: the value at the end of the range alone."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        description: what it shows, and what to do about it.
        unit: of Grafana's unit names. stacked: series add up. floor, ceiling: fixed ends of the axis.
        steps: (from value, colour), the first one from below everything.
        columns: of a table, label or "Value" → heading, in order; others are hidden.
    """

    kind: Kind
    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 8
    height: int = 8
    stacked: bool = False
    decimals: int | None = None
    floor: float | None = 0
    ceiling: float | None = None
    steps: Sequence[tuple[float | None, str]] = ((None, "green"),)
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Variable:
    """A choice among the values of a label, all by default."""

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Dashboard:
    """`rows`: heading → panels, laid out from left to right."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: dict[str, Sequence[Panel]]

    @property
    def panels(self) -> list[Panel]:
        return [panel for panels in self.rows.values() for panel in panels]

    def json(self) -> Json:
        return {
            "annotations": {"list": []}, "description": self.description, "editable": True, "fiscalYearStartMonth": 0,
            "graphTooltip": 1, "id": None, "links": [_siblings()], "panels": _layout(self.rows), "preload": False,
            "refresh": "30s", "schemaVersion": SCHEMA_VERSION, "tags": ["ddtree"],
            "templating": {"list": [_datasource(), *(_variable(variable) for variable in self.variables)]},
            "time": {"from": "now-1h", "to": "now"}, "timepicker": {}, "timezone": "browser", "title": self.title,
            "uid": self.uid, "version": 1, "weekStart": "",
        }  # fmt: skip


def _layout(rows: dict[str, Sequence[Panel]]) -> list[Json]:
    """Panels with ids and places; a row's panels fill lines of 24 columns."""
    placed: list[Json] = []
    top = 0
    for heading, panels in rows.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        placed.append({"collapsed": False, "gridPos": place, "id": len(placed) + 1, "panels": [], "title": heading,
                       "type": "row"})  # fmt: skip
        top, left, line = top + 1, 0, 0
        for panel in panels:
            if left + panel.width > COLUMNS:
                top, left, line = top + line, 0, 0
            place = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            placed.append({"id": len(placed) + 1, "gridPos": place, **_panel(panel)})
            left, line = left + panel.width, max(line, panel.height)
        top += line
    return placed


def _panel(panel: Panel) -> Json:
    made: Json = {
        "datasource": _SOURCE, "description": panel.description, "title": panel.title, "type": panel.kind,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []}, "options": _OPTIONS[panel.kind](panel),
        "targets": [_target(panel, query, chr(ord("A") + n)) for n, query in enumerate(panel.queries)],
    }  # fmt: skip
    if panel.kind == "table":
        made["transformations"] = [_only(panel.columns)]
    return made


def _defaults(panel: Panel) -> Json:
    steps = [{"color": color, "value": value} for value, color in panel.steps]
    made: Json = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}, "custom": {}, "mappings": []}
    for name, value in (("min", panel.floor), ("max", panel.ceiling), ("decimals", panel.decimals)):
        if value is not None:
            made[name] = value
    if panel.kind == "timeseries":
        made["custom"] = {
            "drawStyle": "line", "fillOpacity": 25 if panel.stacked else 5, "lineWidth": 1, "showPoints": "never",
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"}, "spanNulls": False,
        }  # fmt: skip
    return made


def _target(panel: Panel, query: Query, ref: str) -> Json:
    return {
        "datasource": _SOURCE, "editorMode": "code", "expr": query.expr, "legendFormat": query.legend or "__auto",
        "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series"),
        "instant": query.instant, "range": not query.instant, "refId": ref,
    }  # fmt: skip


def _reduced() -> Json:
    return {"calcs": ["lastNotNull"], "fields": "", "values": False}


_OPTIONS: dict[str, Any] = {
    "timeseries": lambda panel: {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": lambda panel: {
        "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "orientation": "auto",
        "reduceOptions": _reduced(), "textMode": "auto", "wideLayout": True,
    },
    "bargauge": lambda panel: {
        "displayMode": "basic", "orientation": "horizontal", "reduceOptions": _reduced(), "showUnfilled": True,
        "valueMode": "color", "sizing": "auto",
    },
    "heatmap": lambda panel: {
        "calculate": False, "cellGap": 1, "filterValues": {"le": 1e-9}, "legend": {"show": True},
        "color": {"exponent": 0.5, "fill": "dark-orange", "mode": "scheme", "reverse": False, "scale": "exponential",
                  "scheme": "Oranges", "steps": 64},
        "rowsFrame": {"layout": "auto"}, "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit},
    },
    "table": lambda panel: {"cellHeight": "sm", "showHeader": True, "footer": {"show": False}},
}  # fmt: skip


def _only(columns: dict[str, str]) -> Json:
    names = list(columns)
    order = {name: place for place, name in enumerate(names)}
    return {"id": "organize", "options": {"includeByName": dict.fromkeys(names, True), "excludeByName": {},
            "indexByName": order, "renameByName": columns}}  # fmt: skip


def _datasource() -> Json:
    return {
        "hide": 0, "includeAll": False, "label": "Data source", "multi": False, "name": "datasource",
        "options": [], "query": "prometheus", "refresh": 1, "regex": "", "type": "datasource",
    }  # fmt: skip


def _variable(variable: Variable) -> Json:
    query = {"qryType": 1, "query": variable.query, "refId": "PrometheusVariableQueryEditor-VariableQuery"}
    return {
        "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}, "datasource": _SOURCE,
        "definition": variable.query, "hide": 0, "includeAll": True, "label": variable.label, "multi": True,
        "name": variable.name, "options": [], "query": query, "refresh": 2, "regex": "", "sort": 1, "type": "query",
    }  # fmt: skip


def _siblings() -> Json:
    return {
        "asDropdown": False, "icon": "external link", "includeVars": True, "keepTime": True, "tags": ["ddtree"],
        "targetBlank": False, "title": "DDTree", "tooltip": "", "type": "dashboards", "url": "",
    }  # fmt: skip
