"""`python -m dashboards` writes dashboards/grafana/*.json; `--check` fails where they differ."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dashboards.boards import BOARDS

JSON_DIRECTORY = Path(__file__).resolve().parent / "grafana"


def generated() -> dict[str, str]:
    """File name → content."""
    return {f"{board.uid}.json": json.dumps(board.json(), indent=1, ensure_ascii=False) + "\n" for board in BOARDS}


def differing() -> list[str]:
    """Files that are missing, left over, or not what the generator makes."""
    wanted = generated()
    there = {path.name: path.read_text() for path in JSON_DIRECTORY.glob("*.json")}
    return sorted(name for name in wanted | there if wanted.get(name) != there.get(name))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args(argv).check:
        print("\n".join(f"{name} differs from its generator" for name in differing()) or "up to date")
        return 1 if differing() else 0
    JSON_DIRECTORY.mkdir(exist_ok=True)
    for path in JSON_DIRECTORY.glob("*.json"):
        path.unlink()
    for name, text in generated().items():
        (JSON_DIRECTORY / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
