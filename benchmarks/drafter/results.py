"""Turn the logs of a training run into docs/results: acceptance of first and final drafter, and the learning curve.

python -m benchmarks.drafter.results --before compare.log --log train1.log train2.log --out docs/results
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from benchmarks.drafter.heldout import BUDGETS


def read(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a log; other lines are skipped."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def full(events: list[dict[str, Any]], last: bool) -> dict[str, Any]:
    """The first or last held-out report that has trees."""
    reports = [e for e in events if e["event"] == "held-out" and "tree32" in e["T0.0 block16"]]
    return {k: v for k, v in reports[-1 if last else 0].items() if k.startswith("T")}


def curve(logs: list[list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Acceptance and loss over the run, {"fresh": one a slot, "held_out": one a report}, by seconds of the schedule."""
    fresh, held = [], []
    for events in logs:
        spent = 0.0
        for e in events:
            if e["event"] == "train":
                spent = e["spent"]
                names = ("steps", "spent", "lr", "fresh_chain", "loss", "hit")
                fresh.append({name: e[name] for name in names})
            if e["event"] == "held-out" and (spent or not held):
                held.append(
                    {
                        "spent": spent,
                        "greedy_chain": e["T0.0 block16"]["chain"],
                        "sampled_chain": e["T0.8 block16"]["chain"],
                    }
                )
    return {"fresh": fresh, "held_out": held}


def trials_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trials of a compare.py log, each with the held-out chains that were logged after it."""
    found = []
    for trial, report in itertools.pairwise(events):
        if trial["event"] == "trial":
            chains = {"greedy": report["T0.0 block16"]["chain"], "T=0.8": report["T0.8 block16"]["chain"]}
            found.append(
                {k: trial[k] for k in ("name", "steps", "per_second", "fresh_chain")} | {"held_out_chain": chains}
            )
    return found


def plot_acceptance(drafters: dict[str, Any], path: Path) -> None:
    """Means by tree size, and conditional acceptance by depth in the 32-node tree."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for colour, (name, sets) in zip(("C7", "C0"), drafters.items(), strict=True):
        for key, style, text in (("T0.0 block16", "o-", "greedy"), ("T0.8 block16", "s--", "T = 0.8")):
            left.plot(BUDGETS, [sets[key][f"tree{b}"] for b in BUDGETS], style, color=colour, label=f"{name}, {text}")
            left.axhline(sets[key]["chain"], color=colour, lw=0.8, ls=":")
            right.plot(range(1, 16), sets[key]["tree32 by depth"], style, color=colour, label=f"{name}, {text}")
    left.set(xscale="log", xlabel="tree nodes (dotted: chain)", ylabel="acceptance length", ylim=(1, None))
    left.set_xticks(BUDGETS, [str(b) for b in BUDGETS])
    right.set(xlabel="depth", ylabel="accepted | reached, 32-node tree", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_curve(points: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Chain acceptance over seconds of writing and training, with the learning rate's shape behind it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    fresh, held = points["fresh"], points["held_out"]
    axes.plot(
        [p["spent"] for p in fresh],
        [p["fresh_chain"] for p in fresh],
        ".",
        color="C7",
        label="fresh training prompts, every anchor",
    )
    axes.plot(
        [p["spent"] for p in held], [p["greedy_chain"] for p in held], "o-", color="C0", label="held out, greedy chain"
    )
    axes.plot(
        [p["spent"] for p in held],
        [p["sampled_chain"] for p in held],
        "s-",
        color="C1",
        label="held out, T = 0.8 chain",
    )
    rate = axes.twinx()
    rate.fill_between([p["spent"] for p in fresh], [p["lr"] for p in fresh], color="C2", alpha=0.12)
    rate.set(ylabel="learning rate (shaded)", ylim=(0, None))
    axes.set(xlabel="seconds of writing and training on one H200", ylabel="acceptance length", ylim=(1, 8.5))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--before", type=Path, required=True, help="log with a full report of the drafter that training began with"
    )
    p.add_argument("--log", type=Path, nargs="+", required=True, help="logs of the training calls in order")
    p.add_argument("--trials", type=Path, nargs="*", default=[], help="logs of compare.py")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--note", nargs="*", default=[], help="KEY=VALUE facts for the report")
    args = p.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    logs = [read(path) for path in args.log]
    drafters = {"first drafter": full(read(args.before), False), "this drafter": full(logs[-1], True)}
    trials = [trial for path in args.trials for trial in trials_of(read(path))]
    report = {**dict(n.split("=", 1) for n in args.note), "drafters": drafters, "trials": trials}
    (args.out / "drafter_eval.json").write_text(json.dumps(report, indent=1) + "\n")
    points = curve(logs)
    (args.out / "drafter_training.json").write_text(json.dumps(points, indent=1) + "\n")
    plot_acceptance(drafters, args.out / "drafter_eval.png")
    plot_curve(points, args.out / "drafter_training.png")


if __name__ == "__main__":
    main()
