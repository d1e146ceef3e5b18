"""The page that draws panels, with and without Chromium."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dashboards.expressions import boards, panels
from dashboards.pictures.__main__ import CHROMIUM, WIDTH, draw, height, page
from dashboards.pictures.results import legend

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "images"


def results(board: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Two buckets, depths or lines for every panel but the first, which has none."""
    points = [[float(at), float(at % 7)] for at in range(100)]
    series = [{"labels": {"le": le, "replica": "a"}, "legend": le, "points": points} for le in ("1.0", "+Inf")]
    return [[], *([series] * (len(panels(board)) - 1))]


def test_legends_are_filled_from_labels() -> None:
    assert legend("{{role}}: {{reason}}", {"role": "draft", "reason": "no_cuda"}) == "draft: no_cuda"
    assert legend("__auto", {"b": "2", "a": "1"}) == "a=1, b=2"


def test_the_pages_data_cannot_end_its_script() -> None:
    board = {**boards()["ddtree-nodes"], "title": "</script>"}
    html = page(board, results(board), 0, 100)
    data = html.split('type="application/json">')[1].split("</script>")[0]
    assert json.loads(data)["board"]["title"] == "</script>"


@pytest.mark.parametrize("uid", sorted(boards()))
def test_the_docs_show_every_board(uid: str) -> None:
    text = (DOCS.parent / "monitoring.md").read_text()
    assert f"(images/{uid}.png)" in text and (DOCS / f"{uid}.png").stat().st_size < 400_000


@pytest.mark.parametrize("uid", ["ddtree-overview", "ddtree-speculation"])
def test_chromium_draws_every_kind_of_panel(uid: str, tmp_path: Path) -> None:
    chromium = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("no Chromium on the PATH")
    board = boards()[uid]
    image = pytest.importorskip("matplotlib.image")
    draw(chromium, page(board, results(board), 0, 99), (WIDTH, height(board)), tmp_path / "board.png")
    drawn = image.imread(tmp_path / "board.png")
    assert drawn.shape[:2] == (height(board), WIDTH)
    # The lowest line has panels too: a script that failed half-way would have left it blank.
    assert drawn[-120:, :, :3].std() > 0.01
