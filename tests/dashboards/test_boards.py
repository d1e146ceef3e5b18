"""The checked-in dashboards: made by the generator, described, and over series that exist."""

import itertools
import re
from typing import Any

import pytest

from dashboards.__main__ import differing
from dashboards.boards import ABSENT_ON_CPU, BOARDS
from dashboards.expressions import Expression, boards, expressions, panels
from dashboards.selectors import names
from tests.dashboards.exported import exported

EXPRESSIONS = list(expressions())
PANELS = [(uid, panel) for uid, board in boards().items() for panel in panels(board)]


def name_of(value: Any) -> str | None:
    if isinstance(value, Expression):
        return f"{value.board}/{value.panel}"
    return value["title"] if isinstance(value, dict) else None


def test_the_json_is_what_the_generator_makes() -> None:
    assert differing() == []


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=name_of)
def test_every_series_and_label_is_exported(expression: Expression) -> None:
    found = names(expression.text)
    assert found.selectors
    for name, labels, _ in found.selectors:
        assert name in exported(), f"{name} is not exported"
        assert labels <= exported()[name], f"{name} has no label {sorted(labels - exported()[name])}"
    known = frozenset().union(*(exported()[name] for name, _, _ in found.selectors))
    assert found.grouped <= known


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=name_of)
def test_legends_use_labels_that_the_result_has(expression: Expression) -> None:
    assert set(re.findall(r"{{(\w+)}}", expression.legend)) <= names(expression.text).grouped


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=name_of)
def test_every_selector_obeys_the_dashboards_variables(expression: Expression) -> None:
    for name, _, text in names(expression.text).selectors:
        assert ("$host" if name.startswith("DCGM") else "$job") in text


@pytest.mark.parametrize(("uid", "panel"), PANELS, ids=name_of)
def test_panels_say_what_they_show_and_in_which_unit(uid: str, panel: dict[str, Any]) -> None:
    assert panel["title"] and panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("board", boards().values(), ids=name_of)
def test_panels_lie_beside_each_other(board: dict[str, Any]) -> None:
    for one, other in itertools.combinations([panel["gridPos"] for panel in board["panels"]], 2):
        apart = (
            one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        )  # fmt: skip
        assert apart and one["x"] + one["w"] <= 24


@pytest.mark.parametrize("board", boards().values(), ids=name_of)
def test_boards_share_one_schema_and_have_ids_of_their_own(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] == 42 and board["uid"].startswith("ddtree-")
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_what_is_absent_on_a_cpu_is_a_panel() -> None:
    assert set(ABSENT_ON_CPU) <= {(board.uid, panel.title) for board in BOARDS for panel in board.panels}
