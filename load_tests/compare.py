"""Two reports as ratios, and what makes them hard to compare.

What this module does not do: judge; on shared machines a ratio within a tenth says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from load_tests.page import flat
from load_tests.report import SCHEMA

MEASURES = (
    "completed", "failure_rate", "requests_per_s", "output_tok_per_s", "output_tok_per_s_per_user", "goodput_rate",
    "acceptance", "ttft_s.p50", "ttft_s.p95", "ttft_s.p99", "tpot_s.p50", "tpot_s.p95", "tpot_s.p99",
    "chunk_gap_s.p50", "chunk_gap_s.p95", "tokens_per_chunk.mean", "e2e_s.p50", "e2e_s.p95",
)  # fmt: skip
# Differ between any two runs and say nothing about what was measured.
_ASIDE = ("config.out", "config.url", "facts.load_average_at_start", "facts.server.internal_states")


def load(path: Path) -> dict[str, Any]:
    """A report, given its file or its folder. Raises ValueError."""
    file = path / "report.json" if path.is_dir() else path
    try:
        report: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a report: {error}") from None
    if report.get("schema") != SCHEMA:
        raise ValueError(f"{file} is not a report of schema {SCHEMA}")
    return report


def ratios(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, float, float, float | None]]:
    """(measure, first, second, second over first) of everything both measured."""
    a, b = flat(first["summary"]), flat(second["summary"])
    return [
        (name, a[name], b[name], b[name] / a[name] if a[name] else None) for name in MEASURES if name in a and name in b
    ]


def differences(first: Any, second: Any, path: str = "") -> Iterator[str]:
    """Settings, versions and machine that are not the same."""
    if path.startswith(_ASIDE):
        return
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in sorted({*first, *second}):
            yield from differences(first.get(key), second.get(key), f"{path}.{key}".lstrip("."))
    elif first != second:
        yield f"{path}: {first} → {second}"


def text(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """The comparison as a table for people."""
    lines = [f"{'measure':<28}{'first':>12}{'second':>12}{'ratio':>9}"]
    for name, a, b, ratio in ratios(first, second):
        lines.append(f"{name:<28}{a:>12.4g}{b:>12.4g}{'–' if ratio is None else f'{ratio:.3f}':>9}")
    keys = ("config", "facts")
    apart = list(differences({key: first[key] for key in keys}, {key: second[key] for key in keys}))
    return "\n".join(
        [*lines, "", "the same setup" if not apart else "different setups:", *(f"  {line}" for line in apart)]
    )
