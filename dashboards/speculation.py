"""Does drafting pay: how much of a tree is accepted, at what depth, and what the rest costs."""

from __future__ import annotations

from dashboards.grafana import Dashboard, Panel, Query
from dashboards.promql import ENGINE, JOB, MODEL, REPLICA, mean, rate, ratio, select

STEP = 'phase=~"draft|verify|accept"'
ACCEPTANCE = mean("ddtree_acceptance_length", ENGINE)
ACCEPTED, NODES = rate("ddtree_accepted_tokens_total", ENGINE), rate("ddtree_tree_nodes_total", ENGINE)
STEPS = rate("ddtree_verify_steps_total", ENGINE)
TRIMMED = rate("ddtree_trimmed_tokens_total", ENGINE)
COMMITTED = f"({rate('ddtree_acceptance_length_sum', ENGINE)} + {TRIMMED})"
FORWARD_SHARE = ratio(
    rate("ddtree_step_seconds_total", ENGINE, extra='phase="verify"'),
    rate("ddtree_step_seconds_total", ENGINE, extra=STEP),
)
SPEED_UP = f"({ACCEPTANCE}) * ({FORWARD_SHARE})"


def depths(window: str) -> str:
    """Share of steps that accepted a draft of this depth; two digits, so that names sort as numbers."""
    reached = f"sum by (depth) (rate({select('ddtree_accepted_depth_total', ENGINE)}[{window}]))"
    share = f"{reached} / on () group_left () ({STEPS.replace('$__rate_interval', window)} > 0)"
    return f'label_replace({share}, "depth", "0$1", "depth", "(.)")'


GLANCE = [
    Panel("stat", "Acceptance length", "Tokens that one verify step of one request delivers, the bonus token included. "
          "1 is plain decoding.", [Query(ACCEPTANCE)], width=5, height=4, decimals=2,
          steps=((None, "red"), (1.3, "orange"), (2, "green"))),
    Panel("stat", "Estimated speed-up", "Over one token per step: acceptance length × the share of a step that is the "
          "target's forward. Takes a tree's forward to cost what one token's does, which holds while weights, not "
          "arithmetic, bound it; at large batches the truth is lower. Below 1: lower the budget or stop drafting.",
          [Query(SPEED_UP)], unit="none", width=5, height=4, decimals=2,
          steps=((None, "red"), (1, "orange"), (1.3, "green"))),
    Panel("stat", "Tree efficiency", "Share of verified nodes that were accepted. Low by design for wide trees; "
          "compare "
          "with itself.", [Query(ratio(ACCEPTED, NODES))], unit="percentunit", width=5, height=4, decimals=1),
    Panel("stat", "Wasted drafts", "Share of verified nodes that were not accepted: rows computed for nothing. At "
          "large "
          "batches they cost time; lower `speculation.budget`.",
          [Query(f"1 - {ratio(ACCEPTED, NODES)}")], unit="percentunit", width=5, height=4, decimals=1),
    Panel("stat", "Trimmed", "Share of accepted tokens that a stop or a length limit cut off again. High for very "
          "short "
          "answers only.", [Query(ratio(TRIMMED, COMMITTED))], unit="percentunit", width=4, height=4, decimals=2),
]  # fmt: skip

ACCEPTANCE_ROW = [
    Panel("heatmap", "Acceptance length, distribution", "Verify steps by the tokens they delivered. A bright bottom "
          "row "
          "is a drafter that misses; mass at the top is a block that is too short.",
          [Query(f"sum by (le) (increase({select('ddtree_acceptance_length_bucket', ENGINE)}[$__rate_interval]))",
                 "{{le}}")], width=12, height=9),
    Panel("timeseries", "Acceptance length", "Mean over all, and of each replica. One replica below the others serves "
          "other text, or another drafter.",
          [Query(ACCEPTANCE, "all"), Query(mean("ddtree_acceptance_length", ENGINE, "replica"), "{{replica}}")],
          width=12, height=9, floor=1),
    Panel("bargauge", "Accepted by depth", "Share of verify steps that accepted a draft at this depth, over the last "
          "five minutes. Where it falls to nothing, deeper drafts are not worth their time.",
          [Query(depths("5m"), "depth {{depth}}", instant=True)], unit="percentunit", width=8, height=9, ceiling=1),
    Panel("timeseries", "Accepted by depth, over time", "As beside. A fall at depth 1 is a drafter that no longer fits "
          "its target; a fall at depth alone is harder text.",
          [Query(depths("$__rate_interval"), "depth {{depth}}")], unit="percentunit", width=8, height=9),
    Panel("timeseries", "Estimated speed-up", "Over one token per step, see above.", [Query(SPEED_UP, "speed-up")],
          unit="none", width=8, height=9),
]  # fmt: skip

COST = [
    Panel("timeseries", "Nodes proposed and accepted", "Tree nodes verified per second, and of those the accepted "
          "ones.",
          [Query(NODES, "proposed"), Query(ACCEPTED, "accepted")]),
    Panel("timeseries", "Wasted drafts and trimmed tokens", "Nodes verified in vain, and accepted tokens cut off "
          "again.",
          [Query(f"1 - {ratio(ACCEPTED, NODES)}", "wasted drafts"), Query(ratio(TRIMMED, COMMITTED), "trimmed tokens")],
          unit="percentunit", ceiling=1),
    Panel("timeseries", "Delivered tokens by origin", "Accepted drafts, bonus tokens, and first tokens of prefill.",
          [Query(ACCEPTED, "accepted drafts"), Query(rate("ddtree_bonus_tokens_total", ENGINE), "bonus"),
           Query(rate("ddtree_emitted_tokens_total", ENGINE, extra='phase="prefill"'), "prefill")], stacked=True),
    Panel("timeseries", "Chosen budget", "Verify steps by the tree's budget in nodes. With `auto` the engine takes a "
          "smaller one for larger batches.",
          [Query(rate("ddtree_budget_steps_total", ENGINE, "budget"), "{{budget}} nodes")], unit="ops", stacked=True),
    Panel("timeseries", "Mean budget", "Nodes per verify step of a request.", [Query(ratio(NODES, STEPS), "nodes")]),
    Panel("timeseries", "Where a step's time goes", "Seconds per second of each phase. A draft that costs more than a "
          "third of the verify wants a smaller drafter or a shorter block.",
          [Query(rate("ddtree_step_seconds_total", ENGINE, "phase"), "{{phase}}")], unit="percentunit", stacked=True),
]  # fmt: skip

SPECULATION = Dashboard(
    "ddtree-speculation", "DDTree / Speculation", "Whether drafting pays, and where it is lost.",
    (JOB, MODEL, REPLICA), {"At a glance": GLANCE, "Acceptance": ACCEPTANCE_ROW, "Cost": COST},
)  # fmt: skip
