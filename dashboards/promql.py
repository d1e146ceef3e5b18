"""Phrases of PromQL that the dashboards share: every selector is narrowed by the dashboard's variables.

What this module does not do: check names; tests compare every expression with what is exported.
"""

from __future__ import annotations

from dashboards.grafana import Variable

WINDOW = "$__rate_interval"
# What engines export, what ingresses export, and what every process does.
ENGINE = 'job=~"$job",model=~"$model",replica=~"$replica"'
GATEWAY = 'job=~"$job",model=~"$model"'
PROCESS = 'job=~"$job"'

JOB = Variable("job", "Job", "label_values(ddtree_start_time_seconds, job)")
MODEL = Variable("model", "Model", 'label_values(ddtree_verify_steps_total{job=~"$job"}, model)')
REPLICA = Variable("replica", "Engine replica", 'label_values(ddtree_verify_steps_total{job=~"$job"}, replica)')

# Reasons that are no surprise: prefill is never captured; without CUDA, or by configuration, nothing is.
EXPECTED_EAGER = "mode_not_graphable|no_cuda|graphs_disabled"


def select(name: str, scope: str, extra: str = "") -> str:
    return f"{name}{{{','.join(filter(None, (scope, extra)))}}}"


def rate(name: str, scope: str, by: str = "", extra: str = "") -> str:
    """Per second, summed over everything but `by`."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({select(name, scope, extra)}[{WINDOW}]))"


def total(name: str, scope: str, by: str = "", extra: str = "", how: str = "sum") -> str:
    """A gauge, summed over everything but `by`."""
    grouped = f" by ({by})" if by else ""
    return f"{how}{grouped} ({select(name, scope, extra)})"


def ratio(part: str, whole: str) -> str:
    """Nothing, rather than NaN, where nothing happened."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, name: str, scope: str, extra: str = "") -> str:
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', scope, 'le', extra)})"


def mean(name: str, scope: str, by: str = "") -> str:
    return ratio(rate(f"{name}_sum", scope, by), rate(f"{name}_count", scope, by))


ENGINES_UP = select("up", PROCESS, 'deployment="engine"')
ALL_UP = select("up", PROCESS, 'deployment=~"engine|ingress"')
