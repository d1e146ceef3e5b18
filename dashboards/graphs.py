"""Do decode steps replay from CUDA graphs: which forwards do not, why, and what padding costs."""

from __future__ import annotations

from dashboards.grafana import Dashboard, Panel, Query
from dashboards.promql import ENGINE, EXPECTED_EAGER, JOB, MODEL, REPLICA, rate, ratio, total

SURPRISE = f'reason!~"{EXPECTED_EAGER}"'
GRAPHABLE = 'reason!="mode_not_graphable"'


def eager(by: str = "", extra: str = "") -> str:
    return rate("ddtree_graph_fallbacks_total", ENGINE, by, extra)


def replays(by: str = "") -> str:
    return rate("ddtree_graph_replays_total", ENGINE, by)


def rows(by: str = "", extra: str = "") -> str:
    return rate("ddtree_graph_bucket_rows_total", ENGINE, by, extra)


def graphable(by: str = "") -> str:
    return f"({replays(by)} + {eager(by, GRAPHABLE)})"


PADDING = 'kind="padding"'
GLANCE = [
    Panel("stat", "Replayed", "Share of drafts and verify steps that were served by a graph. 0 without CUDA; on a GPU "
          "anything below 99 % is worth a look at the reasons.",
          [Query(ratio(replays(), graphable()))], unit="percentunit", width=6, height=4, decimals=1,
          steps=((None, "red"), (0.9, "orange"), (0.99, "green"))),
    Panel("stat", "Unexpected fallbacks", "Forwards per second that should have replayed and did not. Prefill, and "
          "machines or configurations without graphs, are not among them.",
          [Query(eager(extra=SURPRISE))], unit="ops", width=6, height=4, steps=((None, "green"), (0.1, "red"))),
    Panel("stat", "Padding waste", "Share of replayed rows that held no request. High: capture more batch sizes.",
          [Query(ratio(rows(extra=PADDING), rows()))], unit="percentunit", width=6, height=4, decimals=1),
    Panel("stat", "Graphs", "Graphs that can be replayed, over all replicas.",
          [Query(total("ddtree_graph_captured", ENGINE))], width=6, height=4),
]  # fmt: skip

REPLAY = [
    Panel("timeseries", "Replays and fallbacks by role", "Forwards per second. Target and draft should both replay.",
          [Query(replays("role"), "{{role}} replayed"), Query(eager("role", GRAPHABLE), "{{role}} eager")],
          unit="ops", stacked=True, width=12),
    Panel("timeseries", "Fallbacks by reason", "Forwards that ran eagerly. The runbook has a line for each reason.",
          [Query(f"{eager('role, reason')} > 0", "{{role}}: {{reason}}")], unit="ops", stacked=True, width=12),
    Panel("timeseries", "Fallback ratio", "Share of drafts and verify steps that ran eagerly, whatever the reason.",
          [Query(f"{eager('role', GRAPHABLE)} / ({graphable('role')} > 0)", "{{role}}")],
          unit="percentunit", ceiling=1, width=12),
    Panel("timeseries", "Replayed by replica", "One replica below the others: its captures failed, or its requests are "
          "longer than the graphs were made for.",
          [Query(f"{replays('replica')} / ({graphable('replica')} > 0)", "{{replica}}")],
          unit="percentunit", ceiling=1, width=12),
]  # fmt: skip

PADDING_ROW = [
    Panel("timeseries", "Padding waste by bucket", "Share of each captured batch size's rows that held no request. A "
          "bucket above 40 % that is often used wants a smaller one beside it.",
          [Query(f"{rows('role, bucket', PADDING)} / ({rows('role, bucket')} > 0)", "{{role}} {{bucket}}")],
          unit="percentunit", ceiling=1),
    Panel("timeseries", "Rows by bucket", "Rows replayed per second in each captured batch size, padding included.",
          [Query(rows("role, bucket"), "{{role}} {{bucket}}")], unit="ops", stacked=True),
    Panel("timeseries", "Padding rows", "Rows replayed only to fill a captured batch size.",
          [Query(rate("ddtree_graph_padding_rows_total", ENGINE, "role"), "{{role}}")], unit="ops"),
]  # fmt: skip

CAPTURE = [
    Panel("timeseries", "Graphs", "Graphs of each replica. Fewer on one of them: a capture failed, its log says why.",
          [Query(total("ddtree_graph_captured", ENGINE, "replica, role"), "{{role}} {{replica}}")]),
    Panel("timeseries", "Capture time", "What capturing took when the replica started.",
          [Query(total("ddtree_graph_capture_seconds", ENGINE, "replica, role"), "{{role}} {{replica}}")], unit="s"),
    Panel("timeseries", "Capture memory", "Device memory that capturing reserved, which the KV cache does not have.",
          [Query(total("ddtree_graph_capture_bytes", ENGINE, "replica, role"), "{{role}} {{replica}}")], unit="bytes"),
]  # fmt: skip

GRAPHS = Dashboard(
    "ddtree-graphs", "DDTree / CUDA graphs", "Which forwards replay, which do not, and why.", (JOB, MODEL, REPLICA),
    {"At a glance": GLANCE, "Replay": REPLAY, "Padding": PADDING_ROW, "Capture": CAPTURE},
)  # fmt: skip
