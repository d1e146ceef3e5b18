"""Percentiles and sums over outcomes.

What this module does not do: judge (see `slo`) or draw (see `plots`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from load_tests.timeline import Outcome

QUANTILES = (50, 90, 95, 99)
Summary = dict[str, Any]


def percentile(ordered: Sequence[float], q: float) -> float:
    """Of sorted values, with linear interpolation between ranks (as numpy's default)."""
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """n, mean, min, max and percentiles; None where there is nothing."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    out = {"n": len(ordered), "mean": sum(ordered) / len(ordered), "min": ordered[0], "max": ordered[-1]}
    return out | {f"p{q}": percentile(ordered, q) for q in QUANTILES}


def within(outcome: Outcome, limits: dict[str, float]) -> bool:
    """Whether a completed request met every limit of `goodput` (`ttft`, `tpot`, `e2e`, in seconds)."""
    values = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.end_s}
    return outcome.ok and all((values[name] or 0.0) <= limit for name, limit in limits.items())


def summarise(outcomes: Sequence[Outcome], elapsed_s: float, users: float, goodput: dict[str, float]) -> Summary:
    """One block of a report. `elapsed_s`: time that the rates divide by; `users`: mean users over it."""
    done = [outcome for outcome in outcomes if outcome.ok]
    streams = [outcome for outcome in done if outcome.stream]
    failures = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
    out_tokens = sum(outcome.completion_tokens or 0 for outcome in done)
    pairs = [(o.completion_tokens or 0, o.frames) for o in streams if o.tokens_per_frame is not None]
    frames = sum(frames - 1 for _, frames in pairs)
    counted = len(outcomes) - sum(outcome.abandoned for outcome in outcomes)
    good = sum(within(outcome, goodput) for outcome in done)
    per_s = 1 / elapsed_s if elapsed_s > 0 else 0.0
    return {
        "requests": len(outcomes),
        "completed": len(done),
        "abandoned": sum(outcome.abandoned for outcome in outcomes),
        "failed": failures.total(),
        "failures": dict(failures.most_common()),
        "failure_rate": failures.total() / counted if counted else 0.0,
        "elapsed_s": elapsed_s,
        "requests_per_s": len(done) * per_s,
        "prompt_tokens": sum(outcome.prompt_tokens or 0 for outcome in done),
        "output_tokens": out_tokens,
        "output_tok_per_s": out_tokens * per_s,
        "output_tok_per_s_per_user": out_tokens * per_s / users if users else None,
        "goodput_per_s": good * per_s,
        "goodput_rate": good / counted if counted else 0.0,
        "acceptance": sum(tokens - 1 for tokens, _ in pairs) / frames if frames else None,
        "ttft_s": spread(o.ttft_s for o in streams),
        "tpot_s": spread(o.tpot_s for o in streams),
        "chunk_gap_s": spread(gap for o in streams for gap in o.gaps),
        "tokens_per_chunk": spread(o.tokens_per_frame for o in streams),
        "e2e_s": spread(o.end_s for o in done),
        "connect_s": spread(o.connect_s for o in outcomes),
        "late_s": spread(o.late_s for o in outcomes),
    }


def by_workload(outcomes: Sequence[Outcome], elapsed_s: float, goodput: dict[str, float]) -> dict[str, Summary]:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.workload].append(outcome)
    return {name: summarise(group, elapsed_s, 0, goodput) for name, group in sorted(groups.items())}


def levels(
    outcomes: Sequence[Outcome], steps: Sequence[tuple[float, float, int]], goodput: dict[str, float]
) -> list[dict[str, Any]]:
    """Per step of a stepped load (begin, end, users): the requests that began under its load and ended within it."""
    rows = []
    for begin, end, users in steps:
        inside = [o for o in outcomes if o.users == users and begin <= o.started and o.started + o.end_s <= end]
        rows.append({"users": users, "begin": begin, **summarise(inside, end - begin, users, goodput)})
    return rows


def knee(rows: Sequence[dict[str, Any]]) -> int | None:
    """Users at which throughput over mean latency, Kleinrock's power, is largest; None where nothing completed."""
    power = {row["users"]: row["output_tok_per_s"] / row["e2e_s"]["mean"] for row in rows if row["e2e_s"] is not None}
    return max(power, key=lambda users: power[users]) if power else None
