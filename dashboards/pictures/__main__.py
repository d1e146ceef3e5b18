"""`python -m dashboards.pictures --prometheus URL` draws every dashboard into a PNG in docs/images."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dashboards.boards import ABSENT_ON_CPU
from dashboards.expressions import boards, panels
from dashboards.pictures.results import board_results

PAGE = Path(__file__).resolve().parent / "page.html"
DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "images"
# The page's own measures, in pixels.
WIDTH, LINE, TOP = 1460, 26, 34
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def page(board: dict[str, Any], results: list[Any], start: float, end: float) -> str:
    """The HTML that draws a board."""
    absent = {title: reason for (uid, title), reason in ABSENT_ON_CPU.items() if uid == board["uid"]}
    data = {"board": board, "results": results, "absent": absent, "start": start, "end": end}
    return PAGE.read_text().replace("__DATA__", json.dumps(data).replace("</", "<\\/"))


def height(board: dict[str, Any]) -> int:
    return TOP + LINE * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels(board)) + 10


def draw(chromium: str, html: str, size: tuple[int, int], to: Path) -> None:
    """Raises CalledProcessError, or TimeoutExpired after two minutes."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "page.html"
        source.write_text(html)
        subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={directory}/profile", f"--window-size={size[0]},{size[1]}", f"--screenshot={to}",
             source.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dashboards.pictures", description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=5, help="how far back (default: %(default)s)")
    parser.add_argument("--end", type=float, default=time.time(), help="Unix time (default: now)")
    parser.add_argument("--rate-interval", default="15s")
    parser.add_argument("--out", type=Path, default=DOCS)
    options = parser.parse_args(argv)
    chromium = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if chromium is None:
        print("error: no Chromium on the PATH", file=sys.stderr)
        return 1
    end = options.end
    start = end - 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    for uid, board in boards().items():
        results = board_results(board, options.prometheus, start, end, options.rate_interval)
        draw(chromium, page(board, results, start, end), (WIDTH, height(board)), options.out / f"{uid}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
