"""The report: what was measured beside what was aimed for, as JSON and as a page.

What this module does not do: measure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SIDES = ("http", "engine", "sglang")
LEAST_RATIO = 0.95
MOST_TTFT_ADDED_MS = 3.0
# Of the answers of drafted decoding that a token a step gives as well: near-ties between tokens fall anew in another
# batch, in about one of five answers of 128 tokens in float16. Wrong verification leaves next to none.
LEAST_AS_AR = 0.5
MODES = {"throughput": "DDTREE", "dflash": "DFLASH", "ar": "AR"}


def compare(http: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """HTTP against the engine in process, of one load: the ratio of tokens/s, and milliseconds added to each TTFT
    quantile; None where either was not measured."""
    rates = http.get("tok_s"), engine.get("tok_s")
    a, b = http.get("ttft_ms"), engine.get("ttft_ms")
    return {
        "ratio": round(rates[0] / rates[1], 4) if all(rates) else None,
        "ttft_added_ms": {q: round(a[q] - b[q], 3) for q in ("p50", "p95", "p99")} if a and b else None,
    }


def targets(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was aimed for and what came out; `met` is None where it was not measured. Judged for DDTREE."""
    levels = report["stages"].get("throughput", {}).get("levels", {})
    found: list[dict[str, Any]] = []
    for streams, level in levels.items():
        ratio = level["compared"]["ratio"]
        found.append(_target(f"HTTP / in process, tokens/s, {streams} streams", f">= {LEAST_RATIO}", ratio,
                             None if ratio is None else ratio >= LEAST_RATIO))  # fmt: skip
    for streams, level in levels.items():
        added = (level["compared"]["ttft_added_ms"] or {}).get("p50")
        found.append(_target(f"TTFT added, p50 ms, {streams} streams", f"<= {MOST_TTFT_ADDED_MS:g}", added,
                             None if added is None else added <= MOST_TTFT_ADDED_MS))  # fmt: skip
    counted = report["stages"].get("throughput", {}).get("http_counters")
    # Without any forward counted nothing is known.
    any_counted = counted is not None and (counted["replays"] or counted["fallbacks"])
    eager = sum(counted["fallbacks"].values()) if any_counted else None
    found.append(_target("fallbacks after warm-up", "0", eager, None if eager is None else eager == 0))
    for name, levels in _modes(report["stages"]).items():
        shares = [share["equal"] / share["of"] for level in levels.values() if (share := level.get("as_ar"))]
        if name != "AR":
            found.append(_target(f"least share of answers that are AR's, {name}", f">= {LEAST_AS_AR}",
                                 round(min(shares), 3) if shares else None,
                                 min(shares) >= LEAST_AS_AR if shares else None))  # fmt: skip
    panels = report["stages"].get("panels", {})
    empty = panels.get("without_data")
    found.append(_target("panels without data", "0", None if empty is None else len(empty),
                         None if empty is None else not empty))  # fmt: skip
    return found


def _target(what: str, aim: str, value: Any, met: bool | None) -> dict[str, Any]:
    return {"what": what, "aim": aim, "value": value, "met": met}


def write(report: dict[str, Any], folder: Path) -> None:
    """report.json and report.md, whole or not at all."""
    report["targets"] = targets(report)
    for name, text in (("report.json", json.dumps(report, indent=1) + "\n"), ("report.md", page(report))):
        part = folder / f".{name}"
        part.write_text(text)
        part.replace(folder / name)


