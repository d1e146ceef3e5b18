"""The gate, comparisons, the reading of /metrics, and which addresses may be tested."""

import json
from pathlib import Path

import pytest

from load_tests import compare, scrape, slo
from load_tests.page import flat, render
from load_tests.report import SCHEMA
from load_tests.target import TargetError, check_loopback

SUMMARY = {"failure_rate": 0.0, "completed": 3, "ttft_s": {"p95": 1.5}, "tpot_s": None}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("ttft_s.p95<=1.5", True),
        ("ttft_s.p95<1.5", False),
        ("ttft_s.p95 >= 1e-3", True),
        ("completed>3", False),
        ("tpot_s.p95<=1", False),
        ("nonsense<=1", False),
    ],
)
def test_conditions(condition: str, holds: bool) -> None:
    assert slo.check(condition, SUMMARY).holds is holds


@pytest.mark.parametrize("condition", ["ttft", "ttft_s.p95=1", "ttft_s.p95<=fast", ""])
def test_a_condition_that_cannot_be_read_is_refused(condition: str) -> None:
    with pytest.raises(ValueError):
        slo.check(condition, SUMMARY)


def test_nothing_measured_never_passes() -> None:
    assert not all(verdict.holds for verdict in slo.gate([], {"completed": 0}))


def test_goodput_limits() -> None:
    assert slo.parse_goodput("ttft=1.0,tpot=0.1") == {"ttft": 1.0, "tpot": 0.1}
    with pytest.raises(ValueError):
        slo.parse_goodput("speed=1")


def report(**summary: object) -> dict[str, object]:
    return {"schema": SCHEMA, "config": {"seed": 1}, "facts": {"commit": "a"}, "summary": {**SUMMARY, **summary}}


def test_two_reports_are_compared_as_ratios_and_their_setups_named(tmp_path: Path) -> None:
    for name, value in (("a", report()), ("b", {**report(completed=6), "facts": {"commit": "b"}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(value))
    first, second = (compare.load(tmp_path / name) for name in "ab")
    assert ("completed", 3, 6, 2.0) in compare.ratios(first, second)
    assert list(compare.differences(first["facts"], second["facts"], "facts")) == ["facts.commit: a → b"]
    assert "completed" in compare.text(first, second)


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        compare.load(tmp_path)


def test_numbers_of_a_summary_by_path() -> None:
    assert flat(SUMMARY) == {"failure_rate": 0.0, "completed": 3, "ttft_s.p95": 1.5}


PAGE = """# TYPE ddtree_graph_fallbacks_total counter
ddtree_graph_fallbacks_total{model="m",reason="no_cuda",role="target",replica="a"} 5.0
ddtree_graph_fallbacks_total{model="m",reason="no_cuda",role="draft",replica="a"} 3.0
ddtree_acceptance_length_sum{model="m",replica="a"} 30.0
ddtree_acceptance_length_count{model="m",replica="a"} 10.0
ddtree_acceptance_length_bucket{model="m",le="1.0"} 1.0
ddtree_running_requests 2.0
"""


def test_series_are_read_with_their_labels() -> None:
    page = scrape.parse(PAGE)
    assert scrape.total(page, "ddtree_graph_fallbacks_total", role="draft") == 3
    assert scrape.by_label(page, "ddtree_graph_fallbacks_total", "role", "reason") == {
        "target/no_cuda": 5, "draft/no_cuda": 3,
    }  # fmt: skip
    assert scrape.total(page, "ddtree_running_requests") == 2


def test_the_server_is_told_by_what_changed() -> None:
    before = scrape.parse(PAGE)
    after = scrape.parse(PAGE.replace("30.0", "70.0").replace("10.0", "20.0").replace("5.0", "8.0"))
    change = scrape.change(before, after, 2.0)
    assert change["acceptance"] == 4.0
    assert change["fallbacks"] == {"target/no_cuda": 3}


def test_a_replaced_process_counts_from_zero() -> None:
    assert scrape.grown({"a": 10.0}, {"a": 4.0}) == {"a": 4.0}


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost:1/", "http://[::1]:8000", "http://127.3.2.1"]
)
def test_this_machine_may_be_tested(url: str) -> None:
    assert check_loopback(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1", "http://0.0.0.0:8000", "https://127.0.0.1", "127.0.0.1:80", "http://"]
)
def test_no_other_may(url: str) -> None:
    with pytest.raises(TargetError):
        check_loopback(url)


def test_a_page_escapes_what_it_shows() -> None:
    empty: dict[str, object] = dict.fromkeys(
        ("requests", "completed", "abandoned", "failed", "requests_per_s", "output_tok_per_s", "goodput_rate",
         "prompt_tokens", "output_tokens",
         "output_tok_per_s_per_user", "acceptance", "ttft_s", "tpot_s", "chunk_gap_s", "tokens_per_chunk", "e2e_s",
         "connect_s", "late_s")
    )  # fmt: skip
    page = render(
        {"summary": {**empty, "elapsed_s": 1.0, "failures": {"<b>": 1}}, "workloads": {}, "levels": [], "slo": [],
         "server": {}, "started": "", "client_lag_s": None, "facts": {"version": 1, "commit": 1},
         "config": {"shape": {"kind": "constant", "users": 1, "rate": 1.0}}},
        {},
    )  # fmt: skip
    assert "<b>" not in page and "&lt;b&gt;" in page
