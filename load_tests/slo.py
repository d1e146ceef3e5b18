"""The gate: conditions on a report's summary, and whether they hold.

What this module does not do: measure.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_CONDITION = re.compile(r"^\s*([\w.]+)\s*(<=|>=|<|>)\s*([-+.\deE]+)\s*$")
DEFAULT = ("failure_rate<=0",)


@dataclass(frozen=True)
class Verdict:
    condition: str
    value: float | None
    holds: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(condition: str, summary: Mapping[str, Any]) -> Verdict:
    """`ttft_s.p95<=2.0`: a dotted path into the summary, a comparison, a number. What was not measured does not hold.

    Raises:
        ValueError: the condition cannot be read.
    """
    match = _CONDITION.match(condition)
    if match is None:
        raise ValueError(f"cannot read the condition {condition!r}; write for example ttft_s.p95<=2.0")
    path, comparison, limit = match.groups()
    node: Any = summary
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    value = float(node) if isinstance(node, (int, float)) else None
    return Verdict(condition, value, value is not None and _OPERATORS[comparison](value, float(limit)))


def gate(conditions: Sequence[str], summary: Mapping[str, Any]) -> list[Verdict]:
    """Every condition, and that anything was measured at all."""
    return [check(condition, summary) for condition in (*conditions, "completed>=1")]


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft=1.0,tpot=0.1` → limits in seconds. Raises ValueError."""
    limits = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise ValueError(f"goodput knows ttft, tpot and e2e, not {name!r}")
        limits[name] = float(value)
    return limits