def page(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    parts = ["# The whole stack on a GPU machine", _facts(report["facts"]), _targets(report["targets"])]
    parts += [modes] if (modes := _side_by_side(report["stages"])) else []
    for name, stage in report["stages"].items():
        seconds = report["seconds"].get(name)
        parts.append(f"## {name} ({seconds} s)")
        parts.append(_stage(name, stage))
    return "\n\n".join(parts) + "\n"


def _modes(stages: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The levels of the modes that were measured, by name."""
    return {word: stages[name]["levels"] for name, word in MODES.items() if stages.get(name, {}).get("levels")}


def _side_by_side(stages: Mapping[str, Any]) -> str:
    """Of several modes: tokens/s over HTTP, and in brackets how many answers are AR's."""
    found = _modes(stages)
    if len(found) < 2:
        return ""

    def cell(level: Mapping[str, Any]) -> str:
        share = level.get("as_ar")
        return f"{level.get('http', {}).get('tok_s')}" + (f" ({share['equal']} of {share['of']})" if share else "")

    streams = list(dict.fromkeys(n for levels in found.values() for n in levels))
    rows = [(n, *(cell(levels[n]) if n in levels else None for levels in found.values())) for n in streams]
    return _table(("streams, tokens/s over HTTP (answers that are AR's)", *found), rows)


def _facts(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _targets(rows: Iterable[Mapping[str, Any]]) -> str:
    words = {True: "met", False: "**missed**", None: "not measured"}
    return _table(("target", "aim", "value", ""), ((r["what"], r["aim"], r["value"], words[r["met"]]) for r in rows))


def _stage(name: str, stage: Mapping[str, Any]) -> str:
    if "failed" in stage:
        failed = f"**failed**: {stage['failed'][-1500:]}"
        rest = {key: value for key, value in stage.items() if key != "failed"}
        return "\n\n".join([failed, *([_stage(name, rest)] if rest else [])])
    if "levels" in stage:
        return _throughput(stage)
    if "checks" in stage:
        checks: Mapping[str, str] = stage["checks"]
        wrong = {check: said for check, said in checks.items() if said != "ok"}
        lines = [f"{len(checks) - len(wrong)} of {len(checks)} as they must be."]
        return "\n".join([*lines, *(f"- **{check}**: {said}" for check, said in wrong.items())])
    return "```\n" + json.dumps(stage, indent=1)[:6000] + "\n```"


def _throughput(stage: Mapping[str, Any]) -> str:
    head = ("streams", "side", "tok/s", "TTFT p50/p95/p99 ms", "mean, in SGLang + outside, ms",
            "ITL p50/p95/p99 ms", "TPOT p50 ms", "tokens/chunk",
            "acceptance", "against in process")  # fmt: skip
    rows = []
    for streams, level in stage["levels"].items():
        for side in SIDES:
            numbers = level.get(side) or {}
            if not numbers.get("requests"):
                continue
            compared = level["compared"] if side == "http" else {}
            said = ""
            if compared.get("ratio") is not None:
                said = f"× {compared['ratio']}, TTFT {compared['ttft_added_ms']['p50']:+} ms"
            parts = numbers.get("ttft_in_sglang_ms"), numbers.get("ttft_outside_ms")
            rows.append((streams, side, numbers["tok_s"], _three(numbers["ttft_ms"]),
                         None if None in parts else f"{parts[0]} + {parts[1]}", _three(numbers["itl_ms"]),
                         (numbers["tpot_ms"] or {}).get("p50"), numbers["tokens_per_chunk"],
                         numbers["acceptance_length"], said))  # fmt: skip
    lines = [_table(head, rows), _table(("streams", "side", "what its processes did"), _work(stage["levels"]))]
    for name in ("http_counters", "engine_counters"):
        if stage.get(name):
            lines.append(f"{name}: {json.dumps(stage[name])}")
    others = {key: value for key, value in stage.items() if not isinstance(value, (dict, list))}
    lines.append(json.dumps(others))
    return "\n\n".join(lines)


def _work(levels: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    sides = ((n, side, level.get(side, {}).get("work")) for n, level in levels.items() for side in SIDES)
    return [(n, side, json.dumps(work).replace('"', "")) for n, side, work in sides if work]


def _three(spread: Mapping[str, float] | None) -> str:
    return "–" if spread is None else " / ".join(str(spread[q]) for q in ("p50", "p95", "p99"))


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([("–" if cell is None else str(cell)) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
